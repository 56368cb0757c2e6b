"""The journal's files: segments in one folder, each named by the number of its first record."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from toolserver.errors import JournalUnavailable

_NAME = re.compile(r"(\d{20})\.jsonl")
_LOCK_WAIT_S = 2.0
_LOCK_PAUSE_S = 0.002


@dataclass(frozen=True)
class Segment:
    path: Path
    first: int  # the number of its first record


def folder_of(state_dir: Path) -> Path:
    return state_dir / "journal"


def segments(folder: Path) -> list[Segment]:
    """Oldest first. Files of other names are not the journal's."""
    found = [(match, entry) for entry in folder.iterdir() if (match := _NAME.fullmatch(entry.name))]
    return sorted((Segment(entry, int(match[1])) for match, entry in found), key=lambda segment: segment.first)


def path_of(folder: Path, first: int) -> Path:
    return folder / f"{first:020d}.jsonl"


class FolderLock:
    """Server and command line append in turn: each holds this while it writes one record, or looks where the end is."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder if need be. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Raises JournalUnavailable when another process holds it for long: it has stopped in the middle of a line."""
        until = 0.0
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as problem:
                now = time.monotonic()
                until = until or now + _LOCK_WAIT_S
                if now >= until:
                    raise JournalUnavailable("another process keeps the journal locked") from problem
                time.sleep(_LOCK_PAUSE_S)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._file)


def lines(path: Path, end: int | None = None) -> Iterator[bytes]:
    """The lines with their line breaks, up to the byte `end`; the last one may lack its line break. Raises OSError."""
    left = end
    with path.open("rb") as file:
        for line in file:
            if left is not None:
                if left <= 0:
                    return
                yield line[:left]
                left -= len(line)
            else:
                yield line


def tail_lines(path: Path, size: int, count: int) -> list[bytes]:
    """The last `count` lines of the first `size` bytes; fewer when there are fewer. Raises OSError."""
    step = 64 << 10
    with path.open("rb") as file:
        start = size
        data = b""
        while start > 0 and data.count(b"\n") <= count:
            begin = max(0, start - step)
            file.seek(begin)
            data = file.read(start - begin) + data
            start, step = begin, step * 2
    found = data.splitlines(keepends=True)
    if start > 0:
        found = found[1:]
    return found[-count:]
