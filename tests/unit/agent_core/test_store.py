"""The PlanStore on a real SQLite file: durable, chained, and held by one process at a time."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.errors import JournalBroken, RunNotFound, UsageProblem
from agent.events import Event, EventKind
from agent.store.memory_store import MemoryStore
from agent.store.sql_store import SqlStore

Store = SqlStore | MemoryStore


def url(folder: Path) -> str:
    return f"sqlite:///{folder / 'runs.db'}"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    made = SqlStore(url(tmp_path))
    yield made
    made.close()


@pytest.fixture(params=["sql", "memory"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made: Store = SqlStore(url(tmp_path)) if request.param == "sql" else MemoryStore()
    yield made
    made.close()


def note(text: str, **more: Any) -> dict[str, Any]:
    return {"text": text, **more}


def test_events_come_back_in_order_and_the_same(either: Store) -> None:
    journal = either.create("r1", "goal")
    written = [
        journal.append(EventKind.NOTE, note(f"n{i}", key=f"k{i}", nested={"a": [1, 2.5, None]})) for i in range(5)
    ]
    assert list(journal.events()) == written == either.read("r1")
    assert list(journal.events(after=3)) == written[3:]
    assert [e.seq for e in written] == [1, 2, 3, 4, 5]


def test_the_first_event_of_a_key_settles_it_also_after_reopening(either: Store) -> None:
    journal = either.create("r1", "goal")
    first = journal.append(EventKind.LLM_REPLIED, {"key": "a"})
    journal.append(EventKind.LLM_REPLIED, {"key": "a", "again": True})
    assert journal.settled(EventKind.LLM_REPLIED, "a") == first
    assert journal.settled(EventKind.LLM_FAILED, "a") is None
    journal.close()
    assert either.open("r1").settled(EventKind.LLM_REPLIED, "a") == first


def test_a_run_is_held_by_one_opener_at_a_time(either: Store) -> None:
    journal = either.create("r1", "goal")
    with pytest.raises(JournalBroken, match="worked on"):
        either.open("r1")
    journal.close()
    journal.close()
    either.open("r1")


def test_runs_are_found_by_a_unique_prefix(either: Store) -> None:
    for name in ("abc1", "abc2", "xyz"):
        either.create(name, "goal").append(EventKind.NOTE, note(name))
    assert either.read("x")[0].data["text"] == "xyz"
    for bad in ("abc", "nope", ""):
        with pytest.raises(RunNotFound):
            either.read(bad)


def test_a_listener_hears_every_event_and_its_failure_stops_nothing(
    either: Store, caplog: pytest.LogCaptureFixture
) -> None:
    journal = either.create("r1", "goal")
    heard: list[int] = []

    def broken(_: Event) -> None:
        raise ValueError("listener")

    journal.subscribe(broken)
    journal.subscribe(lambda e: heard.append(e.seq))
    journal.append(EventKind.NOTE, note("a"))
    journal.append(EventKind.NOTE, note("b"))
    assert heard == [1, 2]
    assert "a listener of run r1 failed" in caplog.text


@pytest.mark.parametrize("text", ["\ud800 alone", "a\x00b", "日本語 🎉", "\x1b[31m", "'; DROP TABLE events; --"])
def test_any_text_is_kept(either: Store, text: str) -> None:
    either.create("r1", text if "\ud800" not in text and "\x00" not in text else "goal").append(
        EventKind.NOTE, note(text)
    )
    assert either.read("r1")[0].data["text"] == text


def test_numbers_that_json_has_not_become_null(either: Store) -> None:
    event = either.create("r1", "g").append(EventKind.NOTE, note("x", n=float("nan"), deep=[{"i": float("inf")}]))
    assert (event.data["n"], event.data["deep"]) == (None, [{"i": None}])
    assert either.read("r1") == [event]


def test_an_id_is_taken_once_and_fits_a_file_name(store: SqlStore) -> None:
    store.create("r1", "goal")
    with pytest.raises(UsageProblem, match="already"):
        store.create("r1", "goal")
    for bad in ("", "../up", "a/b", "x" * 129):
        with pytest.raises(UsageProblem, match="no run id"):
            store.create(bad, "goal")


def test_the_list_shows_state_and_count_newest_first(tmp_path: Path) -> None:
    ticks = iter(range(100, 200))
    store = SqlStore(url(tmp_path), clock=lambda: float(next(ticks)))
    first = store.create("r1", "one")
    first.append(EventKind.RUN_STARTED, {"goal": "one"})
    first.append(EventKind.RUN_ENDED, {"state": "done"})
    store.create("r2", "two").append(EventKind.RUN_STARTED, {"goal": "two"})
    assert [(r.run_id, r.state, r.events) for r in store.runs()] == [("r2", "running", 1), ("r1", "done", 2)]
    store.close()


@pytest.mark.parametrize(
    "damage",
    [
        'UPDATE events SET data = \'{"text":"forged"}\' WHERE seq = 2',
        "UPDATE events SET at = at + 1 WHERE seq = 2",
        "UPDATE events SET kind = 'run_ended' WHERE seq = 2",
        "DELETE FROM events WHERE seq = 2",
        "UPDATE events SET seq = seq + 10 WHERE seq = 3",
        "UPDATE events SET data = '{broken' WHERE seq = 2",
        "UPDATE events SET kind = 'from_the_future' WHERE seq = 2",
    ],
)
def test_a_changed_journal_is_not_opened(tmp_path: Path, damage: str) -> None:
    store = SqlStore(url(tmp_path))
    journal = store.create("r1", "goal")
    for i in range(3):
        journal.append(EventKind.NOTE, note(f"n{i}"))
    journal.close()
    connection = sqlite3.connect(tmp_path / "runs.db")
    connection.execute(damage)
    connection.commit()
    connection.close()
    for reader in (store.open, store.read):
        with pytest.raises(JournalBroken, match="r1"):
            reader("r1")
    store.close()


def test_a_file_that_is_no_database_is_told(tmp_path: Path) -> None:
    (tmp_path / "runs.db").write_bytes(b"not a database at all, " * 100)
    with pytest.raises(JournalBroken, match="is damaged"):
        SqlStore(url(tmp_path))


@pytest.mark.parametrize("bad", ["nonsense", "postgresql://host/db", "sqlite://", "sqlite:///:memory:"])
def test_another_database_is_refused_for_now(bad: str) -> None:
    with pytest.raises(UsageProblem):
        SqlStore(bad)


def test_a_journal_that_was_taken_over_can_no_longer_write(tmp_path: Path) -> None:
    store = SqlStore(url(tmp_path))
    old = store.create("r1", "goal")
    old.append(EventKind.NOTE, note("mine"))
    old._lock.release()
    new = store.open("r1")
    new.append(EventKind.NOTE, note("theirs"))
    with pytest.raises(JournalBroken, match="taken over"):
        old.append(EventKind.NOTE, note("too late"))
    assert [e.data["text"] for e in store.read("r1")] == ["mine", "theirs"]
    store.close()


def test_appends_are_synced_and_in_wal_mode(store: SqlStore) -> None:
    with store._engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2


HOLDER = """
import sys, time
from agent.events import EventKind
from agent.store.sql_store import SqlStore
journal = SqlStore(sys.argv[1]).create("r1", "goal")
journal.append(EventKind.RUN_STARTED, {"goal": "goal"})
for number in range(10**6):
    journal.append(EventKind.NOTE, {"text": str(number)})
    if number == 20:
        print("ready", flush=True)
"""


def test_a_run_whose_process_was_killed_is_opened_at_once_and_every_told_event_is_there(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, url(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        store = SqlStore(url(tmp_path))
        with pytest.raises(JournalBroken, match=f"worked on by process {process.pid}"):
            store.open("r1")
        assert store.runs()[0].state == "running"
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    assert store.runs()[0].state == "interrupted"
    journal = store.open("r1")
    texts = [e.data["text"] for e in journal.events() if e.kind is EventKind.NOTE]
    assert texts == [str(n) for n in range(len(texts))]
    assert len(texts) > 20
    journal.append(EventKind.RUN_RESUMED, {"pid": 1, "reason": ""})
    store.close()
