"""Where runs are: one store and one folder a run, below `runs_dir`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent.errors import RunNotFound
from agent.events import EventKind
from agent.settings import Settings
from agent.store.fold import RunState
from agent.store.sql_store import SqlStore

_OVER = frozenset({"done", "failed"})


@contextmanager
def open_store(settings: Settings, *, create: bool = True) -> Iterator[SqlStore]:
    """The store of `runs_dir`. Raises JournalBroken when it can't be used, RunNotFound when there is none to look into."""
    file = settings.runs_dir.absolute() / "agent.db"
    if not create and not file.exists():
        raise RunNotFound(f"there are no runs in {file.parent}: name another place with --runs-dir or AGENT_RUNS_DIR")
    store = SqlStore(f"sqlite:///{file}")
    try:
        yield store
    finally:
        store.close()


def is_over(settings: Settings, run_id: str) -> bool:
    """Whether nothing of the run is left to do. Raises RunNotFound."""
    with open_store(settings, create=False) as store:
        ended = [event for event in store.read(run_id) if event.kind in {EventKind.RUN_ENDED, EventKind.RUN_RESUMED}]
    return bool(ended) and ended[-1].data.get("state") in _OVER


def seen_from_outside(store: SqlStore, run: RunState) -> str:
    """The state of a run as `agent list` has it: one whose process was killed is interrupted, not running."""
    return next((row.state for row in store.runs() if row.run_id == run.run_id), run.state)


def folder_of(settings: Settings, run_id: str) -> Path:
    return settings.runs_dir.absolute() / run_id
