"""How an image that others made is started on a Docker engine: what it says of itself, and the launcher that begins it.

The launcher (sandbox_images/launcher) is PID 1 and a script, all static, in a volume that is mounted read-only: so nothing is
asked of the image. It takes the secrets from the first lines of stdin, which no inspection of the container shows.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from toolserver.errors import ImageUnusable, RuntimeUnavailable, SandboxGone
from toolserver.runtime.base import SandboxSpec
from toolserver.runtime.docker_engine import DockerEngine, NotInEngine, Refused
from toolserver.runtime.docker_stream import AttachedStream

LAUNCHER = "toolcrib/launcher"
ROLE = "toolcrib.role"  # a label: of volumes and containers that are neither a sandbox nor a workspace
MOUNTED_AT = "/.toolcrib/launcher"
_SOURCE = "/launcher"  # where the image has it
_MAX_SCRATCH = 8
_MAX_LINE = 4096


@dataclass(frozen=True)
class ImageConfig:
    """What an image says of how it is to be run. `scratch`: folders that it declares as volumes."""

    image_id: str
    command: tuple[str, ...]
    scratch: tuple[str, ...]


async def read_config(engine: DockerEngine, spec: SandboxSpec) -> ImageConfig:
    """Raises ImageUnusable when the engine does not have it or it can't be run so; nothing is pulled."""
    try:
        found: dict[str, Any] = await engine.image(spec.reference)
    except NotInEngine as missing:
        raise ImageUnusable(
            f"The Docker engine has no image {spec.reference}, which is what was approved as {spec.image}, and none is "
            "pulled for a call. Fetch it with docker pull, or add it anew: toolserver tools add."
        ) from missing
    except Refused as no:
        raise ImageUnusable(f"The Docker engine would not tell of the image {spec.reference}.") from no
    config: dict[str, Any] = found.get("Config") or {}
    command = spec.command or tuple(config.get("Entrypoint") or ())
    command += spec.arguments or (() if spec.command else tuple(config.get("Cmd") or ()))
    if not command:
        raise ImageUnusable(f"The image {spec.image} names no command to run, and its entry gives none.")
    scratch = tuple(sorted(config.get("Volumes") or {}))
    if len(scratch) > _MAX_SCRATCH:
        raise ImageUnusable(
            f"The image {spec.image} declares {len(scratch)} volumes; {_MAX_SCRATCH} are the most that a sandbox gets."
        )
    return ImageConfig(str(found["Id"]), command, scratch)


class Launcher:
    """The volume with the launcher, one of this server, filled from the image at its first use."""

    def __init__(self, engine: DockerEngine, prefix: str, labels: Mapping[str, str]) -> None:
        self._engine, self._prefix = engine, prefix
        self._labels = {**labels, ROLE: "launcher"}
        self._ready: str | None = None
        self.left = False  # there may be volumes of it
        self._making = asyncio.Lock()

    async def volume(self) -> str:
        """Its name. Raises RuntimeUnavailable."""
        async with self._making:
            if self._ready is None:
                self._ready = await self._make()
            return self._ready

    def doubt(self) -> None:
        """It will be made anew, or found to be in use, before the next start: one failed."""
        self._ready = None

    async def _make(self) -> str:
        reference = f"{LAUNCHER}:{version('toolcrib')}"
        try:
            image = str((await self._engine.image(reference))["Id"])
            self.left = True
            name = f"{self._prefix}-launcher-{image.removeprefix('sha256:')[:12]}"
            await self.clear()  # one that an earlier server may not have filled whole; in use it is whole
            await self._remove_volume(name)  # where somebody removed it, a start has made an empty one without labels
            await self._engine.call(lambda client: client.create_volume(name, labels=self._labels))
            await self._fill(image, name)
        except NotInEngine as missing:
            raise RuntimeUnavailable(
                f"The Docker engine has no image {reference}, which starts added images. Build it: toolserver images build"
            ) from missing
        except Refused as no:
            raise RuntimeUnavailable("The Docker engine would not make the launcher's volume.") from no
        return name

    async def _fill(self, image: str, name: str) -> None:
        """The engine fills an empty volume from the image when a container with it is made; that is never started."""
        mount = {"Type": "volume", "Source": name, "Target": _SOURCE}
        host = {"NetworkMode": "none", "Mounts": [mount], "LogConfig": {"Type": "none"}}
        filler = f"{name}-filler"
        for attempt in (1, 2):
            try:
                made = await self._engine.create({"Image": image, "Labels": self._labels, "HostConfig": host}, filler)
                break
            except Refused as no:
                if no.status != 409 or attempt == 2:
                    raise
                await self._remove(filler)  # of an earlier server
        await self._remove(made)

    async def _remove(self, container: str) -> None:
        with contextlib.suppress(NotInEngine):
            await self._engine.call(lambda client: client.remove_container(container, v=True, force=True))

    def note(self, volumes: list[dict[str, Any]]) -> None:
        """Of what an inventory found."""
        self.left = any((volume.get("Labels") or {}).get(ROLE) == "launcher" for volume in volumes)

    async def clear(self) -> None:
        """Remove the volumes of this server's launchers that no sandbox uses. Raises RuntimeUnavailable, Refused."""
        self._ready = None
        mine = {"label": [f"{name}={value}" for name, value in self._labels.items()]}
        for volume in (await self._engine.call(lambda client: client.volumes(filters=mine))).get("Volumes") or []:
            await self._remove_volume(volume["Name"])

    async def _remove_volume(self, name: str) -> None:
        with contextlib.suppress(NotInEngine, Refused):  # refused while it is in use
            await self._engine.call(lambda client: client.remove_volume(name))


def launch_command(program: tuple[str, ...]) -> list[str]:
    """What the container runs for the image's own `program`."""
    shell = [f"{MOUNTED_AT}/busybox", "sh", f"{MOUNTED_AT}/launch.sh"]
    return [f"{MOUNTED_AT}/tini", "--", *shell, *program]


async def begin(spec: SandboxSpec, stream: AttachedStream, secrets: Mapping[str, str], timeout_s: float) -> None:
    """Hand the secrets to a container that was just started, and wait until its program begins.

    Raises ImageUnusable with what it lacks, RuntimeUnavailable.
    """
    lines = [f"{name} {base64.b64encode(value.encode()).decode()}\n" for name, value in secrets.items()]
    try:
        async with asyncio.timeout(timeout_s):
            await stream.send("".join([*lines, ".\n"]).encode())
            said = (await stream.line(_MAX_LINE)).decode("utf-8", "replace").strip()
    except SandboxGone as gone:
        raise RuntimeUnavailable(f"The sandbox of the image {spec.image} ended before it began.") from gone
    except TimeoutError as late:
        raise RuntimeUnavailable(f"A sandbox of the image {spec.image} did not start in time.") from late
    if said != "ready":
        why = said.removeprefix("failed ") or "it ended before it began"
        raise ImageUnusable(f"The image {spec.image} can't be run: {why}")
