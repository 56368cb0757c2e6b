"""What the endpoints work with, handed in by the composition root."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import cast

from starlette.requests import Request

from toolserver.api.auth import Authenticator
from toolserver.api.events import Streams
from toolserver.calls.follow import CallDesk
from toolserver.catalog.catalog import Catalog
from toolserver.errors import Code, RuntimeUnavailable, ToolServerError
from toolserver.journal.journal import Journal
from toolserver.runtime.base import SandboxRuntime
from toolserver.sessions.registry import Registry
from toolserver.settings import Settings
from toolserver.snapshots.desk import Snapshots
from toolserver.store.database import Database
from toolserver.store.keys import Key
from toolserver.telemetry.metrics import Metrics
from toolserver.telemetry.observer import RequestObserver
from toolserver.telemetry.trace import trace_id

_CHECK_S = 2.0  # how long an answer of the runtime's check is believed


class Phase(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


@dataclass
class Readiness:
    """Whether work can be taken now."""

    runtime: SandboxRuntime
    database: Database
    clock: Callable[[], float] = time.monotonic
    phase: Phase = Phase.STARTING
    _checked: float = field(default=float("-inf"))
    _problem: str | None = None

    def check_phase(self) -> None:
        """Raises starting, draining."""
        if self.phase is Phase.STARTING:
            raise ToolServerError(Code.STARTING, "The server is starting. Try again in a moment.")
        if self.phase is Phase.DRAINING:
            raise ToolServerError(
                Code.DRAINING, "The server is shutting down and takes no new work. Try again when it is back."
            )

    @property
    def engine_up(self) -> bool:
        """By the last look at it."""
        return self._problem is None

    async def look(self, within_s: float | None = None) -> None:
        """Ask the runtime whether it can be used, unless that was done a moment ago. `within_s`: silence for so long is a no."""
        if self.clock() - self._checked >= _CHECK_S:
            try:
                async with asyncio.timeout(within_s):
                    await self.runtime.check()
                self._problem = None
            except RuntimeUnavailable as problem:
                self._problem = str(problem)
            except TimeoutError:
                self._problem = "The sandbox runtime does not answer."
            self._checked = self.clock()

    async def check(self) -> None:
        """Raises starting, draining, RuntimeUnavailable, StoreUnavailable."""
        self.check_phase()
        await self.look()
        if self._problem is not None:
            raise RuntimeUnavailable(self._problem)
        self.database.probe()


@dataclass(frozen=True)
class Services:
    """`streams` are those of calls, `listeners` those of MCP clients that wait for changes."""

    settings: Settings
    runtime: SandboxRuntime
    catalog: Catalog
    registry: Registry
    database: Database
    calls: CallDesk
    snapshots: Snapshots
    authenticator: Authenticator
    readiness: Readiness
    metrics: Metrics
    streams: Streams
    listeners: Streams
    observer: RequestObserver
    journal: Journal


def services(request: Request) -> Services:
    return cast(Services, request.app.services)


def caller(request: Request, scope: str) -> Key:
    """Who asks. Raises forbidden when the key lacks the scope, JournalUnavailable when that can't be written down."""
    key = cast(Key, request.scope["toolserver.key"])
    if not key.allows(scope):
        endpoint = request.scope["endpoint"]  # not the path, which may name a client's files
        services(request).journal.append(
            "forbidden",
            tenant=key.tenant,
            key_id=key.key_id,
            operation=f"{endpoint.__module__.rpartition('.')[2]}.{endpoint.__name__}",
            scope=scope,
            trace_id=trace_id(),
        )
        raise ToolServerError(Code.FORBIDDEN, f"The key lacks the scope {scope}: it has only {key.scope}.")
    return key
