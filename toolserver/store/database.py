"""The database: opened with care, used by one thread, seen from asyncio.

    StateLock        another server on the same state folder is refused
    Database         read(f) and write(f) run f(connection) in a transaction of its own

SQLite allows one writer; a thread of its own keeps the event loop free of its waits and makes every transaction whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import queue
import random
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event, inspect, select
from sqlalchemy.exc import DatabaseError, IntegrityError
from sqlalchemy.pool import StaticPool

from toolserver.errors import StartRefused, StoreUnavailable
from toolserver.store import schema

T = TypeVar("T")
_BUSY_MS = 2000
_ATTEMPTS = 2


class StateLock:
    """Held for the life of a server. The lock goes with the process, so a killed server leaves none."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / "server.lock"
        self._file: int | None = None

    def take(self) -> None:
        """Raises StartRefused when another server holds it."""
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            os.close(self._file)
            self._file = None
            raise StartRefused(
                f"Another ToolServer runs on the state folder {self._path.parent}. Stop it, or give this one another "
                "folder with --state-dir."
            ) from problem

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _connect(path: Path) -> Engine:
    # the pool hands the one connection to the thread that works for this Database
    engine = create_engine(
        f"sqlite+pysqlite:///{path}",
        poolclass=StaticPool,
        connect_args={"check_same_thread": False, "timeout": _BUSY_MS / 1000},
    )

    @event.listens_for(engine, "connect")
    def _settings(raw: sqlite3.Connection, _record: object) -> None:
        raw.isolation_level = None  # transactions are begun below, not by the driver's guess
        raw.execute(f"PRAGMA busy_timeout={_BUSY_MS}")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # a deferred transaction that turns into a writer fails at once when another writes, whatever the busy timeout
        raw = connection.connection.driver_connection
        if isinstance(raw, sqlite3.Connection):  # straight to the driver: this is half the cost of a small transaction
            raw.execute("BEGIN IMMEDIATE" if connection.info.get("writes", True) else "BEGIN")

    return engine


def _prepare(connection: Connection, path: Path) -> None:
    """Make or check the tables. Raises StartRefused."""
    kept = f"The file was left as it is: {path}"
    check = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
    if check != "ok":
        raise StartRefused(_damaged(path))
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
    else:
        with connection.begin():
            schema.metadata.create_all(connection)
            connection.execute(schema.meta.insert().values(name="schema_version", value=str(schema.SCHEMA_VERSION)))
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "wal_autocheckpoint=1000"):
        connection.connection.cursor().execute(f"PRAGMA {pragma}")


def _damaged(path: Path) -> str:
    return (
        f"The database {path} is damaged or no database. It was left as it is. To start anew, move it and its -wal and -shm "
        "files away: stored outcomes, API keys and ended sessions are then forgotten. To go on, put a copy from before there."
    )


class Database:
    """The server's database. `open` and `close` block for a moment; `read` and `write` do not block the event loop."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._engine: Engine | None = None
        self._connection: Connection | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Raises StartRefused: damaged, newer, or out of reach."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.path.touch(mode=0o600, exist_ok=True)
            self._engine = _connect(self.path)
            self._connection = self._engine.connect()
            _prepare(self._connection, self.path)
        except StartRefused:
            self.close()
            raise
        except (DatabaseError, sqlite3.Error) as problem:
            self.close()
            reason = str(problem.orig) if isinstance(problem, DatabaseError) else str(problem)
            if "malformed" in reason or "not a database" in reason:
                raise StartRefused(_damaged(self.path)) from problem
            raise StartRefused(f"The database {self.path} can't be used: {reason}.") from problem
        except OSError as problem:
            raise StartRefused(f"The state folder can't be used: {problem}.") from problem
        self._thread = threading.Thread(target=self._work, name="toolserver-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """What was handed in before is done first."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._engine is not None:
            self._engine.dispose()
            self._engine = None

    def run(self, job: Callable[[Connection], T], *, writes: bool = True) -> T:
        """Run one transaction in the calling thread, for the command line and for the thread below. Raises StoreUnavailable."""
        if self._connection is None:
            raise StoreUnavailable("the database is closed")
        attempt = 1
        while True:
            self._connection.info["writes"] = writes
            try:
                with self._connection.begin():
                    return job(self._connection)
            except IntegrityError:
                raise
            except (DatabaseError, sqlite3.Error) as problem:
                with contextlib.suppress(DatabaseError, sqlite3.Error):
                    self._connection.rollback()
                reason = str(problem.orig) if isinstance(problem, DatabaseError) else str(problem)
                if "locked" not in reason or attempt == _ATTEMPTS:
                    raise StoreUnavailable(reason) from problem
            attempt += 1
            time.sleep(random.uniform(0.01, 0.1))  # noqa: S311 - two waiting writers must not meet again

    async def write(self, job: Callable[[Connection], T]) -> T:
        """Returns when it is committed. Raises StoreUnavailable: nothing was changed."""
        return await self._hand_in(job, writes=True)

    async def read(self, job: Callable[[Connection], T]) -> T:
        """Raises StoreUnavailable."""
        return await self._hand_in(job, writes=False)

    def _hand_in(self, job: Callable[[Connection], T], *, writes: bool) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            try:
                value = self.run(job, writes=writes)
            except BaseException as problem:  # noqa: BLE001 - carried to whoever awaits
                told: tuple[Callable[..., None], Any] = (answer.set_exception, problem)
            else:
                told = (answer.set_result, value)
            with contextlib.suppress(RuntimeError):  # the loop ended meanwhile; nobody waits
                loop.call_soon_threadsafe(_settle, answer, *told)

        self._jobs.put(work)
        return answer

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _settle(answer: asyncio.Future[Any], settle: Callable[[Any], None], value: Any) -> None:
    if not answer.done():
        settle(value)
