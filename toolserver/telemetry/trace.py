"""The trace of each request: its ids, and what is known of it.

The trace id of a request (W3C `traceparent`) stands in its answer, in each log line and in every error body.
"""

from __future__ import annotations

import re
import secrets
from contextvars import ContextVar
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True)
class Trace:
    """`span_id` is ours: the parent of whatever this request causes."""

    trace_id: str
    span_id: str
    flags: str
    request_id: str

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"

    @classmethod
    def of(cls, traceparent: str | None, request_id: str | None) -> Trace:
        """Goes on with the caller's ids where they are well formed; others are replaced, never echoed."""
        random = secrets.token_hex(32)
        found = _TRACEPARENT.fullmatch(traceparent) if traceparent else None
        if found is not None and (found[1] == "ff" or not found[2].strip("0") or not found[3].strip("0")):
            found = None
        trace_id, flags = (found[2], found[4]) if found is not None else (random[:32], "01")
        if request_id is None or _REQUEST_ID.fullmatch(request_id) is None:
            request_id = random[48:]
        return cls(trace_id, random[32:48], flags, request_id)


current_trace: ContextVar[Trace | None] = ContextVar("toolserver_trace", default=None)


def trace_id() -> str:
    """The trace id of the request under way; a new one outside of requests, so that an answer always has one."""
    trace = current_trace.get()
    return trace.trace_id if trace is not None else secrets.token_hex(16)
