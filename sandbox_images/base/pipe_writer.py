"""Lines out on a pipe, never waited for in the middle of something."""

from __future__ import annotations

import asyncio
import os


class PipeWriter:
    """Needs a running loop. What the pipe does not take yet is kept; `drain` waits until all of it is out.

    asyncio's own transport does not serve: it takes a pipe for closed as soon as it can be read, and a named pipe that is open
    for both, as bubblewrap's sandboxes have it, can be read whenever it holds an answer.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor, self._loop = descriptor, asyncio.get_running_loop()
        self._waiting, self._empty, self._broken = bytearray(), asyncio.Event(), False
        self._empty.set()

    def write(self, line: bytes) -> None:
        """After the pipe broke nothing is written any more."""
        if self._waiting:
            self._waiting += line
            return
        rest = line[self._put(line) :]
        if rest and not self._broken:
            self._waiting += rest
            self._empty.clear()
            self._loop.add_writer(self._descriptor, self._on_writable)

    async def drain(self) -> None:
        """Raises ConnectionError: nobody can read any more."""
        await self._empty.wait()
        if self._broken:
            raise ConnectionError("the pipe is closed")

    def _put(self, data: bytes | bytearray) -> int:
        try:
            return os.write(self._descriptor, data)
        except BlockingIOError:
            return 0
        except OSError:
            self._broken = True
            return 0

    def _on_writable(self) -> None:
        del self._waiting[: self._put(self._waiting)]
        if self._broken:
            self._waiting.clear()
        if not self._waiting:
            self._loop.remove_writer(self._descriptor)
            self._empty.set()
