"""OpenTelemetry spans over OTLP/HTTP, with the packages of the extra `toolcrib[otel]`.

Spans are told of when they have ended, with the ids that the server gave them: those stand in its answers, in its log and in
what goes into the sandbox, so all of it is found by one id.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping

from opentelemetry import trace as api
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator

from toolserver.telemetry.trace import Timed, Trace

_FLUSH_S = 2.0
_SAMPLED = 1
_EXPORT_TIMEOUT_S = 5.0


class _GivenIds(IdGenerator):
    trace_id = span_id = 1

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


class OtlpSpans:
    """Sending is the work of a thread; what a collector does not take in time is dropped."""

    def __init__(self, endpoint: str | None, version: str) -> None:
        self._ids = _GivenIds()
        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "toolserver"}
        resource = Resource.create({"service.version": version, **named})
        self._provider: TracerProvider = TracerProvider(
            resource=resource, id_generator=self._ids, shutdown_on_exit=False
        )
        url = None if endpoint is None else f"{endpoint.rstrip('/')}/v1/traces"
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=_EXPORT_TIMEOUT_S)))
        self._tracer = self._provider.get_tracer("toolserver", version)

    def samples(self, trace_id: str) -> bool:
        """By OpenTelemetry's own variables: all, unless they say otherwise."""
        decision = self._provider.sampler.should_sample(None, int(trace_id, 16), "request").decision
        return bool(decision.is_sampled())  # type: ignore[no-untyped-call]

    def tell(self, trace: Trace, timed: Timed, attributes: Mapping[str, str | int], *, server: bool = False) -> None:
        if not int(trace.flags, 16) & _SAMPLED:
            return
        ended = time.time_ns()
        context = None
        if timed.parent_id is not None:
            parent = api.SpanContext(
                int(trace.trace_id, 16),
                int(timed.parent_id, 16),
                is_remote=server,
                trace_flags=api.TraceFlags(_SAMPLED),
            )
            context = api.set_span_in_context(api.NonRecordingSpan(parent))
        self._ids.trace_id, self._ids.span_id = int(trace.trace_id, 16), int(timed.span_id, 16)
        span = self._tracer.start_span(
            timed.name,
            context,
            kind=api.SpanKind.SERVER if server else api.SpanKind.INTERNAL,
            attributes=dict(attributes),
            start_time=ended - int(timed.seconds * 1e9),
        )
        if timed.failed:
            span.set_status(api.Status(api.StatusCode.ERROR))
        span.end(ended)

    def close(self) -> None:
        """Blocks for _FLUSH_S at the most."""
        closing = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        closing.start()
        closing.join(_FLUSH_S)
