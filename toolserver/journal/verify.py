"""Whether the journal is as it was written: each line by its hash, each by the one before it, its end by what is known of it.

What the chain alone can't show is a journal cut at its end, or written anew as a whole. For that a head that was noted earlier
must still be in it: the database keeps one, and an operator can keep others elsewhere (`toolserver journal head`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolserver.journal import record
from toolserver.journal.record import GENESIS, Head, Record
from toolserver.journal.segments import FolderLock, Segment, lines, segments

_MAX_PROBLEMS = 50
_ATTEMPTS = 3


@dataclass(frozen=True)
class Problem:
    """`kind`: changed, missing (removed, or in another order), cut, unanchored. `line` counts from 1; 0: no line of that file."""

    kind: str
    segment: str
    line: int
    message: str

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "segment": self.segment, "line": self.line, "message": self.message}


@dataclass
class Verdict:
    """`problems` is empty for a journal that is whole. `notes`: what is no fault, such as a line that a crash cut."""

    first: int = 0
    records: int = 0
    head: Head = field(default_factory=Head)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "whole": not self.problems,
            "first_seq": self.first,
            "records": self.records,
            "head": str(self.head),
            "problems": [problem.as_json() for problem in self.problems],
            "notes": self.notes,
        }


def verify(folder: Path, anchors: Iterable[Head] = ()) -> Verdict:
    """Of the journal up to where it ends now; a server may go on writing. `anchors`: heads that must be in it. Raises OSError."""
    wanted = list(anchors)
    for attempt in range(_ATTEMPTS):
        try:
            return _Check(wanted).run(folder)
        except FileNotFoundError:  # pruned meanwhile
            if not folder.is_dir() or attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError


def current_ends(folder: Path) -> list[tuple[Segment, int]]:
    """The segments with their sizes, at a moment when nobody is in the middle of a line. Raises OSError, JournalUnavailable."""
    lock = FolderLock(folder)
    try:
        with lock.held():
            return [(segment, segment.path.stat().st_size) for segment in segments(folder)]
    finally:
        lock.close()


class _Check:
    def __init__(self, anchors: Sequence[Head]) -> None:
        self._verdict = Verdict()
        self._anchors = {anchor.seq: anchor for anchor in anchors if anchor.seq}
        self._seen: dict[int, str] = {}
        self._last: Record | None = None
        self._start = Head()  # what the first record stands on
        self._pruned: list[Head] = []
        self._changed = 0  # lines since the last record that are told as changed
        self._bad: tuple[Segment, int, bytes] | None = None  # a line that is no record, until the next one explains it

    def run(self, folder: Path) -> Verdict:
        for segment, size in current_ends(folder):
            for number, line in enumerate(lines(segment.path, size), 1):
                self._line(segment, number, line)
                if len(self._verdict.problems) >= _MAX_PROBLEMS:
                    self._verdict.notes.append(f"only the first {_MAX_PROBLEMS} problems are told")
                    return self._verdict
        self._end()
        return self._verdict

    def _line(self, segment: Segment, number: int, line: bytes) -> None:
        found = record.read(line)
        if found is None:
            self._judge_bad(None)
            self._bad = (segment, number, line.rstrip(b"\n"))
            return
        self._judge_bad(found)
        self._link(segment, number, found)
        self._last, self._changed = found, 0
        self._verdict.records += 1
        if found.seq in self._anchors:
            self._seen[found.seq] = found.hash
        if found.event == "segments_pruned":
            self._pruned.append(Head(found.fields["through_seq"], found.fields["through_hash"]))

    def _link(self, segment: Segment, number: int, found: Record) -> None:
        last = self._last
        if last is None:
            self._verdict.first, self._start = found.seq, Head(found.seq - 1, found.prev)
        elif found.seq <= last.seq:
            self._tell("missing", segment, number, f"record {found.seq} follows record {last.seq}: out of order")
        elif found.seq != last.seq + 1:
            if (lost := found.seq - last.seq - 1 - self._changed) > 0:
                told = f"record {found.seq} follows record {last.seq}: {lost} between them "
                self._tell("missing", segment, number, told + ("is missing" if lost == 1 else "are missing"))
        elif found.prev != last.hash:
            self._tell(
                "changed",
                segment,
                number,
                f"record {last.seq} is not the one that record {found.seq} was written after",
            )

    def _judge_bad(self, following: Record | None) -> None:
        if self._bad is None:
            return
        segment, number, line = self._bad
        self._bad = None
        if following is not None and following.event == "cut_line_closed":
            told = following.fields
            if told["bytes"] == len(line) and told["sha256"] == hashlib.sha256(line).hexdigest():
                self._verdict.notes.append(
                    f"{segment.path.name} line {number}: cut at a crash ({len(line)} bytes), as record {following.seq} says"
                )
                return
        self._changed += 1
        self._tell("changed", segment, number, "the line is not what was written: its hash does not fit its text")

    def _end(self) -> None:
        if self._bad is not None:
            segment, number, line = self._bad
            self._bad = None
            message = f"the last line is cut or changed ({len(line)} bytes); a start of the server closes a line that a crash cut"
            self._tell("cut", segment, number, message)
        if self._last is not None:
            self._verdict.head = self._last.head
        self._check_start()
        for seq, anchor in sorted(self._anchors.items()):
            self._check_anchor(seq, anchor)

    def _check_start(self) -> None:
        start = self._start
        genuine = start.hash == GENESIS if start.seq == 0 else start in self._pruned
        if self._last is not None and not genuine:
            message = f"it begins with record {start.seq + 1}, and no record says that those before it were pruned"
            self._tell("missing", None, 0, message)
        elif start.seq:
            self._verdict.notes.append(f"records 1 to {start.seq} were pruned")

    def _check_anchor(self, seq: int, anchor: Head) -> None:
        if seq > self._verdict.head.seq:
            lost = seq - self._verdict.head.seq
            self._tell(
                "cut",
                None,
                0,
                f"it ends with record {self._verdict.head.seq}, but record {seq} was there: {lost} are cut off",
            )
        elif seq < self._start.seq:
            self._verdict.notes.append(f"the head {seq} is of a pruned part and can't be looked for any more")
        elif (self._start.hash if seq == self._start.seq else self._seen.get(seq)) != anchor.hash:
            self._tell("unanchored", None, 0, f"record {seq} is not the one whose hash was noted: it was written anew")

    def _tell(self, kind: str, segment: Segment | None, line: int, message: str) -> None:
        self._verdict.problems.append(Problem(kind, segment.path.name if segment is not None else "", line, message))
