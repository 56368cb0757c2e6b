"""Two-way byte streams with back-pressure: `write` returns once the other side took enough. Both kinds have one shape."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from abc import ABC, abstractmethod

PIECE = 64 * 1024


class Stream(ABC):
    """Reads and writes raise OSError (ssl.SSLError is one) when the other side is lost."""

    @abstractmethod
    async def read(self) -> bytes:
        """At most PIECE bytes, b"" at the end."""

    @abstractmethod
    async def write(self, data: bytes) -> None: ...

    @abstractmethod
    async def end(self) -> None:
        """Say that nothing more will be written, where the transport can; it may still be read from."""

    @abstractmethod
    def abort(self) -> None:
        """Drop it at once, unsent bytes too."""

    @abstractmethod
    async def close(self) -> None:
        """Send what is written, within a second, and drop it."""


class PlainStream(Stream):
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @property
    def ended(self) -> bool:
        """Whether the other side has nothing more to say."""
        return self._reader.at_eof() or self._writer.is_closing()

    async def read(self) -> bytes:
        return await self._reader.read(PIECE)

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def end(self) -> None:
        if self._writer.can_write_eof():
            self._writer.write_eof()

    def abort(self) -> None:
        self._writer.transport.abort()

    async def close(self) -> None:
        self._writer.close()
        try:
            async with asyncio.timeout(1):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            self.abort()


class TlsStream(Stream):
    """The server's side of TLS over a plain stream. `first` was read from it already.

    asyncio's own can't be given bytes that came early, which a client may send right behind its CONNECT.
    """

    def __init__(self, under: Stream, context: ssl.SSLContext, first: bytes) -> None:
        self._under = under
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._in.write(first)
        self._tls = context.wrap_bio(self._in, self._out, server_side=True)

    async def handshake(self) -> None:
        """Raises OSError."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                await self._fill()
            except ssl.SSLError:
                await self._flush()  # the alert
                raise
            else:
                await self._flush()
                return

    async def read(self) -> bytes:
        while True:
            try:
                return self._tls.read(PIECE)
            except ssl.SSLWantReadError:
                await self._flush()
                await self._fill()
            except ssl.SSLZeroReturnError:
                return b""

    async def write(self, data: bytes) -> None:
        if data:
            self._tls.write(data)
            await self._flush()

    async def end(self) -> None:
        """TLS has no half-close that clients heed: `close` says it."""

    def abort(self) -> None:
        self._under.abort()

    async def close(self) -> None:
        with contextlib.suppress(ssl.SSLError):  # the other side has not said its own end yet: nobody waits for that
            self._tls.unwrap()
        try:
            await self._flush()
        except OSError:
            self.abort()
        await self._under.close()

    async def _flush(self) -> None:
        if self._out.pending:
            await self._under.write(self._out.read())

    async def _fill(self) -> None:
        data = await self._under.read()
        if not data:
            raise ConnectionResetError("the stream ended within TLS")
        self._in.write(data)
