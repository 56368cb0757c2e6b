"""Looks again and again at what the command line may have changed, and keeps the journal's end noted in the database."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from sqlalchemy import Connection

from toolserver.errors import StoreUnavailable
from toolserver.journal.journal import Journal
from toolserver.store import journal_head, tenants
from toolserver.store.database import Database
from toolserver.tenants.quotas import CpuMeter, Quotas

EVERY_S = 0.5
_PRUNE_S = 600.0
_log = logging.getLogger(__name__)


class Watch:
    def __init__(
        self, database: Database, journal: Journal, quotas: Quotas, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock` is monotonic."""
        self._database, self._journal, self._quotas, self._clock = database, journal, quotas, clock
        self._noted = ""
        self._next_prune = clock()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                await self.tick()
            except (StoreUnavailable, OSError) as problem:
                _log.warning("watch_failed", extra={"fields": {"problem": str(problem)}})

    async def tick(self) -> None:
        """Raises StoreUnavailable: what is known already holds on."""
        self._journal.settle()
        self._quotas.load([(row.tenant, row.limits) for row in await self._database.read(tenants.listing)])
        if self._clock() >= self._next_prune:
            self._next_prune = self._clock() + _PRUNE_S
            if (count := self._journal.prune()) > 0:
                _log.info("journal_pruned", extra={"fields": {"segments": count}})
        await self.note_head()

    async def note_head(self) -> None:
        """Where `journal verify` looks for how far the journal must come. Raises StoreUnavailable."""
        head = str(self._journal.head)
        if head != self._noted:
            await self._database.write_small(lambda connection: journal_head.note(connection, head))
            self._noted = head


def take_up(connection: Connection, quotas: Quotas) -> None:
    """At a start: the tenants' bounds, and the CPU time of calls that earlier processes stored."""
    quotas.load([(row.tenant, row.limits) for row in tenants.listing(connection)])
    load_cpu(connection, quotas.cpu)


def load_cpu(connection: Connection, cpu: CpuMeter) -> None:
    for tenant, at, cpu_s in tenants.cpu_used(connection, time.time() - cpu.window_s, cpu.slot_s):
        cpu.add(tenant, cpu_s, at)
