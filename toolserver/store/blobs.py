"""What snapshots hold, by content: a database of its own for each tenant, so that none learns of another's content.

A transaction is whole or not there, whatever kills the server: no half-written piece, nothing to sweep at start. What is
read is checked against its name, so damage is told of and never handed on.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from toolserver.errors import StoreUnavailable

T = TypeVar("T")
_BUSY_S = 5.0
_PAGE_BYTES = 16_384
_VACUUM_PAGES = 512  # given back to the disk at a time
_SAMPLE_BYTES, _WORTH = 16_384, 0.85
_AT_A_TIME = 500  # names of one query
_SCHEMA = "CREATE TABLE IF NOT EXISTS blobs (name BLOB PRIMARY KEY, packed INTEGER NOT NULL, data BLOB NOT NULL)"


class Damaged(Exception):  # noqa: N818 - reads as the state it names
    """A piece is missing, or is not what its name says."""


class BlobStore:
    """Pieces by the SHA-256 of their content. Methods block, and raise StoreUnavailable; any thread may call them."""

    def __init__(self, folder: Path, tenant: str) -> None:
        self._path = folder / f"{hashlib.sha256(tenant.encode()).hexdigest()[:32]}.db"
        self._connection: sqlite3.Connection | None = None
        self._lock = threading.Lock()

    def _run(self, job: Callable[[sqlite3.Connection], T]) -> T:
        with self._lock:
            try:
                connection = self._connection or self._open()
                with contextlib.closing(connection.execute("BEGIN IMMEDIATE")):
                    pass
                try:
                    value = job(connection)
                    connection.execute("COMMIT")
                except BaseException:
                    with contextlib.suppress(sqlite3.Error):
                        connection.execute("ROLLBACK")
                    raise
            except (sqlite3.Error, OSError) as problem:
                raise StoreUnavailable(f"the snapshots can't be read or written: {problem}") from problem
            return value

    def _open(self) -> sqlite3.Connection:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path.touch(mode=0o600, exist_ok=True)
        connection = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            for pragma in (
                f"page_size={_PAGE_BYTES}",
                "auto_vacuum=INCREMENTAL",
                "journal_mode=WAL",
                "synchronous=NORMAL",
                "secure_delete=OFF",  # some builds write zeros over all that is deleted, which takes its size once more
            ):
                connection.execute(f"PRAGMA {pragma}").fetchall()
            connection.execute(_SCHEMA)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return connection

    def lacking(self, names: Iterable[bytes]) -> set[bytes]:
        """Those of `names` that are not here."""
        wanted = list(names)

        def look(connection: sqlite3.Connection) -> set[bytes]:
            lack = set(wanted)
            for place in range(0, len(wanted), _AT_A_TIME):
                some = wanted[place : place + _AT_A_TIME]
                marks = ",".join("?" * len(some))
                found = connection.execute(f"SELECT name FROM blobs WHERE name IN ({marks})", some)  # noqa: S608 - marks only
                lack.difference_update(row[0] for row in found)
            return lack

        return self._run(look)

    def put(self, pieces: Iterable[bytes]) -> list[bytes]:
        """In one transaction; their names."""
        rows = [(hashlib.sha256(data).digest(), *_packed(data)) for data in pieces]
        self._run(lambda c: c.executemany("INSERT OR IGNORE INTO blobs VALUES (?, ?, ?)", rows))
        return [row[0] for row in rows]

    def get(self, name: bytes) -> bytes:
        """Raises Damaged; then it is forgotten, so that it is stored anew when it comes again."""
        try:
            return self._run(lambda connection: _read(connection, name))
        except Damaged:
            self._run(lambda connection: connection.execute("DELETE FROM blobs WHERE name = ?", (name,)))
            raise

    def used_bytes(self) -> int:
        """What is in use, on disk."""

        def count(connection: sqlite3.Connection) -> int:
            pages, free = (
                connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count")
            )
            return int((pages - free) * _PAGE_BYTES)

        return self._run(count)

    def keep_only(self, roots: Iterable[bytes], names_in: Callable[[bytes], Iterable[bytes]]) -> int:
        """Remove all but `roots` and the `names_in` them; how many. All or nothing. What a damaged root named is not kept."""

        def sweep(connection: sqlite3.Connection) -> int:
            connection.execute("CREATE TEMP TABLE live (name BLOB PRIMARY KEY) WITHOUT ROWID")
            for root in roots:
                with contextlib.suppress(Damaged):
                    names = itertools.chain((root,), names_in(_read(connection, root)))
                    connection.executemany("INSERT OR IGNORE INTO live VALUES (?)", ((name,) for name in names))
            gone = connection.execute("DELETE FROM blobs WHERE name NOT IN (SELECT name FROM live)").rowcount
            connection.execute("DROP TABLE live")
            return gone

        count = self._run(sweep)
        if count:
            with contextlib.suppress(sqlite3.Error):  # only room on disk: the next sweep tries again
                while self._give_back():
                    pass
        return count

    def _give_back(self) -> bool:
        """Free pages to the disk, some at a time: it may be nearly full, and moving pages takes room. Whether there are more."""
        with self._lock:
            if self._connection is None:
                return False
            # a script runs to its end; a single statement would stop at the first page
            self._connection.executescript("PRAGMA wal_checkpoint(TRUNCATE)")
            before = self._connection.execute("PRAGMA freelist_count").fetchone()[0]
            self._connection.executescript(
                f"PRAGMA incremental_vacuum({_VACUUM_PAGES}); PRAGMA wal_checkpoint(TRUNCATE)"
            )
            left = self._connection.execute("PRAGMA freelist_count").fetchone()[0]
            return bool(0 < left < before)

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def delete(self) -> None:
        """The whole store. Only when nothing is kept in it and nobody writes."""
        self.close()
        for ending in ("", "-wal", "-shm"):
            self._path.with_name(self._path.name + ending).unlink(missing_ok=True)


def _read(connection: sqlite3.Connection, name: bytes) -> bytes:
    found = connection.execute("SELECT packed, data FROM blobs WHERE name = ?", (name,)).fetchone()
    if found is None:
        raise Damaged
    packed, data = found
    try:
        data = zlib.decompress(data) if packed else data
    except (zlib.error, TypeError) as problem:
        raise Damaged from problem
    if hashlib.sha256(data).digest() != name:
        raise Damaged
    return bytes(data)


def _packed(data: bytes) -> tuple[int, bytes]:
    """(1, compressed) where that pays, else (0, data): a sample decides, since most large files are compressed already."""
    if len(data) < 64 or len(zlib.compress(data[:_SAMPLE_BYTES], 1)) > _WORTH * min(len(data), _SAMPLE_BYTES):
        return 0, data
    return 1, zlib.compress(data, 1)


def unused_stores(folder: Path, tenants: Iterable[str]) -> Iterator[Path]:
    """Files of stores of tenants that have no snapshots any more."""
    used = {hashlib.sha256(tenant.encode()).hexdigest()[:32] for tenant in tenants}
    for path in folder.glob("*.db*") if folder.is_dir() else ():
        if path.name.partition(".")[0] not in used:
            yield path


def stored_bytes(folder: Path) -> int:
    """Of all tenants, on disk."""
    total = 0
    for path in folder.glob("*.db*") if folder.is_dir() else ():
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total
