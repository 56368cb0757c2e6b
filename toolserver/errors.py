"""Every failure of the ToolServer, and what it is on the wire.

    ToolServerError                 carries code, message, call_id, extra fields for the body
     ├─ one per row of CODES        raised as ToolServerError(Code.X, ...)
    RuntimeUnavailable              the engine does not answer (a driver raises it) -> runtime_unavailable
     └─ ImageUnusable               an added image is not there or can't be started
    StoreUnavailable                the database can't be read or written now -> runtime_unavailable
     └─ JournalUnavailable          the calls journal can't be written now, so nothing is run
    SandboxGone                     a sandbox ended under a call (sandbox layer only, mapped by calls/)
    StartRefused                    the server must not start so; the command line explains it and exits 2

`CODES` is the one table of status, fault, retry advice and effects; nothing else in the package names a status for a code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

Fault = Literal["caller", "tool", "infra", "policy"]
Effects = Literal["none", "possible"]


class Code(StrEnum):
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"  # unknown routes
    METHOD_NOT_ALLOWED = "method_not_allowed"
    TOOL_NOT_FOUND = "tool_not_found"
    SESSION_NOT_FOUND = "session_not_found"
    CALL_NOT_FOUND = "call_not_found"
    FILE_NOT_FOUND = "file_not_found"
    SNAPSHOT_NOT_FOUND = "snapshot_not_found"
    NOT_IMPLEMENTED = "not_implemented"  # an endpoint of the contract that this version does not have yet
    IDEMPOTENCY_CONFLICT = "idempotency_conflict"
    SESSION_GONE = "session_gone"
    TOO_LARGE = "too_large"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    BAD_REQUEST = "bad_request"  # not HTTP that can be read
    REQUEST_TIMEOUT = "request_timeout"  # the request's header or body came too slowly
    HEADERS_TOO_LARGE = "headers_too_large"
    RANGE_NOT_SATISFIABLE = "range_not_satisfiable"
    INVALID_ARGUMENTS = "invalid_arguments"
    QUOTA_EXCEEDED = "quota_exceeded"
    STILL_RUNNING = "still_running"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    TOOL_FAILED = "tool_failed"
    TOOL_CRASHED = "tool_crashed"
    OOM_KILLED = "oom_killed"
    DISK_FULL = "disk_full"
    POLICY_DENIED = "policy_denied"
    CANCELLED = "cancelled"
    OUTCOME_UNKNOWN = "outcome_unknown"
    INTERNAL = "internal"
    NO_CAPACITY = "no_capacity"
    RUNTIME_UNAVAILABLE = "runtime_unavailable"
    STARTING = "starting"
    DRAINING = "draining"


@dataclass(frozen=True)
class Meaning:
    """What a code is on the wire. `retry_after_s` is the advice when the raiser gives none."""

    status: int
    fault: Fault
    retryable: bool = False
    effects: Effects = "none"
    retry_after_s: float | None = None


CODES: dict[Code, Meaning] = {
    Code.UNAUTHORIZED: Meaning(401, "caller"),
    Code.FORBIDDEN: Meaning(403, "policy"),
    Code.NOT_FOUND: Meaning(404, "caller"),
    Code.METHOD_NOT_ALLOWED: Meaning(405, "caller"),
    Code.TOOL_NOT_FOUND: Meaning(404, "caller"),
    Code.SESSION_NOT_FOUND: Meaning(404, "caller"),
    Code.CALL_NOT_FOUND: Meaning(404, "caller"),
    Code.FILE_NOT_FOUND: Meaning(404, "caller"),
    Code.SNAPSHOT_NOT_FOUND: Meaning(404, "caller"),
    Code.NOT_IMPLEMENTED: Meaning(501, "caller"),
    Code.IDEMPOTENCY_CONFLICT: Meaning(409, "caller"),
    Code.SESSION_GONE: Meaning(410, "infra"),
    Code.TOO_LARGE: Meaning(413, "caller"),
    Code.UNSUPPORTED_MEDIA_TYPE: Meaning(415, "caller"),
    Code.BAD_REQUEST: Meaning(400, "caller"),
    Code.REQUEST_TIMEOUT: Meaning(408, "caller", retryable=True),
    Code.HEADERS_TOO_LARGE: Meaning(431, "caller"),
    Code.RANGE_NOT_SATISFIABLE: Meaning(416, "caller"),
    Code.INVALID_ARGUMENTS: Meaning(422, "caller"),
    Code.QUOTA_EXCEEDED: Meaning(429, "policy", retryable=True, retry_after_s=5),
    Code.STILL_RUNNING: Meaning(450, "tool", retryable=True, effects="possible"),
    Code.DEADLINE_EXCEEDED: Meaning(450, "tool", effects="possible"),
    Code.TOOL_FAILED: Meaning(500, "tool", effects="possible"),
    Code.TOOL_CRASHED: Meaning(500, "tool", effects="possible"),
    Code.OOM_KILLED: Meaning(500, "tool", effects="possible"),
    Code.DISK_FULL: Meaning(500, "tool", effects="possible"),
    Code.POLICY_DENIED: Meaning(500, "policy"),
    Code.CANCELLED: Meaning(500, "caller", effects="possible"),
    Code.OUTCOME_UNKNOWN: Meaning(500, "infra", effects="possible"),
    Code.INTERNAL: Meaning(500, "infra", effects="possible"),
    Code.NO_CAPACITY: Meaning(503, "infra", retryable=True, retry_after_s=2),
    Code.RUNTIME_UNAVAILABLE: Meaning(503, "infra", retryable=True, retry_after_s=5),
    Code.STARTING: Meaning(503, "infra", retryable=True, retry_after_s=1),
    Code.DRAINING: Meaning(503, "infra", retryable=True, retry_after_s=5),
}


@dataclass
class ToolServerError(Exception):
    """A failure with its place in the contract.

    `message` says what happened and what to do, for a person or a model; it names no path of the host. `extra` goes
    into the body's detail beside the fixed fields (`errors`, `suggestions`, `cause`, `content`, ...). `effects` only where
    the raiser knows better than `CODES`, for example a session that went while a call ran in it.
    """

    code: Code
    message: str
    call_id: str | None = None
    retry_after_s: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    effects: Effects | None = None

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"

    @property
    def status(self) -> int:
        return CODES[self.code].status

    def detail(self, trace_id: str) -> dict[str, Any]:
        """The value of `detail` in the body."""
        meaning = CODES[self.code]
        detail: dict[str, Any] = {
            "code": str(self.code),
            "message": self.message,
            "fault": meaning.fault,
            "retryable": meaning.retryable,
            "effects": self.effects or meaning.effects,
            "trace_id": trace_id,
        }
        retry_after_s = self.retry_after_s if self.retry_after_s is not None else meaning.retry_after_s
        if retry_after_s is not None:
            detail["retry_after_s"] = retry_after_s
        if self.call_id is not None:
            detail["call_id"] = self.call_id
        return {**detail, **self.extra}


def invalid(pointer: str, message: str) -> ToolServerError:
    """A 422 with one error. `pointer` is a JSON Pointer into the body, or the name of a header, path or query part."""
    errors = [{"pointer": pointer, "message": message}]
    return invalid_all(errors)


def invalid_all(errors: list[dict[str, str]]) -> ToolServerError:
    """A 422 with all errors at once."""
    told = "; ".join(f"{e['pointer'] or 'the body'}: {e['message'].rstrip('. ')}" for e in errors[:5])
    more = f" (and {len(errors) - 5} more)" if len(errors) > 5 else ""
    message = f"Nothing was run, since the request is not valid: {told}{more}. Correct it and send it again."
    return ToolServerError(Code.INVALID_ARGUMENTS, message, extra={"errors": errors})


class RuntimeUnavailable(Exception):  # noqa: N818 - reads as the state it names
    """The sandbox runtime can't be used now: no engine, a hung engine, a missing image. The message says which and what to do."""


class RequirementMissing(RuntimeUnavailable):
    """The settings require something of the host that it does not have: nothing is started without it."""


class ImageUnusable(RuntimeUnavailable):
    """An added image can't be started: it is not there, or lacks what it needs. The message names paths inside it alone.

    `said`: the end of its stderr without its secrets, for the operator and never for a client.
    """

    def __init__(self, message: str, said: str = "") -> None:
        super().__init__(message)
        self.said = said


class SandboxGone(Exception):  # noqa: N818
    """The sandbox ended, or its stream broke, before an answer arrived."""


_HOST_PATH = re.compile(r"(?<![\w/:.])(?:\w+://)?/(?:[\w.@+-]+/)*[\w@+-]+(?:\.[\w@+-]+)*")


def runtime_unavailable(problem: RuntimeUnavailable, call_id: str | None = None) -> ToolServerError:
    """What a client is told: the operator's message without the paths of the host, which stand in the log."""
    told = (
        str(problem) if isinstance(problem, ImageUnusable) else _HOST_PATH.sub("(a path on the server)", str(problem))
    )
    return ToolServerError(Code.RUNTIME_UNAVAILABLE, f"Nothing was run: {told}", call_id)


class StoreUnavailable(Exception):  # noqa: N818
    """The database can't be read or written now: locked, full disk, I/O error. Nothing was changed."""


class JournalUnavailable(StoreUnavailable):
    """The calls journal can't be written now: full disk, I/O error. Nothing was begun, since nothing runs unjournalled."""


class StartRefused(Exception):  # noqa: N818
    """The server must not start like this. The message says why and what to do."""
