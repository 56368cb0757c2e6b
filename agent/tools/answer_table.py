"""What each answer of the ToolServer means to the handler. The one table of status and code -> outcome.

`next_move` says what the handler does, `mark` what the answer tells the breaker, `executed` whether the tool ran.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from agent.tools.outcome import OutcomeKind
from agent.toolserver_client.errors import ToolServerAnswer


class Move(Enum):
    TAKE = auto()  # the end of the call
    FOLLOW = auto()  # it runs on: wait for it under the same id
    RETRY = auto()  # nothing ran: send again, after a while
    ASK = auto()  # it may have run: ask for it by id
    REOPEN = auto()  # the session is gone: open another, then see what became of the call
    REFRESH = auto()  # the tool list is out of date
    RESOLVE = auto()  # the server can't tell how the call ended: by effect class


class Mark(Enum):
    """4xx, 429 and cancellation say nothing about the health of what runs tools; a tool's own failure shows it works."""

    WORKED = auto()
    FAILED_SERVER = auto()
    FAILED_TOOL = auto()
    NOTHING = auto()


@dataclass(frozen=True)
class Meaning:
    kind: OutcomeKind
    move: Move
    mark: Mark = Mark.NOTHING
    executed: str = "none"


_K, _M = OutcomeKind, Move

TABLE: dict[tuple[int, str], Meaning] = {
    (200, ""): Meaning(_K.DONE, _M.TAKE, Mark.WORKED, "yes"),
    (401, "unauthorized"): Meaning(_K.UNAVAILABLE, _M.TAKE),
    (403, "forbidden"): Meaning(_K.DENIED, _M.TAKE),
    (404, "tool_not_found"): Meaning(_K.UNKNOWN_TOOL, _M.REFRESH),
    (404, "session_not_found"): Meaning(_K.UNAVAILABLE, _M.REOPEN),
    (404, "call_not_found"): Meaning(_K.UNAVAILABLE, _M.RETRY),
    (404, "not_found"): Meaning(_K.UNAVAILABLE, _M.TAKE),
    (409, "idempotency_conflict"): Meaning(_K.UNKNOWN, _M.TAKE, executed="possible"),
    (410, "session_gone"): Meaning(_K.UNAVAILABLE, _M.REOPEN),
    (413, "too_large"): Meaning(_K.INVALID, _M.TAKE),
    (422, "invalid_arguments"): Meaning(_K.INVALID, _M.TAKE),
    (429, "quota_exceeded"): Meaning(_K.UNAVAILABLE, _M.RETRY),
    (450, "still_running"): Meaning(_K.TIMEOUT, _M.FOLLOW, Mark.WORKED, "possible"),
    (450, "deadline_exceeded"): Meaning(_K.TIMEOUT, _M.TAKE, Mark.WORKED, "yes"),
    (500, "tool_failed"): Meaning(_K.FAILED, _M.TAKE, Mark.WORKED, "yes"),
    (500, "tool_crashed"): Meaning(_K.FAILED, _M.TAKE, Mark.WORKED, "yes"),
    (500, "oom_killed"): Meaning(_K.FAILED, _M.TAKE, Mark.WORKED, "yes"),
    (500, "disk_full"): Meaning(_K.FAILED, _M.TAKE, Mark.WORKED, "yes"),
    (500, "policy_denied"): Meaning(_K.DENIED, _M.TAKE, Mark.WORKED),
    (500, "cancelled"): Meaning(_K.CANCELLED, _M.TAKE, executed="possible"),
    (500, "outcome_unknown"): Meaning(_K.UNKNOWN, _M.RESOLVE, executed="possible"),
    (500, "internal"): Meaning(_K.UNKNOWN, _M.ASK, Mark.FAILED_TOOL, "possible"),
    (503, "no_capacity"): Meaning(_K.UNAVAILABLE, _M.RETRY, Mark.FAILED_TOOL),
    (503, "runtime_unavailable"): Meaning(_K.UNAVAILABLE, _M.RETRY, Mark.FAILED_TOOL),
    (503, "starting"): Meaning(_K.UNAVAILABLE, _M.RETRY, Mark.FAILED_SERVER),
    (503, "draining"): Meaning(_K.UNAVAILABLE, _M.RETRY, Mark.FAILED_SERVER),
}


def meaning_of(answer: ToolServerAnswer) -> Meaning:
    """A code that this version does not know is read by its status; a 5xx may have run."""
    known = TABLE.get((answer.status, answer.code))
    if known is not None:
        return _by_effects(known, answer)
    if answer.status == 450:
        move = _M.FOLLOW if answer.detail.get("type") == "retry" else _M.TAKE
        return Meaning(_K.TIMEOUT, move, Mark.WORKED, "possible")
    if answer.status == 503:
        return Meaning(_K.UNAVAILABLE, _M.RETRY, Mark.FAILED_TOOL)
    if answer.status == 501:
        return Meaning(_K.UNAVAILABLE, _M.TAKE)
    if answer.status >= 500:
        return Meaning(_K.UNKNOWN, _M.ASK, Mark.FAILED_TOOL, "possible")
    if answer.status in (408, 425, 429):
        return Meaning(_K.UNAVAILABLE, _M.RETRY)
    return Meaning(_K.INVALID if answer.status in (400, 415, 422) else _K.UNAVAILABLE, _M.TAKE)


def _by_effects(known: Meaning, answer: ToolServerAnswer) -> Meaning:
    """Where the server says itself whether something may have happened, that is the word."""
    effects = answer.detail.get("effects")
    if (answer.status, answer.code) == (500, "policy_denied") and effects == "possible":
        return Meaning(known.kind, known.move, known.mark, "possible")
    if (answer.status, answer.code) == (500, "internal") and effects == "none":
        return Meaning(_K.UNAVAILABLE, _M.RETRY, known.mark)
    return known
