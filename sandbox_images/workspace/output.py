"""What a call writes: both streams drained without limit, kept within one.

Each stream keeps its head and its tail. Once more than the limit has come, the whole is also written to an artifact in
the workspace, in the order in which it arrived, until a bound is reached or the disk is full.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from sandbox_images.base.annotations import Any
from sandbox_images.base.byte_text import readable, whole_text
from sandbox_images.base.call_memory import CallRecord

CHUNK = 1 << 16
MARKER_BYTES = 200  # room that a marker may take


class Stream:
    """Head and tail of one stream, each up to the limit."""

    def __init__(self, limit: int) -> None:
        self.limit, self.total = limit, 0
        self.head, self.tail = bytearray(), bytearray()

    def feed(self, data: bytes) -> None:
        self.total += len(data)
        room = self.limit - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        if data:
            self.tail += data
            if len(self.tail) > 2 * self.limit:
                del self.tail[: -self.limit]

    def holds(self, text: bytes) -> bool:
        """Whether it says this, as far as it is kept."""
        return text in self.head or text in self.tail

    def cut(self, room: int) -> tuple[bytes, int, bytes]:
        """(head, bytes left out, tail) within `room` bytes; nothing is left out when all fits."""
        if self.total <= room:
            return bytes(self.head + self.tail), 0, b""
        room = max(0, room - MARKER_BYTES)
        first = room // 2
        head = whole_text(bytes(self.head[:first]), at_end=True)
        last = room - first
        tail = bytes((self.head + self.tail)[-last:] if last else b"")
        tail = whole_text(tail, at_end=False)
        return head, self.total - len(head) - len(tail), tail


class Spool:
    """The artifact that takes the whole output. It never raises: a full disk makes it incomplete."""

    def __init__(self, create: Callable[[], tuple[int, str]], limit: Callable[[], int]) -> None:
        """`create` opens the file and tells its path; `limit` says how many bytes it may hold."""
        self._create, self._limit = create, limit
        self._fd: int | None = None
        self.path: str | None = None
        self.bytes, self.incomplete = 0, False
        self._room = 0

    def write(self, data: bytes) -> None:
        if self.incomplete:
            return
        try:
            if self._fd is None:
                self._room = self._limit()
                self._fd, self.path = self._create()
            view = memoryview(data)[: max(0, self._room - self.bytes)]
            self.incomplete = len(view) < len(data)
            while view:
                written = os.write(self._fd, view)
                self.bytes += written
                view = view[written:]
        except OSError:
            self.incomplete = True

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class Output:
    """The streams of a call. `limit`: bytes of text that the answer may hold, all streams together.

    `result` is the text of a value or a file: it is counted, cut and kept like what is written.
    """

    NAMES = ("stdout", "stderr", "result")

    def __init__(self, limit: int, spool: Spool, record: CallRecord | None = None) -> None:
        """`record`: of the call that writes this. Without one it is the log of a background job: all of it goes to the spool
        from the first byte, and the spool stays open when this output is closed.
        """
        self.limit, self.spool, self._record = limit, spool, record
        self.stdout, self.stderr, self.result = Stream(limit), Stream(limit), Stream(limit)
        self._made: tuple[tuple[int, int, bool], tuple[dict[str, str], bool, int]] | None = (
            None  # they are asked for more than once
        )
        self._early: list[bytes] | None = (
            None if record is None else []
        )  # all of it in order, until the limit is passed

    @property
    def total(self) -> int:
        return self.stdout.total + self.stderr.total + self.result.total

    def feed(self, stream: Stream, data: bytes) -> None:
        stream.feed(data)
        if self._record is not None and stream is not self.result:
            self._record.feed(stream is self.stderr, data)
        if self._early is None:
            self.spool.write(data)
            return
        self._early.append(data)
        if self.total > self.limit:
            self.spool.write(b"".join(self._early))
            self._early = None
        elif len(self._early) > 1024:
            self._early = [b"".join(self._early)]

    def close(self) -> None:
        if self._record is not None:
            self.spool.close()

    def _shares(self) -> dict[str, int]:
        """How many bytes each stream gets: all of a short one, an equal part of the rest of a long one."""
        room, shares = self.limit, {}
        needs = sorted((getattr(self, name).total, name) for name in self.NAMES)
        for left, (need, name) in zip(range(len(needs), 0, -1), needs, strict=True):
            shares[name] = need if self.total <= self.limit else min(need, room // left)
            room -= shares[name]
        return shares

    def texts(self) -> tuple[dict[str, str], bool, int]:
        """The text of each stream by name, whether they say the bytes exactly, and how many bytes of them they hold."""
        state = (self.total, self.limit, self.spool.incomplete)
        if self._made is None or self._made[0] != state:
            self._made = (state, self._texts())
        return self._made[1]

    def _texts(self) -> tuple[dict[str, str], bool, int]:
        shown: dict[str, str] = {}
        kept, exact, shares = 0, True, self._shares()
        for name in self.NAMES:
            stream: Stream = getattr(self, name)
            if not stream.total:
                shown[name] = ""
                continue
            head, left_out, tail = stream.cut(shares[name])
            kept += len(head) + len(tail)
            text, good = readable(head)
            if left_out:
                after, good_tail = readable(tail)
                where = f"; the whole is in {self.spool.path}" if self.spool.path and not self.spool.incomplete else ""
                text = f"{text}\n[... {left_out} of {stream.total} bytes left out{where} ...]\n{after}"
                good = good and good_tail
            shown[name], exact = text, exact and good
        return shown, exact, kept

    def truncated(self, kept: int) -> dict[str, Any] | None:
        """The outcome's `truncated` field."""
        if self.total <= self.limit:
            return None
        return {"bytes_total": self.total, "bytes_kept": kept, "artifact": self.spool.path}


def read_ready(fd: int) -> bytes | None:
    """Up to 64 KiB of a non-blocking pipe: None when it holds nothing now, b"" at its end."""
    try:
        return os.read(fd, CHUNK)
    except BlockingIOError:
        return None
    except OSError as problem:
        if problem.errno == errno.EIO:
            return b""
        raise
