"""Where runs are: one store and one folder a run, below `runs_dir`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent.errors import RunNotFound
from agent.settings import Settings
from agent.store.sql_store import SqlStore


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


def folder_of(settings: Settings, run_id: str) -> Path:
    return settings.runs_dir.absolute() / run_id
