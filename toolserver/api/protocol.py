"""uvicorn's HTTP protocol with bounds of ours: slow or huge headers, ambiguous framing, too many connections.

What never becomes a request is answered in the one error shape too, and its connection is closed.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from toolserver.api.joined_writes import JoinedWrites
from toolserver.calls.answer import encode_body
from toolserver.errors import Code, ToolServerError
from toolserver.telemetry.trace import trace_id

ABORT = "toolserver.abort"  # in a request's scope: ends its connection without a word more
MAX_HEADER_BYTES = 64 << 10
MAX_HEADERS = 100


def protocol_class(header_timeout_s: float, max_connections: int) -> type[HttpToolsProtocol]:
    """The protocol with these bounds. Times in seconds."""

    class EdgeProtocol(HttpToolsProtocol):
        _header_timer: asyncio.TimerHandle | None = None
        _header_bytes = 0
        _in_headers = True

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(cast(asyncio.Transport, JoinedWrites(transport, self.loop)))
            if len(self.connections) > max_connections:
                self._refuse(
                    Code.NO_CAPACITY, f"The server has {max_connections} connections open, its limit. Try again."
                )
                return
            self._arm()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            if self._in_headers:
                self._header_bytes += len(data)
                if self._header_timer is None:
                    self._arm()
            super().data_received(data)
            if self._in_headers and self._header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
                self._refuse(Code.HEADERS_TOO_LARGE, f"The request's header is larger than {MAX_HEADER_BYTES} bytes.")

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._in_headers = True
            if self._header_timer is None:  # a request that follows in the same packet
                self._arm()

        def on_headers_complete(self) -> None:
            self._disarm()
            self._in_headers = False
            self._header_bytes = 0
            names = [name for name, _ in self.headers]
            if (
                sum(len(name) + len(value) for name, value in self.headers) > MAX_HEADER_BYTES
                or len(names) > MAX_HEADERS
            ):
                self._refuse(
                    Code.HEADERS_TOO_LARGE,
                    f"The request has more than {MAX_HEADERS} headers or {MAX_HEADER_BYTES} bytes of them.",
                )
            elif b"transfer-encoding" in names and b"content-length" in names:
                self._refuse(Code.BAD_REQUEST, "The request has both Content-Length and Transfer-Encoding.")
            else:
                super().on_headers_complete()
                self.scope[ABORT] = self.transport.abort  # type: ignore[literal-required]

        def on_body(self, body: bytes) -> None:
            if self.cycle is not None and not self.transport.is_closing():
                super().on_body(body)

        def on_message_complete(self) -> None:
            self._in_headers = True
            if self.cycle is not None and not self.transport.is_closing():
                super().on_message_complete()

        def send_400_response(self, msg: str) -> None:
            del msg
            self._refuse(Code.BAD_REQUEST, "This is no valid HTTP request.")

        def _arm(self) -> None:
            self._header_timer = self.loop.call_later(header_timeout_s, self._too_slow)

        def _disarm(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

        def _too_slow(self) -> None:
            self._header_timer = None
            if not self.transport.is_closing():
                self._refuse(Code.REQUEST_TIMEOUT, f"The request's header did not come within {header_timeout_s:g} s.")

        def _refuse(self, code: Code, message: str) -> None:
            self._disarm()
            if not self._owes_an_answer():
                self.transport.write(_plain_answer(ToolServerError(code, message)))
            self.transport.close()

        def _owes_an_answer(self) -> bool:
            """An earlier request is being worked on: whatever is written now would be taken for its answer."""
            cycle = self.cycle
            if cycle is None or cycle.response_complete:
                return False
            return bool(self.pipeline) or cycle.response_started or not cycle.more_body

    return EdgeProtocol


def _plain_answer(error: ToolServerError) -> bytes:
    detail: dict[str, Any] = error.detail(trace_id())
    body = encode_body({"detail": detail})
    retry = f"retry-after: {max(1, round(detail['retry_after_s']))}\r\n" if error.status == 503 else ""
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n{retry}connection: close\r\n\r\n"
    return STATUS_LINE[error.status] + head.encode("ascii") + body
