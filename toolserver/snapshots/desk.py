"""Snapshots of sessions' workspaces: made, listed, compared, put back, and forgotten when their time is over.

What is in them goes into the tenant's BlobStore first, then the snapshot is written down: one that is listed is whole. The
store is swept only while nothing of that tenant is being stored or read. Once begun, work is finished, also when its client
hangs up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from toolserver.errors import Code, SandboxGone, StoreUnavailable, ToolServerError
from toolserver.sandbox.stdio_client import RpcError
from toolserver.sandbox.worker_snapshots import Scanned
from toolserver.sessions.session import Session, iso_time
from toolserver.settings import SnapshotSettings
from toolserver.snapshots import manifest as manifests
from toolserver.snapshots.compare import compare
from toolserver.snapshots.putting_back import put_back
from toolserver.snapshots.taking import Taker
from toolserver.snapshots.tenant_stores import TenantStores
from toolserver.snapshots.told import damaged, not_found, told
from toolserver.store import snapshots as rows
from toolserver.store.blobs import BlobStore, Damaged
from toolserver.store.database import Database
from toolserver.store.snapshots import SnapshotRow

T = TypeVar("T")
_ATTEMPTS = 5  # of a workspace that changes while it is read
_RESTORE_ATTEMPTS = 3
_COLLECT_S = 600.0
_log = logging.getLogger(__name__)


class Snapshots:
    def __init__(
        self, settings: SnapshotSettings, database: Database, folder: Path, calls_running: Callable[[str], int]
    ) -> None:
        """`folder` holds the tenants' stores; `calls_running` tells how many calls run in a session."""
        self._database, self._calls_running = database, calls_running
        self._stores, self._taker = TenantStores(settings, database, folder), Taker(settings, folder)
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self.count = 0

    def _lock(self, session: Session) -> asyncio.Lock:
        """One at a time looks at a workspace as a whole or puts it back."""
        return self._locks.setdefault(session.session_id, asyncio.Lock())

    def disk_bytes(self) -> int:
        """What all of them take."""
        return self._stores.bytes()

    # ---- take

    async def take(self, session: Session) -> dict[str, Any]:
        """Raises too_large, quota_exceeded, file_not_found, session_gone, RuntimeUnavailable, StoreUnavailable."""
        return await _to_the_end(session, self._take_or_sweep(session), "snapshot")

    async def _take_or_sweep(self, session: Session) -> dict[str, Any]:
        try:
            return await self._take(session)
        except BaseException:
            if self._stores.of(
                session.tenant
            ).untidy:  # what came of it so far is nobody's, and counts until it is gone
                session.background.spawn(self._stores.sweep(session.tenant), "sweep snapshots")
            raise

    async def _take(self, session: Session) -> dict[str, Any]:
        tenant = self._stores.of(session.tenant)
        lock = self._lock(session)
        with session.in_use():
            async with lock, tenant.in_use() as store:
                for _ in range(_ATTEMPTS):
                    scanned = await told(self._taker.scan(session))
                    if scanned is None:
                        continue
                    try:
                        taken = await told(self._taker.bring(store, scanned))
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
            raise not_found()

    async def _manifest(self, store: BlobStore, tenant: str, snapshot_id: str) -> bytes:
        """Raises snapshot_not_found, internal (damaged)."""
        await self.check(tenant, snapshot_id)
        try:
            return await asyncio.to_thread(store.get, manifests.name_of(snapshot_id) or b"")
        except Damaged as problem:
            raise damaged(snapshot_id) from problem

    async def diff(self, tenant: str, before: str, after: str) -> dict[str, Any]:
        """What a tenant's two snapshots differ in. Raises snapshot_not_found."""
        async with self._stores.of(tenant).in_use() as store:
            old = await self._manifest(store, tenant, before)
            new = await self._manifest(store, tenant, after)
        return {"from": before, "to": after, **await asyncio.to_thread(compare, old, new)}

    async def remove(self, session: Session, snapshot_id: str) -> None:
        """Raises snapshot_not_found."""
        gone = await self._database.write(lambda c: rows.remove(c, session.tenant, session.session_id, snapshot_id))
        if not gone:
            raise not_found()
        self._stores.of(session.tenant).untidy = True
        await self._recount()
        session.background.spawn(self._stores.sweep(session.tenant), "sweep snapshots")

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
        async with lock, self._stores.of(session.tenant).in_use() as store:
            data = await self._manifest(store, session.tenant, snapshot_id)
            for _ in range(_RESTORE_ATTEMPTS):
                done = await told(put_back(session, store, snapshot_id, data))
                if done is not None:
                    return {"snapshot_id": snapshot_id, **done}
        message = (
            "Processes in the sandbox kept changing the files while they were restored: some are restored, some may not be. "
            "Stop what writes to them, then restore again."
        )
        raise ToolServerError(Code.RUNTIME_UNAVAILABLE, message, retry_after_s=1, effects="possible")

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
        await self._stores.collect()
        await self._recount()

    async def _recount(self) -> None:
        with contextlib.suppress(StoreUnavailable):
            self.count = await self._database.read(rows.count)

    async def close(self) -> None:
        await self._stores.close()


def shown(row: SnapshotRow) -> dict[str, Any]:
    return {
        "snapshot_id": row.snapshot_id,
        "session_id": row.session_id,
        "created_at": iso_time(row.created_at),
        "files": row.files,
        "bytes": row.bytes,
    }


async def _to_the_end(session: Session, work: Coroutine[Any, Any, T], what: str) -> T:
    return await asyncio.shield(session.background.spawn(work, f"{what} of {session.session_id}"))
