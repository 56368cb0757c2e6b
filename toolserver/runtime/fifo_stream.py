"""Named pipes between a server and a sandbox: they stay when the server dies, so that the next one opens them again.

The sandbox's side has each of them open for reading and writing: without a server its reads wait, and its writes wait once the
pipe is full; neither sees an end. The server's side sees the end when nothing of the sandbox is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from toolserver.errors import SandboxGone

CHUNK = 1 << 18
NAMES = ("in", "out", "err")
_PIPE_BYTES = 1 << 18


def make_fifos(folder: Path) -> tuple[int, int, int]:
    """New ones; the descriptors of the sandbox's side, to be closed when it has them. Raises OSError."""
    opened: list[int] = []
    try:
        for name in NAMES:
            os.mkfifo(folder / name, 0o600)
            opened.append(os.open(folder / name, os.O_RDWR | os.O_CLOEXEC))
            with contextlib.suppress(OSError):  # a bound of the kernel on all pipes of a user
                fcntl.fcntl(opened[-1], fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    except OSError:
        for descriptor in opened:
            os.close(descriptor)
        raise
    stdin, stdout, stderr = opened
    return stdin, stdout, stderr


class FifoStreams:
    """The server's side. Any number of writers, one reader each of stdout and stderr."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError: they are not there, or nobody is at the other side."""
        self._writing = asyncio.Lock()
        self._descriptors: list[int] = []
        self._waiting: set[asyncio.Future[None]] = set()
        self.ended = False  # the sandbox closed its stdout, not we
        self.closed = False
        try:
            for name, flags in zip(NAMES, (os.O_WRONLY, os.O_RDONLY, os.O_RDONLY), strict=True):
                self._descriptors.append(os.open(folder / name, flags | os.O_NONBLOCK | os.O_CLOEXEC))
        except OSError:
            self.close()
            raise

    async def send(self, data: bytes) -> None:
        """Raises SandboxGone. Cancelled, a part of `data` may have been written."""
        view = memoryview(data)
        async with self._writing:
            while view:
                if self.closed:
                    raise SandboxGone("The sandbox's stream is closed.")
                descriptor = self._descriptors[0]
                try:
                    view = view[os.write(descriptor, view) :]
                except BlockingIOError:
                    loop = asyncio.get_running_loop()
                    await self._ready(descriptor, loop.add_writer, loop.remove_writer)
                except OSError as broken:
                    raise SandboxGone("The sandbox's stream broke.") from broken

    async def receive(self) -> bytes:
        """The next bytes of stdout, b"" at the end."""
        data = await self._read(1)
        self.ended = self.ended or (not data and not self.closed)
        return data

    async def receive_log(self) -> bytes:
        """The next bytes of stderr, b"" at the end."""
        return await self._read(2)

    async def _read(self, place: int) -> bytes:
        while not self.closed:
            descriptor = self._descriptors[place]
            try:
                return os.read(descriptor, CHUNK)
            except BlockingIOError:
                loop = asyncio.get_running_loop()
                await self._ready(descriptor, loop.add_reader, loop.remove_reader)
            except OSError:
                break
        return b""

    async def _ready(self, descriptor: int, add: Callable[..., None], remove: Callable[[int], bool]) -> None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(ready)
        add(descriptor, _wake, ready)
        try:
            await ready
        finally:
            self._waiting.discard(ready)
            if not self.closed:
                remove(descriptor)

    def close(self) -> None:
        """A waiting `send` raises SandboxGone, a read gives b""."""
        if self.closed:
            return
        self.closed = True
        if self._waiting:
            loop = asyncio.get_running_loop()
            for descriptor in self._descriptors:
                loop.remove_reader(descriptor)
                loop.remove_writer(descriptor)
            for ready in self._waiting:
                _wake(ready)
        for descriptor in self._descriptors:
            os.close(descriptor)


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
