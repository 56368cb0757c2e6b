"""Bytes of a sandbox's stdout to lines, with bounds. Standard library only; knows nothing of MCP."""

from __future__ import annotations

from dataclasses import dataclass

MAX_LINE_BYTES = 8 << 20
HEAD_BYTES = TAIL_BYTES = 512


@dataclass(frozen=True)
class Oversized:
    """A line longer than the bound, of which only head and tail were kept."""

    head: bytes
    tail: bytes


class LineBuffer:
    """Whole lines only: what has no newline yet is never given out. An oversized line is dropped as it comes, not stored."""

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max = max_line_bytes
        self._parts: list[bytes] = []
        self._length = 0
        self._dropping: bytes | None = None  # the head of the line that is being dropped
        self._tail = b""
        self.dropped = 0  # bytes of an oversized line that has not ended yet

    def feed(self, data: bytes) -> list[bytes | Oversized]:
        """The lines that `data` completes, in order, without their newline."""
        if not self._parts and self._dropping is None and data.endswith(b"\n") and data.find(b"\n") == len(data) - 1:
            return [data[:-1] if len(data) - 1 <= self._max else _oversized(data[:-1])]  # the usual case
        *ended, rest = data.split(b"\n")
        lines: list[bytes | Oversized] = []
        for piece in ended:
            self._add(piece)
            lines.append(self._take())
        self._add(rest)
        return lines

    def _add(self, piece: bytes) -> None:
        if not piece:
            return
        if self._dropping is not None:
            self._tail = (self._tail + piece[-TAIL_BYTES:])[-TAIL_BYTES:]
            self.dropped += len(piece)
            return
        self._parts.append(piece)
        self._length += len(piece)
        if self._length > self._max:
            cut = _oversized(b"".join(self._parts))
            self._dropping, self._tail = cut.head, cut.tail
            self.dropped = self._length
            self._parts, self._length = [], 0

    def _take(self) -> bytes | Oversized:
        line = b"".join(self._parts) if self._dropping is None else Oversized(self._dropping, self._tail)
        self._parts, self._length, self._dropping, self._tail, self.dropped = [], 0, None, b"", 0
        return line


def _oversized(line: bytes) -> Oversized:
    return Oversized(line[:HEAD_BYTES], line[-TAIL_BYTES:])
