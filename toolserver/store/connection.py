"""Connections to SQLite with the settings that make them safe, the check of what is opened, and one transaction."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection, Engine, create_engine, event, inspect, select
from sqlalchemy.exc import DatabaseError, IntegrityError
from sqlalchemy.pool import StaticPool

from toolserver.errors import StartRefused, StoreUnavailable
from toolserver.store import schema
from toolserver.store.migration import migrate

T = TypeVar("T")


def database_path(state_dir: Path) -> Path:
    return state_dir / "toolserver.db"


class Busy(StoreUnavailable):
    """Another writer held the database for as long as this connection waits."""


def connect(path: Path, busy_ms: int) -> Engine:
    """An engine of one connection, for whichever thread has it in hand. `busy_ms`: how long it waits for another writer."""
    engine = create_engine(
        f"sqlite+pysqlite:///{path}",
        poolclass=StaticPool,
        hide_parameters=True,  # they are what callers sent; an error of the database may end in the log
        connect_args={"check_same_thread": False, "timeout": busy_ms / 1000},
    )

    @event.listens_for(engine, "connect")
    def _settings(raw: sqlite3.Connection, _record: object) -> None:
        raw.isolation_level = None  # transactions are begun below, not by the driver's guess
        raw.execute(f"PRAGMA busy_timeout={busy_ms}")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        raw = _driver(connection)
        if not raw.in_transaction:  # else `transact` has begun it
            _begin_in(raw, writes=True)

    return engine


def _driver(connection: Connection) -> sqlite3.Connection:
    raw = connection.connection.driver_connection
    assert isinstance(raw, sqlite3.Connection)  # noqa: S101 - `connect` makes no others
    return raw


def _begin_in(raw: sqlite3.Connection, *, writes: bool) -> None:
    # a deferred transaction that turns into a writer fails at once when another writes, whatever the busy timeout
    raw.execute("BEGIN IMMEDIATE" if writes else "BEGIN")


def prepare(connection: Connection, path: Path) -> None:
    """Make or check the tables. Raises StartRefused."""
    kept = f"The file was left as it is: {path}"
    check = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
    if check != "ok":
        raise StartRefused(damaged(path))
    connection.commit()
    tables = set(inspect(connection).get_table_names())
    connection.commit()
    if tables and "meta" not in tables:
        raise StartRefused(f"The database is not one of a ToolServer. {kept}; choose another folder with --state-dir.")
    if tables:
        query = select(schema.meta.c.value).where(schema.meta.c.name == "schema_version")
        version = int(connection.execute(query).scalar() or 0)
        connection.commit()
        if version > schema.SCHEMA_VERSION:
            raise StartRefused(
                f"The database has schema version {version}, this ToolServer knows {schema.SCHEMA_VERSION}: it was made by "
                f"a newer one. {kept}; start the newer version, or choose another folder with --state-dir."
            )
        if version < schema.SCHEMA_VERSION:
            with connection.begin():
                migrate(connection, version)
    else:
        with connection.begin():
            schema.metadata.create_all(connection)
            connection.execute(schema.meta.insert().values(name="schema_version", value=str(schema.SCHEMA_VERSION)))
    settle(connection, autocheckpoint=1000)


def probe(connection: Connection) -> None:
    """A write that needs room on the disk and changes nothing that matters."""
    row = schema.meta.insert().prefix_with("OR REPLACE").values(name="probed_at", value=str(time.time()))
    connection.execute(row)


@contextlib.contextmanager
def without_waiting(connection: Connection, busy_ms: int) -> Iterator[None]:
    """A locked database is told of at once inside; `busy_ms` holds again after it."""
    connection.connection.cursor().execute("PRAGMA busy_timeout=0")
    try:
        yield
    finally:
        connection.connection.cursor().execute(f"PRAGMA busy_timeout={busy_ms}")


def settle(connection: Connection, *, autocheckpoint: int) -> None:
    """Durable against the death of the process at every commit, against that of the machine at every checkpoint."""
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", f"wal_autocheckpoint={autocheckpoint}"):
        connection.connection.cursor().execute(f"PRAGMA {pragma}")


def damaged(path: Path) -> str:
    return (
        f"The database {path} is damaged or no database. It was left as it is. To start anew, move it and its -wal and -shm "
        "files away: stored outcomes, API keys and ended sessions are then forgotten. To go on, put a copy from before there."
    )


def reason_of(problem: DatabaseError | sqlite3.Error) -> str:
    return str(problem.orig) if isinstance(problem, DatabaseError) else str(problem)


@contextlib.contextmanager
def waiting_for_the_disk(connection: Connection) -> Iterator[None]:
    """A commit inside is on the disk when it returns, and all that was committed before it by any connection too."""
    connection.connection.cursor().execute("PRAGMA synchronous=FULL")
    try:
        yield
    finally:
        connection.connection.cursor().execute("PRAGMA synchronous=NORMAL")


def transact(connection: Connection, job: Callable[[Connection], T], *, writes: bool, durable: bool = False) -> T:
    """`job` in a transaction of its own, in the calling thread. Raises StoreUnavailable, Busy: then nothing was changed.

    It is begun and ended by the driver: for a job that SQLAlchemy need not see, its part would be a fifth of the whole.
    """
    raw = _driver(connection)
    try:
        with waiting_for_the_disk(connection) if durable else contextlib.nullcontext():
            _begin_in(raw, writes=writes)
            value = job(connection)
            if connection.in_transaction():  # a statement went through SQLAlchemy, which then has one of its own to end
                connection.commit()
            if raw.in_transaction:
                raw.commit()
            return value
    except BaseException as problem:
        with contextlib.suppress(DatabaseError, sqlite3.Error):
            connection.rollback()  # also of one that SQLAlchemy calls invalid since its commit failed
        with contextlib.suppress(sqlite3.Error):
            raw.rollback()
        if isinstance(problem, IntegrityError) or not isinstance(problem, DatabaseError | sqlite3.Error):
            raise
        reason = reason_of(problem)
        raise (Busy(reason) if "locked" in reason else StoreUnavailable(reason)) from problem
