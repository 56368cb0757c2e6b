"""Out of a sandbox into a store: a workspace is scanned, and of its pieces those are read that the store lacks."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from toolserver.errors import Code, SandboxGone, ToolServerError
from toolserver.sandbox import worker_snapshots
from toolserver.sandbox.stdio_client import RpcError
from toolserver.sandbox.worker_snapshots import PAGE_BYTES, Scanned
from toolserver.sessions.files import client_of
from toolserver.sessions.session import Session
from toolserver.settings import SnapshotSettings
from toolserver.snapshots import manifest as manifests
from toolserver.snapshots.manifest import NotAManifest, Wanted
from toolserver.store.blobs import BlobStore

_LOOK_EVERY = 32  # windows between two looks at the tenant's quota
# of the server's disk that stays free: so much, of a small one that part of it
_SPARE_BYTES, _SPARE_PART = 256 << 20, 4


class Taker:
    def __init__(self, settings: SnapshotSettings, folder: Path) -> None:
        """`folder` is where the stores are."""
        self._settings, self._folder = settings, folder

    async def scan(self, session: Session) -> Scanned | None:
        """None when a file could not be read since it kept changing."""
        try:
            return await worker_snapshots.scan(
                await client_of(session), self._settings.max_mb << 20, full=shares_files(session)
            )
        except RpcError as problem:
            if problem.kind == "changing":
                return None
            raise

    async def bring(self, store: BlobStore, scanned: Scanned) -> tuple[str, int] | None:
        """Store what is new of it: (id, bytes that were new). None when a file has changed since the scan."""
        data = await scanned.manifest()
        try:
            wanted = await asyncio.to_thread(manifests.wanted, data)
        except NotAManifest as problem:
            raise SandboxGone("the worker's manifest can't be understood") from problem
        lack = await asyncio.to_thread(store.lacking, wanted)
        needed = [piece for name, piece in wanted.items() if name in lack]
        for number, window in enumerate(_windows(needed)):
            if number % _LOOK_EVERY == 0:
                await self._check_room(store)
            await self._check_disk(sum(piece.length for piece in window))
            pieces = await scanned.read([(piece.line, piece.number) for piece in window])
            if any(piece is None for piece in pieces):
                return None
            names = await asyncio.to_thread(store.put, [piece for piece in pieces if piece is not None])
            if names != [piece.name for piece in window]:
                raise SandboxGone("the worker's pieces are not what it said")
        await asyncio.to_thread(store.put, [data])
        await self._check_room(store)
        return manifests.id_of(data), sum(piece.length for piece in needed)

    async def _check_room(self, store: BlobStore) -> None:
        used = await asyncio.to_thread(store.used_bytes)
        if used > self._settings.max_mb << 20:
            raise ToolServerError(
                Code.QUOTA_EXCEEDED,
                f"Your snapshots take {used >> 20} MiB, the quota is {self._settings.max_mb} MiB, so this one was not kept. "
                "Delete some with DELETE /v1/sessions/{id}/snapshots/{snapshot_id}, or wait until those of ended sessions expire.",
            )

    async def _check_disk(self, wanted: int) -> None:
        """The server's own records are on that disk too: no tenant's snapshots may fill it."""
        disk = await asyncio.to_thread(shutil.disk_usage, self._folder.parent)
        if disk.free - wanted < min(_SPARE_BYTES, disk.total // _SPARE_PART):
            raise ToolServerError(
                Code.RUNTIME_UNAVAILABLE,
                "The server's disk has no room for more snapshots, so this one was not kept. Delete some with DELETE "
                "/v1/sessions/{id}/snapshots/{snapshot_id}, or tell whoever runs the server.",
                retry_after_s=60,
            )


def shares_files(session: Session) -> bool:
    """Whether sandboxes that the worker can't look into work on the same files."""
    return sum(box.plan.image.workspace == "rw" for box in session.boxes.values()) > 1


def _windows(needed: list[Wanted]) -> list[list[Wanted]]:
    """What goes into one message each."""
    windows: list[list[Wanted]] = []
    room = 0
    for piece in needed:
        if piece.length > room or not windows:
            windows.append([])
            room = PAGE_BYTES
        windows[-1].append(piece)
        room -= piece.length
    return windows
