"""The way out of an added image on a Docker engine: a container beside it, whose network the image's own container joins.

Neither has a network but its loopback. There the sidecar's forwarder makes the door to the egress proxy an ordinary HTTP
proxy, which the image can't end or replace: it is another container's process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version

from toolserver.errors import RuntimeUnavailable
from toolserver.runtime.base import Limits, SandboxSpec
from toolserver.runtime.docker_engine import DockerEngine, NotInEngine
from toolserver.runtime.docker_launcher import ROLE
from toolserver.runtime.docker_stream import AttachedStream
from toolserver.runtime.hardening import create_request

EGRESS_IMAGE = "toolcrib/egress"
_FORWARDER = "/opt/toolcrib/sandbox_images/base/forwarder.py"
_LIMITS = Limits(memory_mb=64, cpus=0.5, pids=16, disk_mb=1)
_MAX_LINE = 1000


def name_of(sandbox: str) -> str:
    """Of the sidecar of the container with this name."""
    return f"{sandbox}-egress"


def sidecar_spec(spec: SandboxSpec) -> SandboxSpec:
    """Held to the same as every sandbox, and small."""
    assert spec.door is not None  # noqa: S101 - asked for those alone
    return replace(
        spec,
        reference=f"{EGRESS_IMAGE}:{version('toolcrib')}",
        command=("python3", "-I", "-S", _FORWARDER, spec.door),
        arguments=(),
        limits=_LIMITS,
        workspace="none",
        env={},
        egress=True,
        door=None,
        foreign=False,
        working_dir=None,
    )


async def start_sidecar(
    engine: DockerEngine,
    spec: SandboxSpec,
    name: str,
    *,
    labels: Mapping[str, str],
    doors: str,
    private_cgroup: bool,
    gvisor: str | None,
    timeout_s: float,
) -> None:
    """For `spec`, under this name, up to a door that answers. `doors`: the volume with them. Fails closed.

    Raises RuntimeUnavailable, Refused, NotInEngine: what is left of it then is the caller's to remove.
    """
    beside = sidecar_spec(spec)
    request = create_request(
        beside,
        labels={**labels, ROLE: "egress"},
        volume=None,
        private_cgroup=private_cgroup,
        gvisor=gvisor,
        doors=doors,
    )
    try:
        container = await engine.create(request, name)
    except NotInEngine as missing:
        raise RuntimeUnavailable(
            f"The Docker engine has no image {beside.reference}, the way out of added images. Build it: toolserver images build"
        ) from missing
    stream = await AttachedStream.over_two(
        await engine.attach(container, ["stdin"]), await engine.attach(container, ["stdout", "stderr"])
    )
    try:
        await engine.call(lambda client: client.start(container), timeout_s=timeout_s)
        async with asyncio.timeout(timeout_s):
            ready = await stream.line(_MAX_LINE) == b"ready"
            if not ready:
                await stream.drain()
    except TimeoutError as late:
        raise RuntimeUnavailable(f"The way out of the image {spec.image} was not ready in time.") from late
    finally:
        await stream.close()
    if not ready:
        raise RuntimeUnavailable(f"The image {spec.image} has no way out now: {stream.log.text().strip()[-500:]}")
