"""A PlanStore in memory, for tests and for runs that need not outlive their process."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from agent.errors import JournalBroken, RunNotFound, UsageProblem
from agent.events import Event, EventKind
from agent.store.base import RunRow
from agent.store.hash_chain import GENESIS, seal

log = logging.getLogger(__name__)


class MemoryJournal:
    """A Journal over a list of events that the store keeps; several may follow each other on one list, not share it."""

    def __init__(self, run_id: str, events: list[Event], clock: Callable[[], float] = time.time) -> None:
        self.run_id = run_id
        self._events, self._clock = events, clock
        self._settled: dict[tuple[EventKind, str], Event] = {}
        self._listeners: list[Callable[[Event], None]] = []
        self.closed = False
        for event in events:
            self._index(event)

    def append(self, kind: EventKind, data: dict[str, Any]) -> Event:
        if self.closed:
            raise JournalBroken(f"run {self.run_id} was let go of: open it again")
        prev = self._events[-1].hash if self._events else GENESIS
        event, _ = seal(self.run_id, len(self._events) + 1, self._clock(), kind, data, prev_hash=prev)
        self._events.append(event)
        self._index(event)
        tell(self._listeners, event)
        return event

    def _index(self, event: Event) -> None:
        key = event.data.get("key")
        if key:
            self._settled.setdefault((event.kind, key), event)

    def events(self, after: int = 0) -> Iterator[Event]:
        return iter(self._events[after:])

    def settled(self, kind: EventKind, key: str) -> Event | None:
        return self._settled.get((kind, key))

    def subscribe(self, listener: Callable[[Event], None]) -> None:
        self._listeners.append(listener)

    def close(self) -> None:
        self.closed = True


def tell(listeners: list[Callable[[Event], None]], event: Event) -> None:
    """Hand `event` to each listener; one that fails is logged and does not stop the run or the others."""
    for listener in listeners:
        try:
            listener(event)
        except Exception:  # listeners are foreign code at the edge of the run
            log.exception("a listener of run %s failed at event %d", event.run_id, event.seq)


class MemoryStore:
    def __init__(self) -> None:
        self._runs: dict[str, tuple[str, list[Event]]] = {}
        self._held: dict[str, MemoryJournal] = {}

    def create(self, run_id: str, goal: str) -> MemoryJournal:
        if run_id in self._runs:
            raise UsageProblem(f"there is a run {run_id} already: choose another id")
        self._runs[run_id] = (goal, [])
        return self.open(run_id)

    def open(self, run_id: str) -> MemoryJournal:
        held = self._held.get(run_id)
        if held is not None and not held.closed:
            raise JournalBroken(f"run {run_id} is being worked on already")
        self._held[run_id] = MemoryJournal(run_id, self._find(run_id))
        return self._held[run_id]

    def runs(self) -> list[RunRow]:
        rows = [
            RunRow(
                run_id,
                goal,
                _state(events),
                events[0].at if events else 0.0,
                events[-1].at if events else 0.0,
                len(events),
            )
            for run_id, (goal, events) in self._runs.items()
        ]
        return rows[::-1]

    def read(self, run_id: str) -> list[Event]:
        return list(self._find(run_id))

    def _find(self, run_id: str) -> list[Event]:
        found = [name for name in self._runs if name.startswith(run_id)]
        if run_id in self._runs:
            found = [run_id]
        if len(found) != 1:
            raise RunNotFound(f"{'several runs begin' if found else 'no run begins'} with {run_id}: see `agent list`")
        return self._runs[found[0]][1]

    def close(self) -> None:
        for journal in self._held.values():
            journal.close()


def _state(events: list[Event]) -> str:
    last = next((e for e in reversed(events) if e.kind in _RUN_KINDS), None)
    return str(last.data["state"]) if last is not None and last.kind is EventKind.RUN_ENDED else "running"


_RUN_KINDS = frozenset({EventKind.RUN_STARTED, EventKind.RUN_RESUMED, EventKind.RUN_ENDED})
