"""What is done again and again: ending sessions that are due, removing what is nobody's, forgetting what is old."""

from __future__ import annotations

import asyncio
import logging
import time

from toolserver.errors import RuntimeUnavailable, StoreUnavailable
from toolserver.sessions.added_images import AddedImages
from toolserver.sessions.optional_images import OptionalImages
from toolserver.sessions.registry import Registry
from toolserver.store import calls, sessions
from toolserver.store.database import Database

TICK_S = 0.5
_RECONCILE_S = 5.0
_ADDED_S = 2.0
_IMAGES_S = 5.0
_LEASES_S = 5.0
_NOTE_USE_S = 10.0
REST_S = 60.0  # by then the kernel has written the files of a session that is not used, too: it waits 35 s at most
_CLEAN_UP_S = 10.0
_PURGE_S = 600.0
_DAY_S = 86_400.0
_log = logging.getLogger(__name__)


class Reaper:
    def __init__(
        self, registry: Registry, database: Database, optional_images: OptionalImages, added_images: AddedImages
    ) -> None:
        self._registry, self._database, self._optional_images = registry, database, optional_images
        self._added_images = added_images
        self._next: dict[str, float] = {}
        self._reconciling: asyncio.Future[None] = asyncio.Future()
        self._reconciling.set_result(None)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self.tick()
            except Exception:  # noqa: BLE001 - the loop must outlive any single failure; it is logged and tried again
                _log.exception("reaper_failed")
            await asyncio.sleep(TICK_S)

    async def tick(self) -> None:
        now = self._registry.clock()
        for session in self._registry.live():
            if (cause := session.due(now)) is not None:
                await self._registry.end(session, cause)
        if self._reconciling.done() and self._is_time("reconcile", now, _RECONCILE_S):
            self._reconciling = self._registry.background.spawn(self.reconcile(), "reconcile")
        if self._is_time("images", now, _IMAGES_S):
            self._registry.background.spawn(self._optional_images.look(), "look for optional images")
        if self._is_time("added images", now, _ADDED_S):
            self._registry.background.spawn(self._added_images.look(), "look for added images")
        if self._is_time("leases", now, _LEASES_S):
            self._registry.background.spawn(self._registry.renew_leases(), "renew leases")
        if self._is_time("use", now, _NOTE_USE_S):
            await self.note_use()
            await self.note_rest()
        if self._is_time("clean up", now, _CLEAN_UP_S):
            await self._registry.retry_clean_up()
        if self._is_time("purge", now, _PURGE_S):
            await self.purge()

    def _is_time(self, what: str, now: float, every_s: float) -> bool:
        due = now >= self._next.get(what, now)
        if due:
            self._next[what] = now + every_s
        return due

    async def reconcile(self) -> None:
        """Engine and store are brought together. While the runtime is away it is tried again later."""
        try:
            await self._registry.care()
            count = await self._registry.reconcile()
        except RuntimeUnavailable as problem:
            _log.warning("reconcile_put_off", extra={"fields": {"problem": str(problem)}})
            return
        if count:
            _log.info("orphans_removed", extra={"fields": {"count": count}})

    async def note_use(self) -> None:
        """So that idle times go on over a restart."""
        try:
            await self._registry.note_use()
        except StoreUnavailable as problem:
            _log.warning("use_not_noted", extra={"fields": {"problem": str(problem)}})

    async def note_rest(self) -> None:
        """So that a loss of power does not touch sessions that are not in use."""
        now = self._registry.clock()
        try:
            await self._registry.use_marks.clear([s for s in self._registry.live() if now - s.used_at(now) >= REST_S])
        except StoreUnavailable as problem:
            _log.warning("rest_not_noted", extra={"fields": {"problem": str(problem)}})

    async def purge(self) -> None:
        """Forget outcomes and tombstones past their time."""
        settings, now = self._registry.settings, time.time()
        old_calls = now - settings.call.keep_days * _DAY_S
        old_sessions = now - settings.session.tombstone_days * _DAY_S
        try:
            await self._database.write(lambda c: (calls.purge(c, old_calls), sessions.purge(c, old_sessions)))
        except StoreUnavailable as problem:
            _log.warning("purge_put_off", extra={"fields": {"problem": str(problem)}})
