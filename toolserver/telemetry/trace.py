"""The trace of each request: its ids, what is known of it, and where its time goes.

The trace id of a request (W3C `traceparent`) stands in its answer, in each log line, in every error body, in the call's row
of the database, and goes on into the sandbox.
"""

from __future__ import annotations

import re
import secrets
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Protocol, Self

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
StageName = Literal["queue", "start", "sandbox", "store"]


@dataclass(frozen=True)
class Timed:
    """A piece of work that has ended. `seconds`: how long it took, up to now. `parent_id`: the span that it is a part of."""

    name: str
    span_id: str
    parent_id: str | None
    seconds: float
    failed: bool


class Observer(Protocol):
    """Who is told where the time of requests goes. `spans`: whether it tells it on as spans, which then need ids."""

    spans: bool

    def samples(self, trace_id: str) -> bool:
        """Whether a trace that begins here is told of."""

    def stage_ended(self, trace: Trace, timed: Timed) -> None: ...


@dataclass(frozen=True)
class Trace:
    """`span_id` is ours: the parent of whatever this request causes. `parent_id` is the caller's.

    `about` is what log lines and spans tell of it: tenant, session_id, call_id.
    """

    trace_id: str
    span_id: str
    flags: str
    request_id: str
    parent_id: str | None = None
    observer: Observer | None = None
    about: dict[str, str] = field(default_factory=dict)

    @property
    def traceparent(self) -> str:
        return self.traceparent_of(self.span_id)

    def traceparent_of(self, span_id: str) -> str:
        return f"00-{self.trace_id}-{span_id}-{self.flags}"

    @classmethod
    def of(cls, traceparent: str | None, request_id: str | None, observer: Observer | None = None) -> Trace:
        """Goes on with the caller's ids where they are well formed; others are replaced, never echoed."""
        random = secrets.token_hex(32)
        found = _TRACEPARENT.fullmatch(traceparent) if traceparent else None
        if found is not None and (found[1] == "ff" or not found[2].strip("0") or not found[3].strip("0")):
            found = None
        if request_id is None or _REQUEST_ID.fullmatch(request_id) is None:
            request_id = random[48:]
        if found is not None:
            return cls(found[2], random[32:48], found[4], request_id, found[3], observer)
        flags = "01" if observer is None or observer.samples(random[:32]) else "00"
        return cls(random[:32], random[32:48], flags, request_id, None, observer)


current_trace: ContextVar[Trace | None] = ContextVar("toolserver_trace", default=None)


def trace_id() -> str:
    """The trace id of the request under way; a new one outside of requests, so that an answer always has one."""
    trace = current_trace.get()
    return trace.trace_id if trace is not None else secrets.token_hex(16)


def about(**told: str) -> None:
    """What the log is to tell of the request under way from here on."""
    trace = current_trace.get()
    if trace is not None:
        trace.about.update(told)


class Stage:
    """`with Stage("start"):` a part of the request under way, whose time is told. Outside of requests it does nothing."""

    __slots__ = ("_begun", "_name", "_span_id", "_trace")

    def __init__(self, name: StageName) -> None:
        self._name = name
        self._trace = current_trace.get()
        self._span_id = ""

    def __enter__(self) -> Self:
        trace = self._trace
        if trace is not None and trace.observer is not None and trace.observer.spans:
            self._span_id = secrets.token_hex(8)
        self._begun = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        trace = self._trace
        if trace is not None and trace.observer is not None:
            seconds = time.perf_counter() - self._begun
            trace.observer.stage_ended(
                trace, Timed(self._name, self._span_id, trace.span_id, seconds, failed=kind is not None)
            )

    @property
    def traceparent(self) -> str | None:
        """What goes on from here, for others to be a part of it; None outside of requests."""
        trace = self._trace
        return None if trace is None else trace.traceparent_of(self._span_id or trace.span_id)
