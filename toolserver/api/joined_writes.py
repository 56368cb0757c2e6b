"""A transport that sends the head of an answer and its body in one packet: half the system calls, and one wake-up of the client."""

from __future__ import annotations

import asyncio
from typing import Any


class JoinedWrites:
    """A write waits for the next one of the same turn of the event loop, and leaves alone when there is none."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._held: bytes | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._held is not None:
            data, self._held = self._held + data, None
            self._transport.write(data)
        else:
            self._held = data
            self._loop.call_soon(self._send_held)

    def _send_held(self) -> None:
        if self._held is not None:
            data, self._held = self._held, None
            self._transport.write(data)

    def close(self) -> None:
        self._send_held()
        self._transport.close()

    def abort(self) -> None:
        self._held = None
        self._transport.abort()
