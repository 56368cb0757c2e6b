"""The database as the server sees it: opened with care, written by one thread, never in the event loop's way.

SQLite allows one writer at a time, and readers beside it. A thread of its own does what may take long, in order, another
one reads: a database that somebody else has locked holds up no key and no look at a call. Transactions of a few rows, of
which every call needs two, are committed by the event loop itself as long as nobody else writes: in write-ahead mode that
is an append to a file in the page cache (about 0.1 ms, without a sync), and handing it to the thread and back costs more.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DatabaseError

from toolserver.errors import StartRefused, StoreUnavailable
from toolserver.store.connection import (
    Busy,
    connect,
    damaged,
    prepare,
    probe,
    reason_of,
    settle,
    transact,
    without_waiting,
)
from toolserver.telemetry.trace import Stage

T = TypeVar("T")
_BUSY_MS = 2000
_ATTEMPTS = 2
_PATIENCE_S = _BUSY_MS * _ATTEMPTS / 1000  # in the queue, too: behind a lock each job would wait for all before it
_CHECKPOINT_EVERY = 500  # small writes; a checkpoint syncs, so it is the thread's work


class Database:
    """`open` and `close` block for a moment; `read`, `write` and `write_small` do not block the event loop."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._engines: list[Engine] = []
        self._connection: Connection | None = None
        self._small: Connection | None = None
        self._small_writes = 0
        self._reading: Connection | None = None
        self.ok = True  # whether the last write was done
        self._writer, self._reader = _Lane("toolserver-store"), _Lane("toolserver-reads")

    def open(self) -> None:
        """Raises StartRefused: damaged, newer, or out of reach."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.path.touch(mode=0o600, exist_ok=True)
            self._connection = self._connect(_BUSY_MS)
            prepare(self._connection, self.path)
            self._small = self._connect(0)
            settle(self._small, autocheckpoint=0)
            self._reading = self._connect(_BUSY_MS)
        except StartRefused:
            self.close()
            raise
        except (DatabaseError, sqlite3.Error) as problem:
            self.close()
            reason = reason_of(problem)
            if "malformed" in reason or "not a database" in reason:
                raise StartRefused(damaged(self.path)) from problem
            raise StartRefused(f"The database {self.path} can't be used: {reason}.") from problem
        except OSError as problem:
            raise StartRefused(f"The state folder can't be used: {problem}.") from problem
        self._writer.start()
        self._reader.start()

    def _connect(self, busy_ms: int) -> Connection:
        engine = connect(self.path, busy_ms)
        self._engines.append(engine)
        return engine.connect()

    def close(self) -> None:
        """What was handed in before is done first."""
        self._writer.close()
        self._reader.close()
        for connection in (self._small, self._reading, self._connection):
            if connection is not None:
                connection.close()
        self._small = self._reading = self._connection = None
        while self._engines:
            self._engines.pop().dispose()

    def run(self, job: Callable[[Connection], T], *, writes: bool = True, durable: bool = False) -> T:
        """One transaction in the calling thread, for the command line and for the thread below. Raises StoreUnavailable.

        `durable`: it outlives the machine when this returns, and so does all that was committed before it.
        """
        return self._run(self._connection, job, writes=writes, durable=durable)

    def _run(
        self,
        connection: Connection | None,
        job: Callable[[Connection], T],
        *,
        writes: bool,
        attempts: int = _ATTEMPTS,
        durable: bool = False,
    ) -> T:
        if connection is None:
            raise StoreUnavailable("the database is closed")
        for _ in range(attempts - 1):
            try:
                return transact(connection, job, writes=writes, durable=durable)
            except Busy:
                time.sleep(random.uniform(0.01, 0.1))  # noqa: S311 - two waiting writers must not meet again
        return transact(connection, job, writes=writes, durable=durable)

    def _run_late(self, job: Callable[[Connection], T], *, durable: bool) -> T:
        """For a write that has waited its time already: now or never."""
        if self._connection is None:
            raise StoreUnavailable("the database is closed")
        with without_waiting(self._connection, _BUSY_MS):
            return self._run(self._connection, job, writes=True, attempts=1, durable=durable)

    async def write_small(self, job: Callable[[Connection], T]) -> T:
        """As `write`, for a transaction of a few rows and not many KiB."""
        with Stage("store"), self._judged():
            if self._small is not None:
                with contextlib.suppress(Busy):
                    value = transact(self._small, job, writes=True)
                    self._small_writes += 1
                    if self._small_writes % _CHECKPOINT_EVERY == 0:
                        self._writer.put(self._checkpoint)
                    return value
            return await self._hand_in(job, writes=True)

    async def write(self, job: Callable[[Connection], T], *, durable: bool = False) -> T:
        """Returns when it is committed. `durable` as in `run`. Raises StoreUnavailable: nothing was changed."""
        with Stage("store"), self._judged():
            return await self._hand_in(job, writes=True, durable=durable)

    def probe(self) -> None:
        """Whether it can be written again, tried at once when the last write failed. Raises StoreUnavailable."""
        if not self.ok and self._small is not None:
            with self._judged():
                transact(self._small, probe, writes=True)

    @contextlib.contextmanager
    def _judged(self) -> Iterator[None]:
        try:
            yield
        except StoreUnavailable:
            self.ok = False
            raise
        self.ok = True

    async def read(self, job: Callable[[Connection], T]) -> T:
        """Raises StoreUnavailable."""
        return await self._hand_in(job, writes=False)

    def _hand_in(self, job: Callable[[Connection], T], *, writes: bool, durable: bool = False) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        handed_in = time.monotonic()

        def work() -> None:
            try:
                if not writes:
                    value = self._run(self._reading, job, writes=False)
                elif time.monotonic() - handed_in < _PATIENCE_S:
                    value = self.run(job, durable=durable)
                else:
                    value = self._run_late(job, durable=durable)
            except BaseException as problem:  # noqa: BLE001 - carried to whoever awaits
                told: tuple[Callable[..., None], Any] = (answer.set_exception, problem)
            else:
                told = (answer.set_result, value)
            with contextlib.suppress(RuntimeError):  # the loop ended meanwhile; nobody waits
                loop.call_soon_threadsafe(_settle, answer, *told)

        (self._writer if writes else self._reader).put(work)
        return answer

    def _checkpoint(self) -> None:
        """RESTART, since a passive one never catches up with a steady writer: small writes take the long way meanwhile."""
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):  # put off to the next one
                self._connection.connection.cursor().execute("PRAGMA wal_checkpoint(RESTART)")


class _Lane:
    """A thread that does jobs in order."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        """Blocks until what was handed in before is done."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _settle(answer: asyncio.Future[Any], settle_it: Callable[[Any], None], value: Any) -> None:
    if not answer.done():
        settle_it(value)
