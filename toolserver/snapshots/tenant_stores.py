"""The tenants' stores, who works with them, and the sweep of what no snapshot has any more."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path

from toolserver.settings import SnapshotSettings
from toolserver.snapshots import manifest as manifests
from toolserver.store import blobs
from toolserver.store import snapshots as rows
from toolserver.store.blobs import BlobStore
from toolserver.store.database import Database

_DAY_S = 86_400.0
_log = logging.getLogger(__name__)


class TenantStore:
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


class TenantStores:
    def __init__(self, settings: SnapshotSettings, database: Database, folder: Path) -> None:
        """`folder` holds them."""
        self._settings, self._database, self.folder = settings, database, folder
        self._tenants: dict[str, TenantStore] = {}

    def of(self, name: str) -> TenantStore:
        return self._tenants.setdefault(name, TenantStore(self.folder, name))

    def bytes(self) -> int:
        """What all of them take."""
        return blobs.stored_bytes(self.folder)

    async def collect(self) -> None:
        """Forget the snapshots that are too old, and sweep. Raises StoreUnavailable, OSError."""
        keep_s = self._settings.keep_days * _DAY_S
        before = await self._database.read(rows.tenants)
        gone = await self._database.write(lambda connection: rows.expire(connection, time.time(), keep_s))
        for name in {*before, *self._tenants}:
            if gone or self.of(name).untidy:
                await self.sweep(name)
        used = {*await self._database.read(rows.tenants), *self._tenants}
        for path in blobs.unused_stores(self.folder, used):
            path.unlink(missing_ok=True)

    async def sweep(self, name: str) -> None:
        """Remove what no snapshot of the tenant has, unless somebody works with the store: then the next one does."""
        tenant = self.of(name)
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

    async def close(self) -> None:
        for tenant in self._tenants.values():
            await asyncio.to_thread(tenant.store.close)
