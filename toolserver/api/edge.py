"""The outermost layer of the application: trace, key, phase, and an answer for everything that goes wrong inside."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toolserver.api.answers import error_answer
from toolserver.api.protocol import ABORT
from toolserver.api.services import Services
from toolserver.telemetry.trace import Trace, about, current_trace

_OPEN_PATHS = frozenset({"/healthz"})
_PHASELESS_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})
_WANTED = (b"authorization", b"traceparent", b"x-request-id")
_STALLED_S = 60.0
_SHOWN = 1024  # characters of a path in the log
_log = logging.getLogger(__name__)


class Edge:
    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app, self.services = app, services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        else:
            await self._app(scope, receive, send)

    async def _http(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        begun = time.monotonic()
        found = {name: value for name, value in scope["headers"] if name in _WANTED}
        observer = self.services.observer
        trace = Trace.of(_text(found.get(b"traceparent")), _text(found.get(b"x-request-id")), observer)
        token = current_trace.set(trace)
        answered = _Traced(send, trace, scope.get(ABORT))
        try:
            await self._guarded(scope, receive, answered, found.get(b"authorization"))
        except Exception as problem:  # the outermost place of a request: it must be answered
            if answered.status is None:
                await error_answer(problem)(scope, receive, answered)
            elif answered.stalled:
                _log.info("client_stalled")
            else:
                _log.error("answer_broken_off", exc_info=problem)
                raise  # the connection is closed, so that the client sees a cut answer
        finally:
            seconds = time.monotonic() - begun
            method, path, status = scope["method"], scope["path"], answered.status
            observer.request_ended(trace, method, path, status, seconds)
            if _log.isEnabledFor(level := logging.DEBUG if path in _PHASELESS_PATHS else logging.INFO):
                fields = {"method": method, "path": path[:_SHOWN], "status": status, "ms": round(seconds * 1000, 2)}
                fields |= {"bytes": answered.bytes, "request_id": trace.request_id}
                _log.log(level, "request", extra={"fields": fields})
            current_trace.reset(token)

    async def _guarded(
        self, scope: MutableMapping[str, Any], receive: Receive, send: Send, header: bytes | None
    ) -> None:
        scope["app"] = self
        path = scope["path"]
        if path not in _OPEN_PATHS:
            authenticator = self.services.authenticator
            key = authenticator.known(header) or await authenticator.look_up(header)
            scope["toolserver.key"] = key
            about(tenant=key.tenant)
        if path not in _PHASELESS_PATHS and self.services.readiness.phase == "starting":
            self.services.readiness.check_phase()
        await self._app(scope, receive, send)


class _Traced:
    """Puts the trace on the answer, and remembers whether one has begun."""

    def __init__(
        self, send: Callable[[Message], Awaitable[None]], trace: Trace, abort: Callable[[], None] | None
    ) -> None:
        """`abort` ends the connection at once: closing one waits until its reader has taken what was written."""
        self._send, self._abort, self.stalled = send, abort, False
        self._headers = [(b"x-request-id", trace.request_id.encode()), (b"traceparent", trace.traceparent.encode())]
        self.status: int | None = None
        self.bytes = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self._headers, (b"x-content-type-options", b"nosniff")]
        else:
            self.bytes += len(message.get("body", b""))
        if not message.get("more_body"):
            await self._send(message)
            return
        try:
            async with asyncio.timeout(_STALLED_S):  # a client that stopped reading must not hold a session for ever
                await self._send(message)
        except TimeoutError:
            self.stalled = True
            if self._abort is not None:
                self._abort()
                await asyncio.sleep(0)  # the connection is told of as lost
            raise


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")
