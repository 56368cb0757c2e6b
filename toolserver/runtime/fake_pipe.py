"""A byte stream in memory with a bound, as a kernel pipe has."""

from __future__ import annotations

import asyncio


class FakePipe:
    """`write` waits while `limit` bytes are unread; `read` gives b"" once closed and empty."""

    def __init__(self, limit: int = 1 << 16) -> None:
        self._buffer = bytearray()
        self._limit = limit
        self._closed = False
        self._changed = asyncio.Condition()

    @property
    def closed(self) -> bool:
        return self._closed

    async def write(self, data: bytes) -> bool:
        """False when the pipe is, or gets, closed before all of `data` was taken."""
        view = memoryview(data)
        async with self._changed:
            while view:
                await self._changed.wait_for(lambda: self._closed or len(self._buffer) < self._limit)
                if self._closed:
                    return False
                room = self._limit - len(self._buffer)
                self._buffer += view[:room]
                view = view[room:]
                self._changed.notify_all()
        return not self._closed

    async def read(self, most: int = 1 << 18) -> bytes:
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or bool(self._buffer))
            data = bytes(self._buffer[:most])
            del self._buffer[:most]
            self._changed.notify_all()
            return data

    async def close(self) -> None:
        async with self._changed:
            self._closed = True
            self._changed.notify_all()
