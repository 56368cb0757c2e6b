"""The attached stream of a container: bytes in, stdout and stderr out of the engine's 8-byte frames."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque

from toolserver.errors import SandboxGone
from toolserver.runtime.log_tail import LogTail

CHUNK = 1 << 18
_STDERR = 2
_MAX_SEEN = 16


class AttachedStream:
    """Memory is bounded both ways: a container that floods waits for `receive`, a sender waits for one that does not read."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, output: asyncio.StreamWriter | None = None
    ) -> None:
        """`writer` is for stdin, and `output` the other half of `reader` where that is a connection of its own."""
        self._reader, self._writer = reader, writer
        self._connections = [one for one in (writer, output) if one is not None]
        self._reading, self._writing = asyncio.Lock(), asyncio.Lock()
        self._left, self._to_stderr = 0, False  # of the frame that is being read
        self._ahead = deque[tuple[bytes, bool]]()  # read already; whether it is of stderr
        self._ended = False
        self.finished = False  # the container closed it, not we
        self.log = LogTail()

    @classmethod
    async def over(cls, sock: socket.socket) -> AttachedStream:
        """Takes the socket over."""
        return cls(*await _connection(sock))

    @classmethod
    async def over_two(cls, stdin: socket.socket, output: socket.socket) -> AttachedStream:
        """Takes both over. An engine gives up a socket as soon as one of its streams has ended, if stdin is among them."""
        _, to_stdin = await _connection(stdin)
        reader, writer = await _connection(output)
        return cls(reader, to_stdin, writer)

    @property
    def open(self) -> bool:
        """Neither end has been seen to close it."""
        return not self._ended

    async def send(self, data: bytes) -> None:
        """One whole write even when cancelled half way. Raises SandboxGone."""
        async with self._writing:
            try:
                await self._writer.drain()  # what others sent
                if self._ended or self._writer.is_closing():
                    raise SandboxGone("The sandbox's stream is closed.")
                self._writer.write(data)
                await self._writer.drain()
            except (OSError, RuntimeError) as broken:
                raise SandboxGone("The sandbox's stream broke.") from broken

    async def receive(self) -> bytes:
        """The next bytes of stdout, b"" at the end."""
        async with self._reading:
            while self._ahead or not self._ended:
                data, to_stderr = self._ahead.popleft() if self._ahead else await self._next()
                if data and not to_stderr:
                    return data
            return b""

    async def receive_both(self) -> tuple[bytes, bool]:
        """The next bytes of either, and whether they are of stderr; b"" at the end."""
        async with self._reading:
            while self._ahead or not self._ended:
                data, to_stderr = self._ahead.popleft() if self._ahead else await self._next()
                if data:
                    return data, to_stderr
            return b"", False

    async def line(self, limit: int) -> bytes:
        """The first line of stdout, or what there is of it at the end or after `limit` bytes. What follows comes by `receive`."""
        line, seen = b"", deque[tuple[bytes, bool]]()  # of stderr, which may come before what was said earlier
        while b"\n" not in line and len(line) < limit:
            data, to_stderr = await self.receive_both()
            if not data:
                break
            if to_stderr:
                if len(seen) < _MAX_SEEN:
                    seen.append((data, True))
            else:
                line += data
        line, _, rest = line.partition(b"\n")
        self._ahead.extend([*seen, (rest, False)])
        return line

    async def drain(self) -> None:
        """Read and drop all until the end, so that the engine can end a container whose stream is full."""
        async with self._reading:
            while not self._ended:
                await self._next()

    async def end_input(self) -> None:
        """Close its stdin: an engine tells the program so where the container was made for one input."""
        async with self._writing:
            try:
                await self._writer.drain()
                self._writer.write_eof()
            except (OSError, RuntimeError) as broken:
                raise SandboxGone("The sandbox's stream broke.") from broken

    async def _next(self) -> tuple[bytes, bool]:
        """The next piece and whether it is of stderr; b"" between pieces and at the end."""
        try:
            if self._left == 0:
                header = await self._reader.readexactly(8)
                self._to_stderr = header[0] == _STDERR
                self._left = int.from_bytes(header[4:8], "big")
                return b"", False
            data = await self._reader.read(min(self._left, CHUNK))
        except (OSError, asyncio.IncompleteReadError):
            data = b""
        if not data:
            self.finished = not self._ended
            self.abort()
        self._left -= len(data)
        if self._to_stderr:
            self.log.feed(data)
        return data, self._to_stderr

    def abort(self) -> None:
        """Close at once; a waiting `send` raises SandboxGone, `receive` gives b""."""
        self._ended = True
        for one in self._connections:
            one.transport.abort()

    async def close(self) -> None:
        self.abort()
        for one in self._connections:
            with contextlib.suppress(OSError):
                await one.wait_closed()


async def _connection(sock: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if sock.family == socket.AF_UNIX:
        return await asyncio.open_unix_connection(sock=sock, limit=CHUNK)
    return await asyncio.open_connection(sock=sock, limit=CHUNK)
