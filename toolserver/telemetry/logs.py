"""The log: one line an event, with the trace it belongs to."""

from __future__ import annotations

import base64
import json
import logging
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal
from urllib.parse import quote, quote_plus

from toolserver.telemetry.trace import current_trace

HIDDEN = "[…]"
TELLING = 4
_TELLING_CODED = 6
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


def forms_of(secrets: Iterable[str]) -> list[str]:
    """How these values may stand in a text, the longest first: as they are, as a part of JSON or of a URL, and in base64. Values so
    short that they stand everywhere by chance are left out.
    """
    forms: set[str] = set()
    for secret in secrets:
        if len(secret) < TELLING:
            continue
        forms |= {secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]}
        forms |= {quote(secret, safe=""), quote(secret), quote_plus(secret)}
        data = secret.encode("utf-8", "replace")
        for shift in range(3):  # where it begins in groups of three bytes; only the signs that it alone makes
            coded = base64.b64encode(bytes(shift) + data).decode().rstrip("=")
            coded = coded[(shift * 8 + 5) // 6 : (shift + len(data)) * 8 // 6]
            if len(coded) >= _TELLING_CODED:
                forms |= {coded, coded.replace("+", "-").replace("/", "_")}
    return sorted(forms, key=len, reverse=True)


def without(secrets: Iterable[str], text: str) -> str:
    """The text with these values blotted out, in any of their forms."""
    for form in forms_of(secrets):
        text = text.replace(form, HIDDEN)
    return text


def blotted(forms: Sequence[str], value: Any) -> Any:
    """The JSON value with these texts blotted out of its texts and names. Lists and objects are made anew."""
    if isinstance(value, str):
        for form in forms:
            value = value.replace(form, HIDDEN)
        return value
    if isinstance(value, dict):
        return {blotted(forms, name): blotted(forms, one) for name, one in value.items()}
    if isinstance(value, list):
        return [blotted(forms, one) for one in value]
    return value
