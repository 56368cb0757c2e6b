"""The journal as it is read: from its beginning or its end, by time, tenant and session, one record at a time."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from toolserver.journal import record
from toolserver.journal.record import Record
from toolserver.journal.segments import lines, tail_lines
from toolserver.journal.verify import current_ends

COLUMNS = (
    "seq", "at", "event", "tenant", "key_id", "session_id", "call_id", "tool", "image", "arguments_digest", "status", "code",
    "cause", "wall_ms", "cpu_ms", "trace_id", "hash",
)  # fmt: skip


@dataclass(frozen=True)
class Wanted:
    """Which records: `since` and `until` (the latter not with it) as ISO 8601 in UTC, or beginnings of it; None: any."""

    since: str | None = None
    until: str | None = None
    tenant: str | None = None
    session_id: str | None = None

    def fits(self, found: Record) -> bool:
        at, fields = str(found.fields.get("at", "")), found.fields
        return (
            (self.since is None or at >= self.since)
            and (self.until is None or at < self.until)
            and (self.tenant is None or fields.get("tenant") == self.tenant)
            and (self.session_id is None or fields.get("session_id") == self.session_id)
        )


def records(folder: Path, wanted: Wanted) -> Iterator[Record]:
    """Oldest first, up to where the journal ends now. Lines that are no records are left out: `verify` tells of them. Raises OSError."""
    for segment, size in current_ends(folder):
        for line in lines(segment.path, size):
            found = record.read(line)
            if found is not None and wanted.fits(found):
                yield found


def last_records(folder: Path, count: int) -> list[Record]:
    """The last ones, oldest first. Raises OSError."""
    found: list[Record] = []
    for segment, size in reversed(current_ends(folder)):
        if len(found) >= count:
            break
        found = _last_of(segment.path, size, count - len(found)) + found
    return found


def _last_of(path: Path, size: int, count: int) -> list[Record]:
    """The last `count` records of a segment, however many of its last lines are none."""
    looked_at = count
    while True:
        tail = tail_lines(path, size, looked_at)
        found = [one for line in tail if (one := record.read(line)) is not None]
        if len(found) >= count or len(tail) < looked_at:
            return found[-count:]
        looked_at *= 2


def as_json_lines(found: Iterable[Record]) -> Iterator[str]:
    for one in found:
        yield json.dumps(one.as_json(), ensure_ascii=True, separators=(",", ":"))


def as_csv(found: Iterable[Record]) -> Iterator[str]:
    """A header, then the columns that most records have; the rest of a record as JSON in the column `more`."""
    yield _row([*COLUMNS, "more"])
    for one in found:
        fields = one.as_json()
        known = [fields.pop(name, None) for name in COLUMNS]
        fields.pop("prev")
        more = json.dumps(fields, ensure_ascii=True, separators=(",", ":")) if fields else ""
        yield _row(["" if value is None else str(value) for value in known] + [more])


def _row(cells: list[str]) -> str:
    out = io.StringIO()
    # a cell that a spreadsheet would take for a formula is none
    csv.writer(out, lineterminator="").writerow(
        ["'" + cell if cell[:1] in {"=", "+", "-", "@", "\t", "\r"} else cell for cell in cells]
    )
    return out.getvalue()
