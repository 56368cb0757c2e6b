"""The PlanStore in SQLite through SQLAlchemy: each append is one transaction, on the disk when it returns.

Database errors become JournalBroken here and nowhere else.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, insert, select, update
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from agent.errors import JournalBroken, RunNotFound, UsageProblem
from agent.events import Event, EventKind
from agent.store.base import RunRow
from agent.store.hash_chain import GENESIS, seal, verified
from agent.store.memory_store import tell
from agent.store.run_lock import RunLock, is_held
from agent.store.schema import events as event_table
from agent.store.schema import metadata
from agent.store.schema import runs as run_table

BUSY_S = 30.0  # how long an append waits for another process's transaction


class SqlStore:
    """`url` such as sqlite:////path/runs.db; the folder is made. Lock files lie beside the database, in NAME.locks/.

    Raises UsageProblem for another database, JournalBroken when the file is damaged or can't be written.
    """

    def __init__(self, url: str, *, clock: Callable[[], float] = time.time) -> None:
        path = _sqlite_path(url)
        self._path, self._clock = path, clock
        self._locks = path.with_name(path.name + ".locks")
        try:
            self._locks.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise JournalBroken(
                f"the run store {path} can't be written ({error.strerror}): choose another runs_dir"
            ) from error
        self._engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": BUSY_S, "check_same_thread": False})
        event.listen(self._engine, "connect", _on_connect)
        event.listen(self._engine, "begin", _on_begin)
        self._open: list[SqlJournal] = []
        with self._mapped() as connection:
            metadata.create_all(connection)

    def create(self, run_id: str, goal: str) -> SqlJournal:
        """Raises UsageProblem when the id is taken or has signs that a file name can't hold."""
        if not run_id or not all(c.isalnum() or c in "-_" for c in run_id) or len(run_id) > 128:
            raise UsageProblem(f"{run_id!r} is no run id: use up to 128 letters, digits, - and _")
        now = self._clock()
        row = {"goal": goal, "state": "running", "created_at": now, "updated_at": now, "events": 0, "owner": ""}
        with self._mapped() as connection:
            if connection.execute(select(run_table.c.run_id).where(run_table.c.run_id == run_id)).first():
                raise UsageProblem(f"there is a run {run_id} already: choose another id")
            connection.execute(insert(run_table).values(run_id=run_id, **row))
        return self.open(run_id)

    def open(self, run_id: str) -> SqlJournal:
        run_id = self._resolve(run_id)
        lock = RunLock(self._locks / run_id)
        if not lock.take(f"process {os.getpid()} on {socket.gethostname()}"):
            raise JournalBroken(
                f"run {run_id} is being worked on by {lock.holder()}: wait for it, or end that process first"
            )
        try:
            journal = SqlJournal(run_id, self._engine, lock, self._mapped, self._clock)
        except BaseException:
            lock.release()
            raise
        self._open.append(journal)
        return journal

    def runs(self) -> list[RunRow]:
        """A run that says running while no process holds it was killed: it shows as interrupted."""
        with self._mapped() as connection:
            rows = connection.execute(
                select(run_table).order_by(run_table.c.created_at.desc(), run_table.c.run_id)
            ).all()
        found = []
        for row in rows:
            killed = row.state == "running" and not is_held(self._locks / row.run_id)
            state = "interrupted" if killed else row.state
            found.append(RunRow(row.run_id, row.goal, state, row.created_at, row.updated_at, row.events))
        return found

    def read(self, run_id: str) -> list[Event]:
        run_id = self._resolve(run_id)
        with self._mapped() as connection:
            return list(verified(_select_events(connection, run_id)))

    def close(self) -> None:
        for journal in self._open:
            journal.close()
        self._open.clear()
        self._engine.dispose()

    def _resolve(self, prefix: str) -> str:
        with self._mapped() as connection:
            names = connection.execute(select(run_table.c.run_id)).scalars().all()
        found = [prefix] if prefix in names else [n for n in names if prefix and n.startswith(prefix)]
        if not found:
            raise RunNotFound(f"there is no run {prefix!r}: `agent list` shows them")
        if len(found) > 1:
            raise RunNotFound(f"{prefix!r} may be {', '.join(sorted(found)[:5])}: give more of the id")
        return found[0]

    @contextmanager
    def _mapped(self) -> Iterator[Connection]:
        """One transaction; database errors become JournalBroken with what to do."""
        try:
            with self._engine.begin() as connection:
                yield connection
        except DBAPIError as error:
            raise JournalBroken(_explain(self._path, str(error.orig))) from error


class SqlJournal:
    """Made by SqlStore. Appends come from one process; threads of it take turns."""

    def __init__(
        self,
        run_id: str,
        engine: Engine,
        lock: RunLock,
        transaction: Callable[[], Any],
        clock: Callable[[], float],
    ) -> None:
        self.run_id = run_id
        self._engine, self._lock, self._transaction, self._clock = engine, lock, transaction, clock
        self._owner = secrets.token_hex(16)
        self._listeners: list[Callable[[Event], None]] = []
        self._settled: dict[tuple[EventKind, str], Event] = {}
        self._turn = threading.RLock()
        self._seq, self._last_hash = 0, GENESIS
        with transaction() as connection:
            for past in verified(_select_events(connection, run_id)):
                self._index(past)
            connection.execute(update(run_table).where(run_table.c.run_id == run_id).values(owner=self._owner))

    def append(self, kind: EventKind, data: dict[str, Any]) -> Event:
        with self._turn:
            fresh, text = seal(self.run_id, self._seq + 1, self._clock(), kind, data, prev_hash=self._last_hash)
            changes: dict[str, Any] = {"events": fresh.seq, "updated_at": fresh.at}
            if kind is EventKind.RUN_ENDED:
                changes["state"] = fresh.data["state"]
            elif kind in {EventKind.RUN_STARTED, EventKind.RUN_RESUMED}:
                changes["state"] = "running"
            owned = (run_table.c.run_id == self.run_id) & (run_table.c.owner == self._owner)
            with self._transaction() as connection:
                if connection.execute(update(run_table).where(owned).values(**changes)).rowcount != 1:
                    raise JournalBroken(f"run {self.run_id} was taken over by another process; this one stops here")
                row = {"run_id": self.run_id, "seq": fresh.seq, "at": fresh.at, "kind": str(kind), "data": text}
                connection.execute(insert(event_table).values(**row, prev_hash=fresh.prev_hash, hash=fresh.hash))
            self._index(fresh)
        tell(self._listeners, fresh)
        return fresh

    def _index(self, entry: Event) -> None:
        self._seq, self._last_hash = entry.seq, entry.hash
        key = entry.data.get("key")
        if key:
            self._settled.setdefault((entry.kind, key), entry)

    def events(self, after: int = 0) -> Iterator[Event]:
        with self._transaction() as connection:
            found = list(_select_events(connection, self.run_id, after))
        return iter(found)

    def settled(self, kind: EventKind, key: str) -> Event | None:
        return self._settled.get((kind, key))

    def subscribe(self, listener: Callable[[Event], None]) -> None:
        self._listeners.append(listener)

    def close(self) -> None:
        self._lock.release()


def _sqlite_path(url: str) -> Path:
    try:
        parsed = make_url(url)
    except (ArgumentError, NoSuchModuleError) as error:
        raise UsageProblem(f"{url!r} is no database URL: use sqlite:///FILE") from error
    if parsed.get_backend_name() != "sqlite" or not parsed.database or parsed.database == ":memory:":
        raise UsageProblem("the run store must be a SQLite file for now: use sqlite:///FILE")
    return Path(parsed.database).absolute()


def _on_connect(connection: Any, _record: Any) -> None:
    """The driver must not begin transactions by itself: `BEGIN IMMEDIATE` takes the write lock before anything is read."""
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


def _on_begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _select_events(connection: Connection, run_id: str, after: int = 0) -> Iterator[Event]:
    chosen = (event_table.c.run_id == run_id) & (event_table.c.seq > after)
    for row in connection.execute(select(event_table).where(chosen).order_by(event_table.c.seq)):
        try:
            kind, data = EventKind(row.kind), json.loads(row.data)
        except ValueError as error:
            raise JournalBroken(
                f"event {row.seq} of run {run_id} can't be read ({error}): it is damaged or comes from a newer version"
            ) from error
        yield Event(row.run_id, row.seq, row.at, kind, data, row.prev_hash, row.hash)


def _explain(path: Path, problem: str) -> str:
    if "not a database" in problem or "malformed" in problem:
        return f"the run store {path} is damaged ({problem}): move it away or restore it from a copy"
    if "locked" in problem or "busy" in problem:
        return f"the run store {path} was busy for {BUSY_S:g} s: another process holds a transaction; try again"
    if "readonly" in problem or "unable to open" in problem or "full" in problem or "disk I/O" in problem:
        return f"the run store {path} can't be written ({problem}): check the disk and its permissions"
    return f"the run store {path} gave an error: {problem}"
