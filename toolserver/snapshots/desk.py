"""Snapshots of sessions' workspaces: made, listed, compared, put back, and forgotten when their time is over.

What is in them goes into the tenant's BlobStore first, then the snapshot is written down: one that is listed is whole. The
store is swept only while nothing of that tenant is being stored or read. Once begun, work is finished, also when its client
hangs up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from toolserver.errors import Code, RuntimeUnavailable, SandboxGone, StoreUnavailable, ToolServerError
from toolserver.sandbox import worker_snapshots
from toolserver.sandbox.stdio_client import METHOD_NOT_FOUND, RpcError
from toolserver.sandbox.worker_snapshots import PAGE_BYTES, Restoring, Scanned
from toolserver.sessions.files import client_of
from toolserver.sessions.session import Session, iso_time
from toolserver.settings import SnapshotSettings
from toolserver.snapshots import manifest as manifests
from toolserver.snapshots.compare import compare
from toolserver.snapshots.manifest import NotAManifest, Wanted
from toolserver.store import blobs
from toolserver.store import snapshots as rows
from toolserver.store.blobs import BlobStore, Damaged
from toolserver.store.database import Database
from toolserver.store.snapshots import SnapshotRow

T = TypeVar("T")
_ATTEMPTS = 5  # of a workspace that changes while it is read
_RESTORE_ATTEMPTS = 3
_LOOK_EVERY = 32  # windows between two looks at the tenant's quota
_SPARE_BYTES, _SPARE_PART = (
    256 << 20,
    4,
)  # of the server's disk that stays free: so much, of a small one that part of it
_COLLECT_S = 600.0
_DAY_S = 86_400.0
_log = logging.getLogger(__name__)


class _Tenant:
    """A tenant's store, and who works with it: many at a time, or one sweep."""

    def __init__(self, folder: Path, tenant: str) -> None:
        self.store = BlobStore(folder, tenant)
        self.untidy = True  # something may be in it that no snapshot has: an earlier process's
        self.users = 0
        self._sweeping = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def in_use(self) -> AsyncIterator[BlobStore]:
        async with self._sweeping:
            self.users += 1
        try:
            yield self.store
        finally:
            self.users -= 1

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[bool]:
        """Whether nobody uses it; then nobody does until the end."""
        async with self._sweeping:
            yield self.users == 0


class Snapshots:
    def __init__(
        self, settings: SnapshotSettings, database: Database, folder: Path, calls_running: Callable[[str], int]
    ) -> None:
        """`folder` holds the tenants' stores; `calls_running` tells how many calls run in a session."""
        self._settings, self._database, self._folder, self._calls_running = settings, database, folder, calls_running
        self._tenants: dict[str, _Tenant] = {}
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self.count = 0

    def _tenant(self, name: str) -> _Tenant:
        return self._tenants.setdefault(name, _Tenant(self._folder, name))

    def _lock(self, session: Session) -> asyncio.Lock:
        """One at a time looks at a workspace as a whole or puts it back."""
        return self._locks.setdefault(session.session_id, asyncio.Lock())

    def disk_bytes(self) -> int:
        """What all of them take."""
        return blobs.stored_bytes(self._folder)

    # ---- take

    async def take(self, session: Session) -> dict[str, Any]:
        """Raises too_large, quota_exceeded, file_not_found, session_gone, RuntimeUnavailable, StoreUnavailable."""
        return await _to_the_end(session, self._take_or_sweep(session), "snapshot")

    async def _take_or_sweep(self, session: Session) -> dict[str, Any]:
        try:
            return await self._take(session)
        except BaseException:
            if self._tenant(session.tenant).untidy:  # what came of it so far is nobody's, and counts until it is gone
                session.background.spawn(self._sweep(session.tenant), "sweep snapshots")
            raise

    async def _take(self, session: Session) -> dict[str, Any]:
        tenant = self._tenant(session.tenant)
        lock = self._lock(session)
        with session.in_use():
            async with lock, tenant.in_use() as store:
                for _ in range(_ATTEMPTS):
                    scanned = await _told(self._scan(session))
                    if scanned is None:
                        continue
                    try:
                        taken = await _told(self._bring(store, scanned))
                    except BaseException:
                        tenant.untidy = True
                        raise
                    finally:
                        with contextlib.suppress(RpcError, SandboxGone, TimeoutError):
                            await scanned.close()
                    if taken is not None:
                        return await self._write_down(session, scanned, *taken)
                    tenant.untidy = True
        message = (
            "The workspace kept changing while its files were read, so there is no one state to keep. Stop what writes to "
            "it, or try again."
        )
        raise ToolServerError(Code.RUNTIME_UNAVAILABLE, message, retry_after_s=1)

    async def _scan(self, session: Session) -> Scanned | None:
        """None when a file could not be read since it kept changing."""
        try:
            return await worker_snapshots.scan(
                await client_of(session), self._settings.max_mb << 20, full=_shared(session)
            )
        except RpcError as problem:
            if problem.kind == "changing":
                return None
            raise

    async def _bring(self, store: BlobStore, scanned: Scanned) -> tuple[str, int] | None:
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

    async def _write_down(self, session: Session, scanned: Scanned, snapshot_id: str, new_bytes: int) -> dict[str, Any]:
        left_out = len(scanned.left_out)
        row = SnapshotRow(
            session.tenant, session.session_id, snapshot_id, time.time(), scanned.files, scanned.file_bytes, left_out
        )
        session.check_live()
        await self._database.write(lambda connection: rows.add(connection, row))
        await self._recount()
        return {
            **shown(row),
            "new_bytes": new_bytes,
            "read_bytes": scanned.read_bytes,
            "left_out": scanned.left_out,
            "left_out_more": scanned.left_out_more,
        }

    # ---- look

    async def listing(self, session: Session) -> list[dict[str, Any]]:
        """Those of a session, oldest first."""
        found = await self._database.read(lambda c: rows.of_session(c, session.tenant, session.session_id))
        return [shown(row) for row in found]

    async def check(self, tenant: str, snapshot_id: str) -> None:
        """Raises snapshot_not_found, also for another tenant's."""
        name = manifests.name_of(snapshot_id)
        row = await self._database.read(lambda c: rows.find(c, tenant, snapshot_id)) if name else None
        if row is None:
            raise _not_found()

    async def _manifest(self, store: BlobStore, tenant: str, snapshot_id: str) -> bytes:
        """Raises snapshot_not_found, internal (damaged)."""
        await self.check(tenant, snapshot_id)
        try:
            return await asyncio.to_thread(store.get, manifests.name_of(snapshot_id) or b"")
        except Damaged as problem:
            raise _damaged(snapshot_id) from problem

    async def diff(self, tenant: str, before: str, after: str) -> dict[str, Any]:
        """What a tenant's two snapshots differ in. Raises snapshot_not_found."""
        async with self._tenant(tenant).in_use() as store:
            old = await self._manifest(store, tenant, before)
            new = await self._manifest(store, tenant, after)
        return {"from": before, "to": after, **await asyncio.to_thread(compare, old, new)}

    async def remove(self, session: Session, snapshot_id: str) -> None:
        """Raises snapshot_not_found."""
        gone = await self._database.write(lambda c: rows.remove(c, session.tenant, session.session_id, snapshot_id))
        if not gone:
            raise _not_found()
        self._tenant(session.tenant).untidy = True
        await self._recount()
        session.background.spawn(self._sweep(session.tenant), "sweep snapshots")

    # ---- put back

    async def restore(self, session: Session, snapshot_id: str) -> dict[str, Any]:
        """The workspace exactly as it was. Raises quota_exceeded while anything else may change it, snapshot_not_found, too_large."""
        await self.check(session.tenant, snapshot_id)
        session.check_live()
        session.check_not_restoring()
        running = self._calls_running(session.session_id) + session.writers
        if running:
            raise ToolServerError(
                Code.QUOTA_EXCEEDED,
                f"A restore runs alone in its session, and {running} calls or uploads are under way. Wait for them or cancel them.",
            )
        session.restoring = True
        return await _to_the_end(session, self._alone(session, snapshot_id), "restore")

    async def _alone(self, session: Session, snapshot_id: str) -> dict[str, Any]:
        try:
            with session.in_use():
                return await self.fill(session, snapshot_id)
        finally:
            session.restoring = False

    async def fill(self, session: Session, snapshot_id: str) -> dict[str, Any]:
        """As `restore`, for a session that nobody else can use yet."""
        lock = self._lock(session)
        async with lock, self._tenant(session.tenant).in_use() as store:
            data = await self._manifest(store, session.tenant, snapshot_id)
            for _ in range(_RESTORE_ATTEMPTS):
                done = await _told(self._put_back(session, store, snapshot_id, data))
                if done is not None:
                    return {"snapshot_id": snapshot_id, **done}
        message = (
            "Processes in the sandbox kept changing the files while they were restored: some are restored, some may not be. "
            "Stop what writes to them, then restore again."
        )
        raise ToolServerError(Code.RUNTIME_UNAVAILABLE, message, retry_after_s=1, effects="possible")

    async def _put_back(
        self, session: Session, store: BlobStore, snapshot_id: str, data: bytes
    ) -> dict[str, Any] | None:
        """None when something changed the files while they were put in place."""
        restoring = await worker_snapshots.begin_restore(await client_of(session), full=_shared(session))
        ended = False
        try:
            await self._stage(restoring, store, snapshot_id, data)
            ended = True  # a commit closes it, whatever comes of it
            done = await restoring.commit()
        except RpcError as problem:
            if problem.kind == "changing":
                return None
            raise
        finally:
            if not ended:
                with contextlib.suppress(RpcError, SandboxGone, TimeoutError):
                    await restoring.close()
        names = ("exact", "differs", "written", "removed")
        return {name: done.get(name) for name in names}

    async def _stage(self, restoring: Restoring, store: BlobStore, snapshot_id: str, data: bytes) -> None:
        await restoring.manifest(data)
        lack = await restoring.step([])
        while lack:
            try:
                pieces = await asyncio.to_thread(lambda names: [store.get(name) for name in names], lack)
            except Damaged as problem:
                raise _damaged(snapshot_id) from problem
            lack = await restoring.step(pieces)

    # ---- forget

    async def run(self) -> None:
        """Until cancelled: forget what is too old, sweep what nobody has any more."""
        while True:
            try:
                await self.collect()
            except (StoreUnavailable, OSError) as problem:
                _log.warning("snapshots_not_collected", extra={"fields": {"problem": str(problem)}})
            except Exception:  # noqa: BLE001 - the loop must outlive any single failure; it is logged and tried again
                _log.exception("snapshots_not_collected")
            await asyncio.sleep(_COLLECT_S)

    async def collect(self) -> None:
        """Raises StoreUnavailable, OSError."""
        keep_s = self._settings.keep_days * _DAY_S
        before = await self._database.read(rows.tenants)
        gone = await self._database.write(lambda connection: rows.expire(connection, time.time(), keep_s))
        for name in {*before, *self._tenants}:
            if gone or self._tenant(name).untidy:
                await self._sweep(name)
        used = {*await self._database.read(rows.tenants), *self._tenants}
        for path in blobs.unused_stores(self._folder, used):
            path.unlink(missing_ok=True)
        await self._recount()

    async def _sweep(self, name: str) -> None:
        """Remove what no snapshot of the tenant has, unless somebody works with the store: then the next one does."""
        tenant = self._tenant(name)
        async with tenant.alone() as free:
            if not free:
                tenant.untidy = True
                return
            kept = await self._database.read(lambda connection: rows.ids(connection, name))
            if not kept:
                await asyncio.to_thread(tenant.store.delete)
            else:
                roots = [root for one in kept if (root := manifests.name_of(one)) is not None]
                count = await asyncio.to_thread(tenant.store.keep_only, roots, manifests.names)
                _log.debug("snapshots_swept", extra={"fields": {"pieces": count}})
            tenant.untidy = False

    async def _recount(self) -> None:
        with contextlib.suppress(StoreUnavailable):
            self.count = await self._database.read(rows.count)

    async def close(self) -> None:
        for tenant in self._tenants.values():
            await asyncio.to_thread(tenant.store.close)


def shown(row: SnapshotRow) -> dict[str, Any]:
    return {
        "snapshot_id": row.snapshot_id,
        "session_id": row.session_id,
        "created_at": iso_time(row.created_at),
        "files": row.files,
        "bytes": row.bytes,
    }


def _shared(session: Session) -> bool:
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


async def _to_the_end(session: Session, work: Coroutine[Any, Any, T], what: str) -> T:
    return await asyncio.shield(session.background.spawn(work, f"{what} of {session.session_id}"))


async def _told(work: Awaitable[T]) -> T:
    """Await `work`, its failures told in the contract's words."""
    try:
        return await work
    except RpcError as problem:
        if problem.kind == "incomplete":
            raise ToolServerError(Code.TOO_LARGE, problem.message, effects="possible") from problem
        if problem.kind in ("too_large", "disk_full"):
            raise ToolServerError(Code.TOO_LARGE, problem.message) from problem
        if problem.code == METHOD_NOT_FOUND:
            raise ToolServerError(
                Code.NOT_IMPLEMENTED, "The image that keeps this session's workspace makes no snapshots."
            ) from problem
        message = f"The sandbox could not do it: {problem.message}"
        raise ToolServerError(Code.INTERNAL, message) from problem
    except (SandboxGone, TimeoutError) as problem:
        raise RuntimeUnavailable("The session's sandbox ended while it worked on the snapshot. Try again.") from problem


def _not_found() -> ToolServerError:
    return ToolServerError(
        Code.SNAPSHOT_NOT_FOUND,
        "There is no such snapshot: it was never made, or is not kept any more. GET /v1/sessions/{id}/snapshots lists them.",
    )


def _damaged(snapshot_id: str) -> ToolServerError:
    _log.error("snapshot_damaged", extra={"fields": {"snapshot_id": snapshot_id}})
    message = "A part of the snapshot is damaged on the server's disk, so it can't be used. Nothing was changed; take another one."
    return ToolServerError(Code.INTERNAL, message, effects="none")
