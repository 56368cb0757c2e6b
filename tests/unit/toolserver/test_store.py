from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError

from tests.unit.toolserver.crib import Crib, detail, new_runtime, running, settings
from toolserver.errors import StartRefused, StoreUnavailable
from toolserver.store import calls, keys, sessions
from toolserver.store.calls import CallRow
from toolserver.store.connection import connect, transact
from toolserver.store.database import Database
from toolserver.store.lock import StateLock
from toolserver.store.schema import meta
from toolserver.store.sessions import SessionRow


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "toolserver.db"


def _row(call_id: str = "c", tenant: str = "t", request_hash: str = "h") -> CallRow:
    return CallRow(tenant, call_id, "s", "tool", request_hash, "0" * 32, 1.0)


def _begin(row: CallRow) -> Callable[[Connection], CallRow | None]:
    return lambda connection: calls.begin(connection, row)


def _end(call_id: str, status: int = 200) -> Callable[[Connection], None]:
    return lambda connection: calls.end(connection, "t", call_id, status=status, body=b"x", ended_at=2.0)


def _open(path: Path) -> Database:
    database = Database(path)
    database.open()
    return database


def test_a_call_is_written_once_and_its_first_answer_stays(path: Path) -> None:
    database = _open(path)
    assert database.run(lambda c: calls.begin(c, _row())) is None
    assert database.run(lambda c: calls.begin(c, _row(request_hash="other"))) == _row()
    for status in (200, 500):
        database.run(_end("c", status))
    found = database.run(lambda c: calls.find(c, "t", "c"))
    assert found is not None
    assert (found.status, found.body) == (200, b"x")
    assert database.run(lambda c: calls.find(c, "another", "c")) is None
    database.close()


def test_a_call_that_ran_nothing_gives_its_name_back(path: Path) -> None:
    database = _open(path)
    database.run(lambda c: calls.begin(c, _row()))
    database.run(lambda c: calls.end(c, "t", "c", status=503, body=b"x", ended_at=2.0))
    assert database.run(lambda c: calls.begin(c, _row(request_hash="new"))) is None
    database.close()


def test_what_is_old_is_purged_and_what_runs_is_not(path: Path) -> None:
    database = _open(path)
    for name in ("old", "running"):
        database.run(_begin(_row(name)))
    database.run(lambda c: calls.end(c, "t", "old", status=200, body=b"", ended_at=5.0))
    database.run(lambda c: sessions.begin(c, SessionRow("s", "t", 1.0, "w", "{}", 9.0, 1.0)))
    database.run(lambda c: sessions.end(c, "s", "idle", 5.0))
    assert database.run(lambda c: (calls.purge(c, 6.0), sessions.purge(c, 6.0))) == (1, 1)
    assert [row.call_id for row in database.run(calls.running)] == ["running"]
    database.close()


def test_a_failed_transaction_changes_nothing(path: Path) -> None:
    database = _open(path)

    def half(connection: Connection) -> None:
        calls.begin(connection, _row())
        raise KeyError("stop")

    with pytest.raises(KeyError):
        database.run(half)
    assert database.run(calls.running) == []
    database.close()


def test_a_lock_held_by_another_writer_is_unavailable_and_loses_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolserver.store.database._BUSY_MS", 50)
    database = _open(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match="locked"):
        database.run(lambda c: calls.begin(c, _row()))
    assert database.run(calls.running, writes=False) == []  # reading goes on
    other.execute("ROLLBACK")
    assert database.run(lambda c: calls.begin(c, _row())) is None
    other.close()
    database.close()


def test_a_full_disk_is_unavailable_and_recovers(path: Path) -> None:
    database = _open(path)
    pages = database.run(lambda c: c.exec_driver_sql("PRAGMA page_count").scalar(), writes=False)
    database.run(lambda c: c.exec_driver_sql(f"PRAGMA max_page_count={pages}"), writes=False)
    big = b"x" * 200_000
    database.run(lambda c: calls.begin(c, _row()))
    with pytest.raises(StoreUnavailable, match="full"):
        database.run(lambda c: calls.end(c, "t", "c", status=200, body=big, ended_at=1.0))
    assert [row.status for row in database.run(calls.running)] == [None]
    database.run(lambda c: c.exec_driver_sql("PRAGMA max_page_count=100000"), writes=False)
    database.run(lambda c: calls.end(c, "t", "c", status=200, body=big, ended_at=1.0))
    database.close()


def test_a_commit_that_fails_is_rolled_back_and_the_next_transaction_goes_on(tmp_path: Path) -> None:
    """As on a disk that is full at the commit: here a deferred foreign key stands for it."""
    connection = connect(tmp_path / "t.db", 1000).connect()
    for statement in (
        "PRAGMA foreign_keys=ON",
        "CREATE TABLE one (id INTEGER PRIMARY KEY)",
        "CREATE TABLE two (one INTEGER REFERENCES one(id) DEFERRABLE INITIALLY DEFERRED)",
    ):
        connection.connection.cursor().execute(statement)
    with pytest.raises(IntegrityError):
        transact(connection, lambda c: c.exec_driver_sql("INSERT INTO two VALUES (7)"), writes=True)
    transact(connection, lambda c: c.exec_driver_sql("INSERT INTO one VALUES (1)"), writes=True)
    rows = transact(connection, lambda c: c.exec_driver_sql("SELECT count(*) FROM two").scalar(), writes=False)
    assert rows == 0


@pytest.mark.parametrize("content", [b"this is no database" * 100, b"SQLite format 3\0" + b"\xff" * 4000])
def test_a_damaged_database_refuses_the_start_and_is_left_as_it_is(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(StartRefused, match="damaged"):
        _open(path)
    assert path.read_bytes() == content


def test_a_damaged_page_is_found_at_the_start(path: Path) -> None:
    database = _open(path)
    for number in range(200):
        database.run(_begin(_row(f"call-{number}" + "x" * 100)))
    database.close()
    raw = bytearray(path.read_bytes())
    raw[-3 * 4096 : -4096] = b"\xa5" * (2 * 4096)
    path.write_bytes(raw)
    with pytest.raises(StartRefused, match="damaged"):
        _open(path)


def test_a_newer_or_foreign_database_refuses_the_start(path: Path) -> None:
    database = _open(path)
    database.run(lambda c: c.exec_driver_sql("UPDATE meta SET value = '99'"))
    database.close()
    with pytest.raises(StartRefused, match="newer"):
        _open(path)
    path.unlink()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE somebodys (x)")
    other.close()
    with pytest.raises(StartRefused, match="not one of a ToolServer"):
        _open(path)


def test_a_second_server_on_the_state_folder_is_refused(tmp_path: Path) -> None:
    first, second = StateLock(tmp_path), StateLock(tmp_path)
    first.take()
    with pytest.raises(StartRefused, match="in use by another ToolServer"):
        second.take()
    first.release()
    second.take()
    second.release()


def test_only_a_digest_of_a_key_is_stored(path: Path) -> None:
    database = _open(path)
    text = keys.new_text()
    key = database.run(lambda c: keys.create(c, text, "n", "t", "use"))
    assert database.run(lambda c: keys.find(c, keys.digest(text))) == key
    database.close()
    assert text.encode() not in b"".join(p.read_bytes() for p in path.parent.iterdir())
    assert path.stat().st_mode & 0o077 == 0


async def test_jobs_are_done_in_order_and_none_is_lost(path: Path) -> None:
    database = _open(path)
    await asyncio.gather(*(database.write(_begin(_row(f"c{n}"))) for n in range(200)))
    assert [row.call_id for row in await database.read(calls.running)] == [f"c{n}" for n in range(200)]
    database.close()
    with pytest.raises(StoreUnavailable):
        database.run(calls.running)


async def test_small_writes_go_on_while_another_writer_holds_the_database(path: Path) -> None:
    database = _open(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    work = asyncio.ensure_future(database.write_small(lambda c: calls.begin(c, _row())))
    await asyncio.sleep(0.1)
    assert not work.done()  # it waits in the thread, not in the event loop
    other.execute("ROLLBACK")
    other.close()
    assert await work is None
    database.close()


async def test_the_log_of_small_writes_is_folded_into_the_database(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolserver.store.database._CHECKPOINT_EVERY", 50)
    database = _open(path)
    for number in range(300):
        await database.write_small(_begin(_row(f"c{number}")))
        if number % 50 == 49:
            await database.write(calls.running)  # the thread has had its turn
    assert path.with_name(path.name + "-wal").stat().st_size < 150 * 3 * 4096
    database.close()
    again = _open(path)
    assert len(again.run(calls.running)) == 300
    again.close()


async def _unavailable(_job: Any) -> Any:
    raise StoreUnavailable("database or disk is full")


async def test_without_the_database_a_call_is_503_and_runs_nothing(crib: Crib, monkeypatch: pytest.MonkeyPatch) -> None:
    session = await crib.session()
    for way in ("write", "write_small"):
        monkeypatch.setattr(crib.server.database, way, _unavailable)
    told = detail(await crib.call(session, "count", {}, key="k"), 503, "runtime_unavailable")
    assert told["effects"] == "none"
    assert "count" not in crib.runtime.workspaces[crib.workspace_id(session)].files
    detail(await crib.client.post("/v1/sessions", json={"images": ["workspace"]}), 503, "runtime_unavailable")
    monkeypatch.undo()
    assert (await crib.call(session, "count", {}, key="k")).status_code == 200
    assert len(crib.runtime.workspaces) == 1


async def test_an_outcome_that_can_not_be_written_is_given_and_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolserver.calls.stored_answers._RETRY_WRITE_S", 0.05)
    chosen = settings(tmp_path)
    async with running(chosen) as crib:
        session = await crib.session()
        write = crib.server.database.write_small
        calls_made = 0

        async def second_fails(job: Any) -> Any:
            nonlocal calls_made
            calls_made += 1
            return await (_unavailable(job) if calls_made == 2 else write(job))

        monkeypatch.setattr(crib.server.database, "write_small", second_fails)
        first = await crib.call(session, "count", {}, key="k")
        assert first.status_code == 200
        assert (await crib.call(session, "count", {}, key="k")).content == first.content
        await asyncio.sleep(0.2)
        assert not crib.server.executor.admission.held()
    async with running(chosen, new_runtime(chosen)) as crib:
        assert (await crib.client.get("/v1/calls/k")).content == first.content


def test_an_error_of_the_database_tells_no_values(tmp_path: Path) -> None:
    database = Database(tmp_path / "toolserver.db")
    database.open()
    try:
        row = {"name": "twice", "value": "canary-of-a-value"}
        with pytest.raises(IntegrityError) as caught:
            database.run(lambda connection: connection.execute(meta.insert(), [row, row]))
        assert "canary-of-a-value" not in str(caught.value)
    finally:
        database.close()
