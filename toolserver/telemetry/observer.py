"""Where the time of requests goes: into histograms always, into spans where somebody takes them."""

from __future__ import annotations

from collections.abc import Mapping

from toolserver.telemetry.metrics import Metrics
from toolserver.telemetry.spans import Spans
from toolserver.telemetry.trace import Timed, Trace


class RequestObserver:
    """Tells metrics, and `told_on` (None: there are no spans)."""

    def __init__(self, metrics: Metrics, told_on: Spans | None) -> None:
        self._metrics, self._told_on = metrics, told_on
        self.spans = told_on is not None
        metrics.counter("toolserver_requests_total", "HTTP requests by method and status.")
        metrics.histogram("toolserver_request_seconds", "Time of HTTP requests.")
        metrics.histogram(
            "toolserver_stage_seconds",
            "Time of the parts of calls and sessions: queue, start (of a sandbox, or its claim), sandbox, store.",
        )

    def samples(self, trace_id: str) -> bool:
        return self._told_on is None or self._told_on.samples(trace_id)

    def stage_ended(self, trace: Trace, timed: Timed) -> None:
        self._metrics.observe("toolserver_stage_seconds", timed.seconds, stage=timed.name)
        if self._told_on is not None:
            self._told_on.tell(trace, timed, _attributes(trace.about))

    def request_ended(self, trace: Trace, method: str, path: str, status: int | None, seconds: float) -> None:
        """`method`: as sent. `status`: None when no answer was begun."""
        self._metrics.count("toolserver_requests_total", method=_known(method), status=str(status or "none"))
        self._metrics.observe("toolserver_request_seconds", seconds)
        if self._told_on is not None:
            failed = status is None or status >= 500
            timed = Timed(f"{_known(method)} request", trace.span_id, trace.parent_id, seconds, failed=failed)
            http = {"http.request.method": _known(method), "url.path": path}
            answered = {} if status is None else {"http.response.status_code": status}
            self._told_on.tell(trace, timed, {**http, **answered, **_attributes(trace.about)}, server=True)


def _attributes(about: Mapping[str, str]) -> dict[str, str | int]:
    return {f"toolcrib.{name}": value for name, value in about.items()}


def _known(method: str) -> str:
    return method if method in {"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"} else "other"
