"""Spans of requests, for whoever collects them. What sends them is imported only when they are asked for."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Protocol

from toolserver.telemetry.trace import Timed, Trace

_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_MISSING = 'OpenTelemetry is asked for, and its packages are not installed. Install them: pip install "toolcrib[otel]".'
_log = logging.getLogger(__name__)


class SpansMissing(Exception):  # noqa: N818 - reads as the state it names
    """The packages of the extra are not installed."""


class Spans(Protocol):
    """`close` must be called; it blocks for a few seconds at the most."""

    def samples(self, trace_id: str) -> bool:
        """Whether a trace that begins here is sent."""

    def tell(self, trace: Trace, timed: Timed, attributes: Mapping[str, str | int], *, server: bool = False) -> None:
        """A span that ends now. `server`: it is the request as a whole."""

    def close(self) -> None: ...


def open_spans(endpoint: str | None, version: str) -> Spans | None:
    """None when nobody asks for spans. `endpoint`: the collector's base URL; None: as OpenTelemetry's own variables say.

    Raises SpansMissing when the setting asks for them without the packages; for the variables, which are often set for all
    programs of a machine, it is a warning.
    """
    if endpoint is None and not any(os.environ.get(name) for name in _VARIABLES):
        return None
    try:
        from toolserver.telemetry.otlp import OtlpSpans  # noqa: PLC0415 - an extra, which most servers do without
    except ImportError as problem:
        if endpoint is not None:
            raise SpansMissing(_MISSING) from problem
        _log.warning("spans_off", extra={"fields": {"problem": _MISSING}})
        return None
    return OtlpSpans(endpoint, version)
