"""The log: one line an event, with the trace it belongs to."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from toolserver.telemetry.trace import current_trace

HIDDEN = "[…]"
TELLING = 4
_json = json.JSONEncoder(ensure_ascii=False, default=str).encode


class EventFormatter(logging.Formatter):
    """One line a record: the event's name (the message) and its fields (`extra={"fields": {...}}`)."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self.as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        fields: Mapping[str, Any] = getattr(record, "fields", {})
        trace = current_trace.get()
        known = {} if trace is None else {"trace_id": trace.trace_id, "span": trace.span_id, **trace.about}
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **known,
            **fields,
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        if self.as_json:
            return _json(entry)
        head = f"{entry.pop('time')} {entry.pop('level'):<7} {entry.pop('event')}"
        exception = entry.pop("exception", None)
        entry.pop("logger")
        told = " ".join(f"{name}={_json(value)}" for name, value in entry.items())
        return f"{head} {told}".rstrip() + (f"\n{exception}" if exception else "")


def configure_logging(level: str = "info", form: Literal["auto", "json", "text"] = "text") -> None:
    """Log of the whole process to stderr. `auto`: text on a terminal, JSON elsewhere."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(EventFormatter(as_json=form == "json" or (form == "auto" and not sys.stderr.isatty())))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
    # what no line shows is not looked up for each: the calling function, thread and process
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # noqa: SLF001 - as the manual of logging has it
    for name in ("uvicorn.error", "uvicorn.access", "asyncio", "docker", "urllib3", "opentelemetry"):
        logging.getLogger(name).setLevel(logging.WARNING)


def without(secrets: Iterable[str], text: str) -> str:
    """The text with these values blotted out; values so short that they stand everywhere by chance are left."""
    for secret in sorted((one for one in secrets if len(one) >= TELLING), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text
