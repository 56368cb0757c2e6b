"""The DevTools protocol over two pipes: no port is opened that the content of a page could reach."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sandbox_images.base.pipe_writer import PipeWriter

MAX_MESSAGE_BYTES = 64 << 20
COMMAND_TIMEOUT_S = 15.0
_READ_BYTES = 1 << 18

OnEvent = Callable[[str | None, str, dict[str, Any]], None]


class CommandFailed(Exception):  # noqa: N818 - reads as what it names
    """The browser said no; the message is its own."""


class Unresponsive(Exception):  # noqa: N818
    """No answer in time: the page's script runs without end, or the machine is too busy."""


class Gone(Exception):  # noqa: N818
    """The page or the whole browser is not there any more."""


class DevTools:
    """Owns both descriptors. `on_event` gets (session, method, params); `on_gone` is called once, at the end of the pipe."""

    def __init__(self, read_fd: int, write_fd: int, on_event: OnEvent, on_gone: Callable[[], None]) -> None:
        os.set_blocking(read_fd, False)
        self._read_fd, self._write_fd, self._on_event, self._on_gone = read_fd, write_fd, on_event, on_gone
        self._loop = asyncio.get_running_loop()
        self._writer = PipeWriter(write_fd)
        self._data, self._searched = bytearray(), 0
        self._waiting: dict[int, tuple[str | None, asyncio.Future[dict[str, Any]]]] = {}
        self._next, self._open = 0, True
        self._loop.add_reader(read_fd, self._on_readable)

    async def ask(
        self,
        method: str,
        params: dict[str, Any] | None = None,
        *,
        session: str | None = None,
        timeout_s: float = COMMAND_TIMEOUT_S,
    ) -> dict[str, Any]:
        """The command's result. Raises CommandFailed, Unresponsive, Gone."""
        if not self._open:
            raise Gone
        self._next += 1
        number = self._next
        message: dict[str, Any] = {"id": number, "method": method, "params": params or {}}
        if session is not None:
            message["sessionId"] = session
        answer: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._waiting[number] = (session, answer)
        try:
            self._writer.write(json.dumps(message).encode() + b"\0")
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as late:
            raise Unresponsive(method) from late
        finally:
            self._waiting.pop(number, None)

    @property
    def is_open(self) -> bool:
        return self._open

    def session_gone(self, session: str) -> None:
        """Nothing more will come from it: whoever waits is told."""
        for owner, answer in list(self._waiting.values()):
            if owner == session and not answer.done():
                answer.set_exception(Gone())

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._read_fd)
        self._loop.remove_writer(self._write_fd)
        for descriptor in (self._read_fd, self._write_fd):
            with suppress(OSError):
                os.close(descriptor)
        for _, answer in list(self._waiting.values()):
            if not answer.done():
                answer.set_exception(Gone())
        self._on_gone()

    def _on_readable(self) -> None:
        try:
            data = os.read(self._read_fd, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._data += data
        if not data or len(self._data) > MAX_MESSAGE_BYTES:
            self.close()
            return
        while (end := self._data.find(b"\0", self._searched)) >= 0:
            message = bytes(self._data[:end])
            del self._data[: end + 1]
            self._searched = 0
            self._take(message)
        self._searched = len(self._data)

    def _take(self, data: bytes) -> None:
        try:
            message = json.loads(data)
        except ValueError:
            return
        if "id" in message:
            _, answer = self._waiting.get(message["id"], (None, None))
            if answer is None or answer.done():
                return
            if "error" in message:
                answer.set_exception(CommandFailed(str(message["error"].get("message", ""))[:500]))
            else:
                answer.set_result(message.get("result") or {})
        elif "method" in message:
            self._on_event(message.get("sessionId"), message["method"], message.get("params") or {})
