"""Server-sent events: when they are asked for, how they look, and how many streams are open at a time."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from toolserver.api.answers import as_error
from toolserver.calls import live
from toolserver.calls.answer import Answer
from toolserver.calls.live import Event
from toolserver.errors import Code, ToolServerError, invalid
from toolserver.telemetry.metrics import Metrics
from toolserver.telemetry.trace import trace_id

MEDIA_TYPE = "text/event-stream"
QUIET = b": nothing new\n\n"
_QUALITY = re.compile(r"\s*q\s*=\s*(0(?:\.\d{0,3})?|1(?:\.0{0,3})?)\s*")
_OFFSET = re.compile(r"[0-9]{1,15}")


def wanted(request: Request) -> bool:
    """Whether the Accept header names text/event-stream, and application/json not rather."""
    given = request.headers.getlist("accept")
    if not given or not any("event-stream" in accept.lower() for accept in given):
        return False
    found = qualities(",".join(given))
    events = found.get(MEDIA_TYPE, 0.0)
    return events > 0 and events >= found.get("application/json", 0.0)


def qualities(accept: str) -> dict[str, float]:
    """What an Accept header names, each with its weight."""
    found: dict[str, float] = {}
    for part in accept.split(","):
        kind, *parameters = part.split(";")
        given = [match for text in parameters if (match := _QUALITY.fullmatch(text))]
        found[kind.strip().lower()] = float(given[0][1]) if given else 1.0
    return found


def offset_of(request: Request, after: int) -> int:
    """Where a follower goes on: the id of the last event it has, else `after`. Raises invalid_arguments."""
    given = request.headers.getlist("last-event-id")
    if len(given) > 1:
        raise invalid("Last-Event-ID", "is given more than once")
    last = given[0] if given else ""
    if not last:
        return after
    if _OFFSET.fullmatch(last) is None:
        raise invalid("Last-Event-ID", "must be the id of an event of this stream: a number of bytes")
    return int(last)


class Streams:
    """The open streams. Each costs a connection, a chunk of output and a waiting request to its sandbox."""

    def __init__(self, limit: int, limit_per_tenant: int, metrics: Metrics, advice: str) -> None:
        """`advice`: what one can do who got none."""
        self._limit, self._limit_per_tenant, self._metrics = limit, limit_per_tenant, metrics
        self._advice = advice
        self._open: Counter[str] = Counter()  # by tenant

    @property
    def open(self) -> int:
        return self._open.total()

    def take(self, tenant: str) -> None:
        """Raises quota_exceeded. `give_back` must follow."""
        if self._open[tenant] >= self._limit_per_tenant:
            raise ToolServerError(
                Code.QUOTA_EXCEEDED,
                f"{self._limit_per_tenant} event streams are open, the most that one tenant may have. {self._advice}",
            )
        if self.open >= self._limit:
            raise ToolServerError(
                Code.QUOTA_EXCEEDED,
                f"{self._limit} event streams are open, the most that this server has. {self._advice}",
            )
        self._open[tenant] += 1

    def give_back(self, tenant: str) -> None:
        self._open[tenant] -= 1
        if not self._open[tenant]:
            del self._open[tenant]

    def sent(self, size: int) -> None:
        self._metrics.count("toolserver_streamed_bytes_total", size)


class ByteStream(Response):
    """Sends what it is given until that ends or the client goes, within a place of its tenant's among the open streams."""

    media_type = MEDIA_TYPE

    def __init__(
        self,
        parts: AsyncIterator[bytes],
        streams: Streams,
        tenant: str,
        headers: Mapping[str, str],
        *,
        on_leave: Callable[[], None] = lambda: None,
    ) -> None:
        """Takes over the tenant's place that was taken in `streams`, and gives it back. `on_leave`: the client went first."""
        super().__init__(None, 200, {"Cache-Control": "no-store", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._parts, self._streams, self._tenant, self._on_leave = parts, streams, tenant, on_leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        sending = asyncio.create_task(self._send(send), name="events")
        leaving = asyncio.create_task(left(receive), name="until the client leaves")
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not sending.done() or sending.cancelled() or sending.exception() is not None:
                self._on_leave()
            for task in (sending, leaving):
                task.cancel()
            await asyncio.wait({sending, leaving})
            self._streams.give_back(self._tenant)
        if not sending.cancelled():
            sending.result()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._parts:
            await send({"type": "http.response.body", "body": data, "more_body": True})
            self._streams.sent(len(data))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class EventStream(ByteStream):
    """The events of a call. When the client goes the call is none the wiser."""

    def __init__(
        self, events: AsyncIterator[Event | None], streams: Streams, tenant: str, headers: Mapping[str, str]
    ) -> None:
        super().__init__(_encoded(events), streams, tenant, headers)


async def _encoded(events: AsyncIterator[Event | None]) -> AsyncIterator[bytes]:
    try:
        async for event in events:
            yield QUIET if event is None else _written(event)
    except Exception as problem:  # noqa: BLE001 - the stream must end with an outcome
        yield _written(live.outcome(Answer.refusal(as_error(problem), trace_id())))


def _written(event: Event) -> bytes:
    mark = b"" if event.offset is None else b"id: %d\n" % event.offset
    return b"%bevent: %b\ndata: %b\n\n" % (mark, event.name.encode(), event.data)


async def left(receive: Receive) -> None:
    """Ends when the client has hung up. For after the body: whatever of it still comes is passed over."""
    while (await receive())["type"] != "http.disconnect":
        pass
