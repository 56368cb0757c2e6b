"""What the server says about itself: the trace of each request, its log, and its metrics.

The trace id of a request (W3C `traceparent`) stands in its answer, in each log line and in every error body.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

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


class EventFormatter(logging.Formatter):
    """One line a record: the event's name (the message) and its fields (`extra={"fields": {...}}`)."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self.as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        fields: Mapping[str, Any] = getattr(record, "fields", {})
        trace = current_trace.get()
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **({"trace_id": trace.trace_id} if trace is not None else {}),
            **fields,
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        if self.as_json:
            return json.dumps(entry, ensure_ascii=False, default=str)
        head = f"{entry.pop('time')} {entry.pop('level'):<7} {entry.pop('event')}"
        exception = entry.pop("exception", None)
        entry.pop("logger")
        told = " ".join(f"{name}={json.dumps(value, ensure_ascii=False, default=str)}" for name, value in entry.items())
        return f"{head} {told}".rstrip() + (f"\n{exception}" if exception else "")


def configure_logging(level: str = "info", *, as_json: bool = False) -> None:
    """Log of the whole process to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(EventFormatter(as_json=as_json))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in ("uvicorn.error", "uvicorn.access", "asyncio", "docker", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)


_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """Counters, gauges read at the time of asking, and histograms of seconds, in the Prometheus text format.

    Label values are the server's own words (a method, a status, a code, a catalog name), never a caller's text.
    """

    def __init__(self) -> None:
        self._counters: dict[str, dict[tuple[tuple[str, str], ...], float]] = defaultdict(lambda: defaultdict(float))
        self._gauges: dict[str, Callable[[], float]] = {}
        self._histograms: dict[str, list[float]] = {}
        self._sums: dict[str, float] = defaultdict(float)
        self._help: dict[str, str] = {}

    def counter(self, name: str, told: str) -> None:
        self._help[name] = told
        self._counters[name]  # shown from the start

    def gauge(self, name: str, told: str, read: Callable[[], float]) -> None:
        self._help[name] = told
        self._gauges[name] = read

    def histogram(self, name: str, told: str) -> None:
        self._help[name] = told
        self._histograms[name] = [0.0] * (len(_BUCKETS_S) + 1)

    def count(self, name: str, **labels: str) -> None:
        self._counters[name][tuple(labels.items())] += 1

    def observe(self, name: str, seconds: float) -> None:
        buckets = self._histograms[name]
        self._sums[name] += seconds
        for place, limit in enumerate(_BUCKETS_S):
            if seconds <= limit:
                buckets[place] += 1
                return
        buckets[-1] += 1

    def render(self) -> str:
        lines: list[str] = []
        for name, values in self._counters.items():
            lines += self._head(name, "counter")
            lines += [f"{name}{_labels(labels)} {value:g}" for labels, value in values.items()] or [f"{name} 0"]
        for name, read in self._gauges.items():
            lines += [*self._head(name, "gauge"), f"{name} {read():g}"]
        for name, buckets in self._histograms.items():
            lines += self._head(name, "histogram")
            total = 0.0
            for limit, count in zip((*_BUCKETS_S, float("inf")), buckets, strict=True):
                total += count
                edge = "+Inf" if limit == float("inf") else f"{limit:g}"
                lines.append(f'{name}_bucket{{le="{edge}"}} {total:g}')
            lines += [f"{name}_sum {self._sums[name]:g}", f"{name}_count {total:g}"]
        return "\n".join(lines) + "\n"

    def _head(self, name: str, kind: str) -> list[str]:
        return [f"# HELP {name} {self._help[name]}", f"# TYPE {name} {kind}"]


def _labels(labels: tuple[tuple[str, str], ...]) -> str:
    if not labels:
        return ""
    escaped = (f'{k}="{v.replace(chr(92), chr(92) * 2).replace(chr(34), chr(92) + chr(34))}"' for k, v in labels)
    return "{" + ",".join(escaped) + "}"
