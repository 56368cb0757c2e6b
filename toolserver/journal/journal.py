"""The journal as it is written: appended to, one line a record, by this process and by the command line in turn.

A record is in the kernel's hands when `append` returns, so it outlives a killed server; with `fsync` it outlives the machine.
A record that must not be lost although it can't be written now (an outcome while the disk is full) waits in memory, in
order; until it is written nothing new is begun.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from toolserver.errors import JournalUnavailable
from toolserver.journal import record
from toolserver.journal.record import Head, Record
from toolserver.journal.segments import FolderLock, lines, path_of, segments, tail_lines
from toolserver.settings import JournalSettings

_DAY_S = 86_400.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenCall:
    """A call that the journal saw begin and not end."""

    tenant: str
    call_id: str


class Journal:
    """Used by one thread. `open` before anything else; `close` at the end."""

    def __init__(self, folder: Path, settings: JournalSettings, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives seconds since 1970."""
        self.folder, self.settings, self._clock = folder, settings, clock
        self.head = Head()
        self.open_calls: dict[OpenCall, str | None] = {}  # with the key that each was made with
        self._whole = False
        self._lock: FolderLock | None = None
        self._file = -1
        self._path: Path | None = None
        self._size = 0
        self._waiting: deque[tuple[float, str, dict[str, Any]]] = deque()

    def open(self, *, whole: bool = True) -> None:
        """Find the end, and close a line that a crash cut. Raises JournalUnavailable.

        `whole`: as the server's own, which knows the open calls and begins new segments; else only to append.
        """
        self._whole = whole
        try:
            self._lock = FolderLock(self.folder)
            with self._lock.held():
                self._take_last()
                if whole:
                    self._find_open_calls()
        except OSError as problem:
            raise JournalUnavailable(_reason(problem)) from problem

    def close(self) -> None:
        """What still waits is tried once more, and given up with a line in the log."""
        self.settle()
        for _, event, fields in self._waiting:
            _log.error("journal_record_lost", extra={"fields": {"lost_event": event, **fields}})
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def append(self, event: str, **fields: Any) -> None:
        """Write it down now. Raises JournalUnavailable: it was not written."""
        self._flush()
        self._put(self._clock(), event, fields)

    def append_surely(self, event: str, **fields: Any) -> None:
        """Write it down now, or as soon as that can be done."""
        entry = (self._clock(), event, fields)
        try:
            self._flush()
            self._put(*entry)
        except JournalUnavailable as problem:
            if not self._waiting:
                _log.error("journal_not_written", extra={"fields": {"problem": str(problem)}})
            self._waiting.append(entry)

    def settle(self) -> bool:
        """Try to write what waits; whether nothing waits any more."""
        with contextlib.suppress(JournalUnavailable):
            self._flush()
        return not self._waiting

    def _flush(self) -> None:
        while self._waiting:
            self._put(*self._waiting[0])
            self._waiting.popleft()

    def _put(self, at: float, event: str, fields: dict[str, Any]) -> None:
        if self._lock is None:
            raise JournalUnavailable("the journal is closed")
        try:
            with self._lock.held():
                if os.fstat(self._file).st_size != self._size:
                    self._take_last()  # another process has written, or a write of ours was cut
                self._write(at, event, fields)
        except OSError as problem:
            raise JournalUnavailable(_reason(problem)) from problem
        self._note(event, fields)
        if self._whole and self._size >= self.settings.segment_mb << 20:
            self._rotate()

    def _write(self, at: float, event: str, fields: dict[str, Any], *, lead: bytes = b"") -> None:
        line, head = record.write(self.head, at, event, fields)
        line = lead + line
        try:
            if os.write(self._file, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self.settings.fsync:
                os.fdatasync(self._file)
        except OSError:
            with contextlib.suppress(OSError):  # else the next look at the end closes the cut line
                os.ftruncate(self._file, self._size)
            raise
        self.head = head
        self._size += len(line)

    def _note(self, event: str, fields: dict[str, Any]) -> None:
        if event == "call_begun":
            self.open_calls[OpenCall(fields["tenant"], fields["call_id"])] = fields.get("key_id")
        elif event == "call_ended":
            self.open_calls.pop(OpenCall(fields["tenant"], fields["call_id"]), None)

    def _take_last(self) -> None:
        """Open the last segment and find its end. The lock is held. Raises OSError."""
        found = segments(self.folder)
        path = found[-1].path if found else path_of(self.folder, 1)
        if path != self._path:
            if self._file >= 0:
                os.close(self._file)
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._path = path
        self._size = os.fstat(self._file).st_size
        self.head, cut = _end(path, self._size)
        if self.head.seq == 0 and len(found) > 1:  # a segment that was begun and got no record yet
            before = found[-2].path
            self.head, _ = _end(before, before.stat().st_size)
        if cut and (whole := record.read(cut)) is not None:  # only its line break is missing
            if os.write(self._file, b"\n") != 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._size += 1
            self.head = whole.head
        elif cut:
            self._close_cut_line(cut)

    def _close_cut_line(self, cut: bytes) -> None:
        """The bytes stay as they are; the record after them says what they are."""
        digest = hashlib.sha256(cut).hexdigest()
        self._write(self._clock(), "cut_line_closed", {"bytes": len(cut), "sha256": digest}, lead=b"\n")
        _log.warning("journal_line_was_cut", extra={"fields": {"bytes": len(cut)}})

    def _find_open_calls(self) -> None:
        """Out of the last segments, back to one that begins with the calls that were open then."""
        parts: list[list[bytes]] = []
        for segment in reversed(segments(self.folder)):
            part = [
                line for line in lines(segment.path) if b'"event":"call_' in line or b'"event":"segment_begun"' in line
            ]
            parts.append(part)
            if part and b'"event":"segment_begun"' in part[0]:
                break
        for part in reversed(parts):
            for line in part:
                self._recall(record.read(line))

    def _recall(self, found: Record | None) -> None:
        if found is None:
            return
        if found.event == "segment_begun":
            self.open_calls = {
                OpenCall(tenant, call_id): key_id for tenant, call_id, key_id in found.fields["open_calls"]
            }
        else:
            self._note(found.event, found.fields)

    def _rotate(self) -> None:
        """Go on in a new segment. Where that can't be done now, a later record tries again."""
        if self._lock is None:
            return
        try:
            with self._lock.held():
                new = os.open(
                    path_of(self.folder, self.head.seq + 1),
                    os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC,
                    0o600,
                )
                os.close(new)
                self._take_last()
                calls = [[call.tenant, call.call_id, key_id] for call, key_id in self.open_calls.items()]
                self._write(self._clock(), "segment_begun", {"open_calls": calls})
        except (OSError, JournalUnavailable) as problem:
            _log.warning("journal_not_rotated", extra={"fields": {"problem": str(problem)}})

    def prune(self) -> int:
        """Delete the segments whose last record is older than `keep_days`; how many. Raises JournalUnavailable.

        A record says first up to where they go, and with which hash they ended: the chain can be checked from there on.
        """
        try:
            found = segments(self.folder)
            oldest = record.time_text(self._clock() - self.settings.keep_days * _DAY_S)
            going = []
            through = Head()
            for segment, following in pairwise(found):
                first = record.read(next(lines(following.path), b""))
                if first is None or str(first.fields["at"]) >= oldest:
                    break  # the record after its last one is young, so its last one may be
                going.append(segment)
                through = Head(first.seq - 1, first.prev)
            if going:
                self.append("segments_pruned", through_seq=through.seq, through_hash=through.hash, segments=len(going))
            for segment in going:
                segment.path.unlink(missing_ok=True)
        except OSError as problem:
            raise JournalUnavailable(_reason(problem)) from problem
        return len(going)


def _end(path: Path, size: int) -> tuple[Head, bytes]:
    """The last record of the file's first `size` bytes, and what stands behind it as the beginning of a line.

    A whole line that is no record was not cut by a crash: it is passed over, and left for `verify` to find.
    """
    cut = b""
    count = 4
    while size > 0:
        found = tail_lines(path, size, count)
        if not found[-1].endswith(b"\n"):
            cut = found[-1]
        for line in reversed(found):
            if (last := record.read(line)) is not None and line.endswith(b"\n"):
                return last.head, cut
        if len(found) < count:
            break
        count *= 8
    return Head(), cut


def _reason(problem: OSError) -> str:
    return f"the journal can't be written: {problem.strerror or problem}"
