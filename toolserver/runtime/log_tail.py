"""A bounded memory of a log."""

from __future__ import annotations

from collections import deque

LOG_BYTES = 16_384


class LogTail:
    """The last `limit` bytes of what it is fed."""

    def __init__(self, limit: int = LOG_BYTES) -> None:
        self._limit, self._size = limit, 0
        self._pieces: deque[bytes] = deque()

    def feed(self, data: bytes) -> None:
        self._pieces.append(data[-self._limit :])
        self._size += len(self._pieces[-1])
        while self._size - len(self._pieces[0]) >= self._limit:
            self._size -= len(self._pieces.popleft())

    def text(self) -> str:
        return b"".join(self._pieces)[-self._limit :].decode("utf-8", "replace")
