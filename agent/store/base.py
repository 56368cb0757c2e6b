"""PlanStore: where runs live. One append-only, hash-chained journal a run; everything else is a fold over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from agent.events import Event, EventKind


@dataclass(frozen=True)
class RunRow:
    """A line of `agent list`. `state` is running, done, failed, stopped or interrupted."""

    run_id: str
    goal: str
    state: str
    created_at: float
    updated_at: float
    events: int


class Journal(Protocol):
    """One run's journal, held by one process at a time."""

    run_id: str

    def append(self, kind: EventKind, data: dict[str, Any]) -> Event:
        """Durable when it returns (a transaction with full sync). Raises JournalBroken when the run was taken over."""

    def events(self, after: int = 0) -> Iterator[Event]:
        """In order of `seq`, from `after` + 1."""

    def settled(self, kind: EventKind, key: str) -> Event | None:
        """The first event of `kind` with this `key`, from memory: what is settled is never done again."""

    def subscribe(self, listener: Callable[[Event], None]) -> None:
        """Called after each append, in order; for live progress. A listener's exception is logged, not raised."""

    def close(self) -> None:
        """Let go of the run, so that another process may open it. Twice is fine."""


class PlanStore(Protocol):
    def create(self, run_id: str, goal: str) -> Journal: ...

    def open(self, run_id: str) -> Journal:
        """Raises RunNotFound; JournalBroken when the hash chain is broken or a live process holds the run."""

    def runs(self) -> list[RunRow]:
        """Newest first."""

    def read(self, run_id: str) -> list[Event]:
        """All events without taking hold of the run, for show and report. A unique prefix of a run id will do. Raises RunNotFound."""

    def close(self) -> None: ...
