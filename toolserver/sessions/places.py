"""The places that sessions take: within their tenant's quotas, and within what the server holds; when it is full, in turn."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from toolserver.catalog.image import ToolImage
from toolserver.egress.policy import narrowed
from toolserver.errors import Code, ToolServerError, invalid
from toolserver.sessions.session import Grant
from toolserver.settings import Settings
from toolserver.tenants.fair_queue import FairQueue
from toolserver.tenants.quotas import Held, Quotas


@dataclass(frozen=True)
class Place:
    """What one session may take, all of its sandboxes together. MiB."""

    tenant: str
    memory_mb: int
    disk_mb: int


class SessionPlaces:
    def __init__(self, settings: Settings, quotas: Quotas, images: Mapping[str, ToolImage]) -> None:
        self._settings, self._quotas, self._images = settings.session, quotas, images
        self._asked: dict[str, Place] = {}  # by session id: all that count against their tenant's quotas
        self._taken: set[str] = set()  # those of them that are within the server now
        self._memory_mb = 0
        most = f"The server is full: {self._settings.max_sessions} sessions"
        if self._settings.total_memory_mb is not None:
            most += f", or {self._settings.total_memory_mb} MiB granted to all of them"
        self.queue = FairQueue(f"{most}.", settings.queue.max_waiting)

    async def take(
        self,
        session_id: str,
        tenant: str,
        grant: Grant,
        wait_s: float,
        gone: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """A place, at once or in its turn. Raises quota_exceeded, no_capacity, invalid_arguments; `gone` as FairQueue.wait has it."""
        place = self._size(tenant, grant)
        total = self._settings.total_memory_mb
        if total is not None and place.memory_mb > total:
            raise invalid(
                "/limits/memory_mb",
                f"with all of its sandboxes more than this server has for all sessions: {total} MiB",
            )
        self._quotas.check_session(tenant, self.held(tenant), place.memory_mb, place.disk_mb)
        self._asked[session_id] = place
        if self.queue.try_now(lambda: self._admit(session_id)):
            return
        try:
            await self.queue.wait(
                tenant, lambda: self._admit(session_id), lambda: self.release(session_id), wait_s, gone
            )
        except BaseException:
            self._asked.pop(session_id, None)
            raise

    def hold(self, session_id: str, tenant: str, grant: Grant) -> None:
        """For a session that is there already, whatever the bounds are now."""
        self._asked[session_id] = self._size(tenant, grant)
        self._take(session_id)

    def change(self, session_id: str, tenant: str, grant: Grant) -> None:
        """For a session whose grant becomes another. Raises quota_exceeded, no_capacity: it keeps the place that it has."""
        before, place = self._asked.get(session_id), self._size(tenant, grant)
        if before is None or place == before:
            return
        if place.memory_mb > before.memory_mb:
            held, total = self.held(tenant), self._settings.total_memory_mb
            others = Held(held.sessions - 1, held.memory_mb - before.memory_mb, held.disk_mb - before.disk_mb)
            self._quotas.check_session(tenant, others, place.memory_mb, place.disk_mb)
            if total is not None and self._memory_mb + place.memory_mb - before.memory_mb > total:
                raise ToolServerError(
                    Code.NO_CAPACITY, f"The server is full: {total} MiB are granted to all sessions. Try again later."
                )
        self._asked[session_id] = place
        if session_id in self._taken:
            self._memory_mb += place.memory_mb - before.memory_mb
            self.queue.serve()

    def release(self, session_id: str) -> None:
        """Its place goes to whoever's turn it is. Again: nothing happens."""
        place = self._asked.pop(session_id, None)
        if place is not None and session_id in self._taken:
            self._taken.discard(session_id)
            self._memory_mb -= place.memory_mb
            self.queue.serve()

    def held(self, tenant: str) -> Held:
        own = [place for place in self._asked.values() if place.tenant == tenant]
        return Held(len(own), sum(place.memory_mb for place in own), sum(place.disk_mb for place in own))

    def _admit(self, session_id: str) -> bool:
        total = self._settings.total_memory_mb
        if len(self._taken) >= self._settings.max_sessions or (
            total is not None and self._memory_mb + self._asked[session_id].memory_mb > total
        ):
            return False
        self._take(session_id)
        return True

    def _take(self, session_id: str) -> None:
        self._taken.add(session_id)
        self._memory_mb += self._asked[session_id].memory_mb

    def _size(self, tenant: str, grant: Grant) -> Place:
        """A sandbox each for those images that can run in it; those that do nothing but reach out can't without egress."""
        images = [self._images[name] for name in grant.images if name in self._images]
        can_run = [
            image for image in images if not image.needs_egress or narrowed(grant.egress, image.egress).reaches_out
        ]
        own = [min(grant.limits.memory_mb, image.limits.memory_mb or grant.limits.memory_mb) for image in can_run]
        return Place(tenant, sum(own), grant.limits.disk_mb)
