"""One record of the journal: a line of JSON, chained to the one before by a hash.

    {"seq": 7, "at": "2026-01-31T12:00:00.123Z", "event": "call_ended", …, "prev": "<hash of record 6>", "hash": "<its own>"}

`hash` is the SHA-256 of the line's text without its `hash`, so a line is checked as it stands: no second way to write the same
JSON can get in between. `prev` is within that text: who changes, removes or moves a line changes every hash after it.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from typing import Any

GENESIS = "0" * 64  # the `prev` of the very first record
_TAIL = len(',"hash":""}') + 64
_encode = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode


@dataclass(frozen=True)
class Head:
    """The last record: its number (0: there is none yet) and its hash."""

    seq: int = 0
    hash: str = GENESIS

    def __str__(self) -> str:
        return f"{self.seq}:{self.hash}"

    @classmethod
    def parse(cls, text: str) -> Head:
        """Of `SEQ:HASH`. Raises ValueError."""
        number, _, digest = text.strip().partition(":")
        if not (number.isascii() and number.isdigit() and len(digest) == 64 and set(digest) <= set("0123456789abcdef")):
            raise ValueError("a head is written SEQ:HASH, as `toolserver journal head` prints it")
        return cls(int(number), digest)


@dataclass(frozen=True)
class Record:
    """A line that hashes to what it says. `fields` has all of it but `seq`, `prev` and `hash`."""

    seq: int
    prev: str
    hash: str
    fields: dict[str, Any]

    @property
    def head(self) -> Head:
        return Head(self.seq, self.hash)

    @property
    def event(self) -> str:
        return str(self.fields.get("event", ""))

    def as_json(self) -> dict[str, Any]:
        return {"seq": self.seq, **self.fields, "prev": self.prev, "hash": self.hash}


def time_text(seconds: float) -> str:
    """ISO 8601 in UTC, to the millisecond; such texts sort as their times."""
    whole, thousandths = divmod(int(seconds * 1000), 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{thousandths:03d}Z"


def write(after: Head, at: float, event: str, fields: dict[str, Any]) -> tuple[bytes, Head]:
    """The line of the record that follows `after`, and the head that it makes. Raises ValueError for what is no JSON."""
    seq = after.seq + 1
    text = _encode({"seq": seq, "at": time_text(at), "event": event, **fields, "prev": after.hash})
    digest = hashlib.sha256(text.encode("ascii")).hexdigest()
    return f'{text[:-1]},"hash":"{digest}"}}\n'.encode("ascii"), Head(seq, digest)


def read(line: bytes) -> Record | None:
    """The record of a whole line (with or without its line break); None when it is none, or its hash does not fit its text."""
    line = line.rstrip(b"\n")
    text = line[:-_TAIL] + b"}"
    digest = line[-66:-2]
    if (
        not line.endswith(b'"}')
        or line[-_TAIL:-66] != b',"hash":"'
        or hashlib.sha256(text).hexdigest().encode() != digest
    ):
        return None
    try:
        fields = json.loads(text)
        seq, prev = fields.pop("seq"), fields.pop("prev")
    except (ValueError, KeyError, AttributeError, RecursionError):
        return None
    if not isinstance(seq, int) or not isinstance(prev, str):
        return None
    return Record(seq, prev, digest.decode(), fields)
