"""The protocol stream: lines in on stdin, lines out on stdout, neither ever waited for."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable

from sandbox_images.base import mcp_stdio
from sandbox_images.base.event_loop import WRITABLE, Loop
from sandbox_images.base.mcp_stdio import ProtocolError

READ_BYTES = 1 << 16  # what a pipe holds; larger buffers would be mapped anew for each read
PAUSE_BYTES = 16 << 20  # that wait to be written: no more requests are read until they are gone
MAX_WAITING_BYTES = 32 << 20  # beyond it the oldest answers are dropped


class ProtocolStream:
    """Takes stdin and stdout away from their numbers. `on_heard` is called whenever anything was read.

    While nobody reads, answers wait up to a bound; beyond it whole ones are dropped, never a part of one.
    """

    def __init__(
        self, loop: Loop, on_line: Callable[[bytes], None], on_end: Callable[[], None], on_heard: Callable[[], None]
    ) -> None:
        self._loop, self._on_line, self._on_end, self._on_heard = loop, on_line, on_end, on_heard
        self._in, self._out = os.dup(0), os.dup(1)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(2, 1)  # a stray print must not break the protocol
        os.close(null)
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)
        self._incoming, self._skipping = bytearray(), False
        self._outgoing: deque[memoryview] = deque()
        self._waiting, self._begun = 0, False  # bytes in `_outgoing`; a part of its first line has been written
        loop.watch(self._in, self._on_readable)

    def _on_readable(self, _events: int) -> None:
        try:
            data = os.read(self._in, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.unwatch(self._in)
            self._on_end()
            return
        self._on_heard()
        if not self._incoming and not self._skipping and data.find(b"\n") == len(data) - 1:
            self._on_line(data)  # the usual case: one whole line
            return
        *lines, rest = data.split(b"\n")
        for piece in lines:
            self._take(piece)
            line, self._incoming = bytes(self._incoming), bytearray()
            if self._skipping:
                self._skipping = False
            else:
                self._on_line(line)
        self._take(rest)

    def _take(self, piece: bytes) -> None:
        """A part of a line. One that is too long is refused once, and skipped as it comes."""
        if self._skipping:
            return
        self._incoming += piece
        if len(self._incoming) > mcp_stdio.MAX_LINE_BYTES:
            self._incoming, self._skipping = bytearray(), True
            self.send(mcp_stdio.error(None, ProtocolError(mcp_stdio.INVALID_REQUEST, "the message is too long")))

    def send(self, line: bytes) -> None:
        rest = memoryview(line)
        if not self._outgoing:
            written = self._write(line)
            if written is None or written == len(line):
                return
            self._begun, rest = written > 0, rest[written:]
            self._loop.watch(self._out, self._on_writable, WRITABLE)
        self._outgoing.append(rest)
        self._waiting += len(rest)
        while self._waiting > MAX_WAITING_BYTES and len(self._outgoing) > 1 + self._begun:
            self._waiting -= len(self._outgoing[self._begun])
            del self._outgoing[self._begun]
        if self._waiting > PAUSE_BYTES:
            self._loop.unwatch(self._in)

    def _write(self, data: bytes | memoryview) -> int | None:
        """How much was written; None when nobody can read any more: the end of stdin follows."""
        try:
            return os.write(self._out, data)
        except BlockingIOError:
            return 0
        except OSError:
            return None

    def _on_writable(self, _events: int) -> None:
        while self._outgoing:
            data = self._outgoing[0]
            written = self._write(data)
            if written is None:
                self._outgoing.clear()
                break
            self._waiting -= written
            if written < len(data):
                self._begun = self._begun or written > 0
                self._outgoing[0] = data[written:]
                return
            self._begun = False
            self._outgoing.popleft()
        self._waiting, self._begun = 0, False
        self._loop.unwatch(self._out)
        self._loop.watch(self._in, self._on_readable)
