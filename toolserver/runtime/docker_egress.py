"""The egress proxy on a Docker engine: a container on the engine's network, and the volume with the doors.

Both are known to the engine by name and label alone, so it is the same where the ToolServer is itself a container. The proxy's
stdin ends with the server's process, and the proxy with that; what is left of one is taken by the next server.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from toolserver.errors import RuntimeUnavailable
from toolserver.runtime.base import Sandbox, SandboxSpec
from toolserver.runtime.docker_engine import DockerEngine, NotInEngine, Refused
from toolserver.runtime.docker_launcher import ROLE
from toolserver.runtime.docker_sandbox import Containers, DockerSandbox
from toolserver.runtime.docker_sidecar import EGRESS_IMAGE
from toolserver.runtime.docker_stream import AttachedStream
from toolserver.runtime.hardening import CONTAINER, EGRESS_LIMITS, egress_request

SANDBOX = "toolcrib.sandbox"
_PROXY, _DOORS = "egress-proxy", "doors"


class DockerEgress:
    """`labels`: the server's. `network`: that of the engine which the proxy is on. `own`: ids of proxies that are in use."""

    def __init__(
        self, engine: DockerEngine, containers: Containers, prefix: str, labels: Mapping[str, str], network: str
    ) -> None:
        self._engine, self._containers, self._prefix = engine, containers, prefix
        self._labels, self._network = dict(labels), network
        self.volume = f"{prefix}-egress"
        self._made, self._left = False, False
        self._making = asyncio.Lock()
        self._running: dict[str, DockerSandbox] = {}

    @property
    def own(self) -> frozenset[str]:
        return frozenset(self._running)

    async def make_volume(self) -> None:
        """Raises RuntimeUnavailable."""
        async with self._making:
            if self._made:
                return
            labels = {**self._labels, ROLE: _DOORS}
            try:
                await self._engine.call(lambda client: client.create_volume(self.volume, labels=labels))
            except (Refused, NotInEngine) as no:
                raise RuntimeUnavailable("The Docker engine would not make the volume of the egress proxy.") from no
            self._made = True

    async def start(self, timeout_s: float, *, private_cgroup: bool) -> DockerSandbox:
        """Raises RuntimeUnavailable: then nothing is left of it."""
        await self.make_volume()
        reference = f"{EGRESS_IMAGE}:{version('toolcrib')}"
        spec = SandboxSpec(
            f"egress-{secrets.token_hex(6)}", "", "egress", reference, (), EGRESS_LIMITS, workspace="none"
        )
        labels = {**self._labels, ROLE: _PROXY, SANDBOX: spec.sandbox_id}
        request = egress_request(
            reference, labels=labels, doors=self.volume, network=self._network, private_cgroup=private_cgroup
        )
        name, stream = f"{self._prefix}-{spec.sandbox_id}", None
        try:
            await self._end_earlier()
            container = await self._engine.create(request, name)
            stream = await AttachedStream.over(await self._engine.attach(container))
            await self._engine.call(lambda client: client.start(container), timeout_s=timeout_s)
        except BaseException as problem:
            if stream is not None:
                await stream.close()
            await self._containers.remove_or_remember(name)
            if isinstance(problem, NotInEngine):
                raise RuntimeUnavailable(
                    f"The Docker engine has no image {reference}, or no network {self._network}: nothing can be reached. Build the "
                    "image (toolserver images build egress), or set TOOLSERVER_EGRESS__DOCKER_NETWORK."
                ) from problem
            if isinstance(problem, Refused):
                raise RuntimeUnavailable("The Docker engine could not start the egress proxy.") from problem
            raise
        made = self._running[spec.sandbox_id] = DockerSandbox(spec, self._containers, container, stream, self._forget)
        return made

    async def problem(self) -> str | None:
        """Why it can't be started, of what can be seen without. Raises RuntimeUnavailable."""
        try:
            await self._engine.image(f"{EGRESS_IMAGE}:{version('toolcrib')}")
        except (NotInEngine, Refused):
            return "Its image is not built: toolserver images build egress"
        other = self._network.removeprefix(CONTAINER) if self._network.startswith(CONTAINER) else None
        try:
            if other is not None:
                await self._engine.call(lambda client: client.inspect_container(other))
            else:
                await self._engine.call(lambda client: client.inspect_network(self._network))
        except (NotInEngine, Refused):
            return (
                f"The engine has no network {self._network}: set TOOLSERVER_EGRESS__DOCKER_NETWORK to one that it has."
            )
        return None

    def _forget(self, sandbox: Sandbox) -> None:
        self._running.pop(sandbox.spec.sandbox_id, None)

    async def _end_earlier(self) -> None:
        """Those of servers before this one, and those of its own that are given up. Raises Refused, RuntimeUnavailable."""
        mine = {"label": [f"{name}={value}" for name, value in {**self._labels, ROLE: _PROXY}.items()]}
        for one in await self._engine.call(lambda client: client.containers(all=True, filters=mine)):
            try:
                await self._containers.remove(one["Id"])
            except Refused as no:
                if no.status != 409:  # 409: somebody removes it already
                    raise

    def note(self, volumes: list[dict[str, Any]]) -> None:
        """Of what an inventory found."""
        self._left = any((volume.get("Labels") or {}).get(ROLE) == _DOORS for volume in volumes)

    async def close(self) -> None:
        """Leave nothing; the volume stays while a sandbox has it. Raises RuntimeUnavailable, Refused."""
        for sandbox in list(self._running.values()):
            await sandbox.remove()
        if self._made or self._left:
            self._made = self._left = False
            try:
                await self._engine.call(lambda client: client.remove_volume(self.volume))
            except NotInEngine:
                pass
            except Refused as no:
                if no.status != 409:  # in use
                    raise
