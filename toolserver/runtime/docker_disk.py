"""Workspaces as volumes of a Docker engine, held to their size by the hardest means that the engine's host has.

`quota`: the engine's own, where its disk has project quotas (xfs with pquota). `loop`: an image on a loop device, where the
server is root on the engine's own host. `accounted`: neither; the worker counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from toolserver.errors import RequirementMissing, RuntimeUnavailable
from toolserver.runtime.docker_engine import DockerEngine, NotInEngine, Refused
from toolserver.runtime.loop_disk import MOUNT_OPTIONS, LoopDisks, Unusable

DiskMode = Literal["quota", "loop", "accounted"]
# seen with 20.10: the restart loses the reference count of device volumes, which can't be deleted afterwards
LIVE_RESTORE = "the engine has live-restore on, and its restart loses count of mounted devices"
_REFUSED = "The Docker engine would not make a workspace."


class StillInUse(RuntimeUnavailable):
    """The engine answers, and will not delete a volume now."""


class WorkspaceVolumes:
    """`folder`: for images. `mode` is None until `choose`. Volumes have the names and labels that the caller gives."""

    def __init__(self, engine: DockerEngine, folder: Path, owner: int) -> None:
        self._engine = engine
        self.disks = LoopDisks(folder, owner)
        self.mode: DiskMode | None = None
        self._devices: dict[str, str] = {}  # volumes that were seen to name the device which holds their image

    async def choose(
        self,
        wanted: Literal["auto", "quota", "loop", "accounted"],
        probe: str,
        labels: Mapping[str, str],
        *,
        live_restore: bool,
    ) -> None:
        """Find what works, by trying with volumes of the name `probe`. Raises RequirementMissing when it is not what is wanted, RuntimeUnavailable."""
        if wanted in ("auto", "quota") and await self._has_quotas(probe, labels):
            self.mode = "quota"
        elif (
            wanted in ("auto", "loop")
            and (why := LIVE_RESTORE if live_restore else await self._no_loop(probe, labels)) is None
        ):
            self.mode = "loop"
        elif wanted in ("auto", "accounted"):
            self.mode = "accounted"
        else:
            reason = why if wanted == "loop" else "the engine's disk has no project quotas (it needs xfs with pquota)"
            raise RequirementMissing(f"TOOLSERVER_RUNTIME__DISK is {wanted}, but {reason}. Take another, such as auto.")

    async def _has_quotas(self, probe: str, labels: Mapping[str, str]) -> bool:
        try:
            await self._engine.call(
                lambda client: client.create_volume(probe, driver_opts={"size": "16m"}, labels=dict(labels))
            )
        except Refused:
            return False
        await self._remove(probe)
        return True

    async def _no_loop(self, probe: str, labels: Mapping[str, str]) -> str | None:
        """Why images on loop devices can't be used, if so.

        A device's name means the same to the engine only on one host: there, a new volume's folder is seen from here too.
        """
        try:
            await asyncio.to_thread(self.disks.check)
        except Unusable as why:
            return str(why)
        try:
            made = await self._engine.call(lambda client: client.create_volume(probe, labels=dict(labels)))
        except Refused as no:
            raise RuntimeUnavailable(_REFUSED) from no
        seen = await asyncio.to_thread(Path(str(made["Mountpoint"])).is_dir)
        await self._remove(probe)
        return None if seen else "the engine runs on another host, or the server in a container"

    async def create(self, name: str, disk_mb: int, labels: Mapping[str, str]) -> None:
        """A volume that holds `disk_mb` MiB; nothing changes when there is one. Raises RuntimeUnavailable."""
        options: dict[str, str] = {"size": f"{disk_mb}m"} if self.mode == "quota" else {}
        if self.mode == "loop":
            if not self.disks.image(name).exists():
                try:
                    await asyncio.to_thread(self.disks.create, name, disk_mb)
                except (OSError, subprocess.SubprocessError) as problem:
                    raise RuntimeUnavailable(
                        "A workspace could not be made. Look at the space of the state folder."
                    ) from problem
            options = await self._on_device(name)
        await self._create(name, options, labels)

    async def _create(self, name: str, options: Mapping[str, str], labels: Mapping[str, str]) -> None:
        try:
            await self._engine.call(
                lambda client: client.create_volume(name, driver_opts=dict(options), labels=dict(labels))
            )
        except (Refused, NotInEngine) as no:
            raise RuntimeUnavailable(_REFUSED) from no

    async def _on_device(self, name: str) -> dict[str, str]:
        try:
            device = await asyncio.to_thread(self.disks.attach, name)
        except OSError as problem:
            raise RuntimeUnavailable("No loop device is free for a workspace.") from problem
        self._devices[name] = device
        return {"type": "ext4", "device": device, "o": f"{MOUNT_OPTIONS},nosuid,nodev,noatime"}

    async def ready(self, name: str) -> None:
        """Before a sandbox is started: the volume names the device that holds its image now. Raises RuntimeUnavailable.

        After a reboot, or after somebody detached it, the device may be another, and that number hold another's image.
        """
        if not self.disks.image(name).exists():
            return
        known = self._devices.get(name)
        options = await self._on_device(name)
        if options["device"] == known:
            return
        try:
            found: Any = await self._engine.call(lambda client: client.inspect_volume(name))
            if (found.get("Options") or {}).get("device") == options["device"]:
                return
            await self._engine.call(lambda client: client.remove_volume(name))
        except (NotInEngine, Refused) as no:
            del self._devices[name]
            raise RuntimeUnavailable("A workspace is not where it was, and still in use.") from no
        await self._create(name, options, found.get("Labels") or {})

    async def bring_back(self, name: str, labels: Mapping[str, str]) -> bool:
        """Of a volume that somebody removed: one that holds the same files, where its image is there. Raises RuntimeUnavailable."""
        if not self.disks.image(name).exists():
            return False
        await self._create(name, await self._on_device(name), labels)
        return True

    async def delete(self, name: str) -> None:
        """Volume and image; no error when they are gone. Raises StillInUse, RuntimeUnavailable."""
        try:
            await self._engine.call(lambda client: client.remove_volume(name))
        except NotInEngine:
            pass
        except Refused as no:
            raise StillInUse("The Docker engine would not delete a workspace: it is still in use.") from no
        self._devices.pop(name, None)
        await asyncio.to_thread(self.disks.delete, name)

    async def _remove(self, probe: str) -> None:
        with contextlib.suppress(NotInEngine, Refused):
            await self._engine.call(lambda client: client.remove_volume(probe))
