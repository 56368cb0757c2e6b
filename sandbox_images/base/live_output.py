"""The last of what a call writes, in the order in which it came, to be read from any offset while it runs and after.

An offset counts the bytes of stdout and stderr together. The first bytes of a character wait until the rest has come, so
that nothing read from here ends within one.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right

from sandbox_images.base.annotations import Any
from sandbox_images.base.byte_text import CONTINUATION, readable, whole_text

KEPT_BYTES = 1 << 20
KEPT_RUNS = KEPT_BYTES // 8  # a run: bytes of one stream that no byte of the other parts
SLACK_BYTES, SLACK_RUNS = KEPT_BYTES // 16, KEPT_RUNS // 16  # so that not every byte that comes moves all the others
STREAMS = ("stdout", "stderr")


class LiveOutput:
    """Memory is bounded: the last MiB, and no more than its last 131,072 changes from one stream to the other."""

    __slots__ = ("_data", "_held", "_runs", "_start")

    def __init__(self) -> None:
        self._data, self._start = bytearray(), 0
        self._runs = array("Q")  # where each run begins: offset * 2 + stream
        self._held = [b"", b""]

    @property
    def end(self) -> int:
        return self._start + len(self._data)

    @property
    def kept_bytes(self) -> int:
        return len(self._data)

    def feed(self, stream: int, data: bytes) -> bool:
        """Take bytes of STREAMS[stream]; whether there is more to read than before."""
        if self._held[stream]:
            data = self._held[stream] + data
        whole = whole_text(data, at_end=True)
        self._held[stream] = data[len(whole) :]
        self._append(stream, whole)
        return bool(whole)

    def flush(self) -> None:
        """No more will come: what was held back is no part of a character."""
        for stream, held in enumerate(self._held):
            self._append(stream, held)
        self._held = [b"", b""]

    def forget(self) -> None:
        """Keep nothing but how much there was."""
        self._start = self.end
        self._data, self._runs = bytearray(), array("Q")

    def _append(self, stream: int, data: bytes) -> None:
        if not data:
            return
        if not self._runs or self._runs[-1] & 1 != stream:
            self._runs.append(self.end << 1 | stream)
        self._data += data
        if len(self._data) > KEPT_BYTES + SLACK_BYTES or len(self._runs) > KEPT_RUNS + SLACK_RUNS:
            self._trim()

    def _trim(self) -> None:
        cut = max(0, len(self._data) - KEPT_BYTES)
        if len(self._runs) > KEPT_RUNS:
            cut = max(cut, (self._runs[-KEPT_RUNS] >> 1) - self._start)
        cut = self._edge(cut, 1)
        del self._data[:cut]
        self._start += cut
        first = bisect_right(self._runs, self._start << 1 | 1) - 1
        stream = self._runs[first] & 1
        del self._runs[:first]
        self._runs[0] = self._start << 1 | stream

    def _edge(self, at: int, step: int) -> int:
        """The nearest place from `at` where no character is cut: a character has three continuation bytes at most."""
        for moved in range(4):
            place = at + moved * step
            if not 0 < place < len(self._data) or self._data[place] not in CONTINUATION:
                return place
        return at

    def read(self, offset: int, max_bytes: int) -> tuple[list[dict[str, Any]], int, int]:
        """(chunks of stream, text and offset after them, the offset to go on from, bytes lost before them). At least one character when there is one."""
        begin = max(offset, self._start)
        if begin >= self.end:
            return [], begin, begin - offset
        stop = min(self.end, begin + max_bytes)
        if stop < self.end:
            stop = self._start + self._edge(stop - self._start, -1)
            if stop <= begin:
                stop = self._start + self._edge(begin + 1 - self._start, 1)
        chunks = []
        run, at = bisect_right(self._runs, begin << 1 | 1) - 1, begin
        while at < stop:
            until = min(stop, self._runs[run + 1] >> 1) if run + 1 < len(self._runs) else stop
            text = readable(bytes(self._data[at - self._start : until - self._start]))[0]
            chunks.append({"stream": STREAMS[self._runs[run] & 1], "text": text, "end": until})
            run, at = run + 1, until
        return chunks, stop, begin - offset
