"""What one attempt at a reply can fail of, told apart by status, code and text; pure, without any HTTP library.

| answer | kind | tried again |
|---|---|---|
| no connection, 5xx, 408, 409 | unreachable | yes |
| 429 | rate_limited while Retry-After is beyond the cap, else unreachable | within the cap |
| silence beyond a deadline | timeout | yes |
| stream without finish reason, chunk that is no JSON | incomplete | yes |
| too long for the model, in any dialect | overflow | no |
| content filter | filtered | no |
| a 5xx about what the model wrote | incomplete | no |
| 400, 401, 403, 404, 422, other 4xx; no money; a 5xx that repeats for the same request | refused | no |
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from agent.llm.model import FailureKind, Usage

MAX_MESSAGE_CHARS = 600

_OVERFLOW = re.compile(
    r"context_length_exceeded|exceed_context_size|context_window_exceeded|maximum context length|context length (?:is |was )?exceeded"
    r"|exceeds? (?:the |its |this model's )?(?:available |maximum )?context(?: size| window| length)"
    r"|(?:prompt|input|request) (?:is |was )?too long|longer than the model's context|reduce the length of the (?:messages|prompt|input)"
    r"|input token count.{0,40}exceeds the maximum|max_model_len|(?:larger|greater) than the (?:maximum )?context"
    r"|when context the overflows|context overflow",
    re.IGNORECASE | re.DOTALL,
)
_FILTERED = re.compile(
    r"content_filter|content_policy_violation|ResponsibleAIPolicyViolation|content management policy|safety_violation",
    re.IGNORECASE,
)
# about the request: the same in each conversation
_DETERMINISTIC = re.compile(
    r"failed to parse (?:grammar|messages)|(?:jinja|chat) template|unsupported param", re.IGNORECASE
)
# about what the model wrote: the same request gets it again, the conversation with one more remark may not
_UNREADABLE = re.compile(
    r"does not match the expected .{0,60}format|failed to parse (?:tool call|input at pos)", re.IGNORECASE
)
_NO_MONEY = re.compile(
    r"insufficient_quota|insufficient balance|billing_hard_limit|credit balance is too low", re.IGNORECASE
)
_SECRETS = re.compile(r"\b(?:sk|gsk|xai|AIza|hf)[-_A-Za-z0-9*]{12,}|Bearer\s+\S+", re.IGNORECASE)
_TAGS = re.compile(r"\A\s*<(?:!doctype|html)", re.IGNORECASE)


class AttemptFailed(Exception):  # noqa: N818
    """One attempt gave no reply. `retry_after_s` is what the server asked for; `usage` what it may have cost."""

    def __init__(
        self,
        kind: FailureKind,
        message: str,
        *,
        retryable: bool,
        retry_after_s: float | None = None,
        usage: Usage | None = None,
    ) -> None:
        super().__init__(message)
        self.kind, self.message, self.retryable = kind, message, retryable
        self.retry_after_s, self.usage = retry_after_s, usage


def from_status(status: int, headers: Mapping[str, str], code: str, text: str, *, now: datetime) -> AttemptFailed:
    """An error answer. `text` is the server's message, `now` is for a Retry-After that is a date."""
    told = f"{code} {text}"
    said = f"the model's server answered {status}: {shown(text) or 'without a message'}"
    if _OVERFLOW.search(told) and status not in (401, 403, 429):
        return AttemptFailed(FailureKind.OVERFLOW, said, retryable=False)
    if status < 500 and _FILTERED.search(told):
        return AttemptFailed(FailureKind.FILTERED, said, retryable=False)
    if status == 429 and not _NO_MONEY.search(told):
        after = retry_after_s(headers, now)
        return AttemptFailed(FailureKind.RATE_LIMITED, said, retryable=True, retry_after_s=after)
    if status >= 500 and _UNREADABLE.search(told):
        return AttemptFailed(FailureKind.INCOMPLETE, said, retryable=False)
    stubborn = headers.get("x-should-retry", "").lower() == "false" or _DETERMINISTIC.search(told)
    if status in (408, 409) or (status >= 500 and not stubborn):
        return AttemptFailed(FailureKind.UNREACHABLE, said, retryable=True, retry_after_s=retry_after_s(headers, now))
    return AttemptFailed(FailureKind.REFUSED, f"{said}{_advice(status)}", retryable=False)


def from_stream_error(code: str, text: str) -> AttemptFailed:
    """An error object inside of a stream that had begun with 200."""
    told = f"{code} {text}"
    said = f"the model's server broke off: {shown(text)}"
    if _OVERFLOW.search(told):
        return AttemptFailed(FailureKind.OVERFLOW, said, retryable=False)
    if _FILTERED.search(told):
        return AttemptFailed(FailureKind.FILTERED, said, retryable=False)
    if _UNREADABLE.search(told):
        return AttemptFailed(FailureKind.INCOMPLETE, said, retryable=False)
    if _DETERMINISTIC.search(told) or _NO_MONEY.search(told):
        return AttemptFailed(FailureKind.REFUSED, said, retryable=False)
    return AttemptFailed(FailureKind.UNREACHABLE, said, retryable=True)


def incomplete(why: str) -> AttemptFailed:
    return AttemptFailed(FailureKind.INCOMPLETE, f"the model's reply is incomplete: {why}", retryable=True)


def timed_out(what: str, seconds: float) -> AttemptFailed:
    return AttemptFailed(FailureKind.TIMEOUT, f"{what} within {seconds:g} s", retryable=True)


def retry_after_s(headers: Mapping[str, str], now: datetime) -> float | None:
    """Seconds that the server asks for: `retry-after-ms`, seconds, or a date; None for nothing or garbage."""
    if (ms := _number(headers.get("retry-after-ms", ""))) is not None:
        return ms / 1000
    value = headers.get("retry-after", "").strip()
    if (seconds := _number(value)) is not None:
        return seconds
    try:
        at = parsedate_to_datetime(value)
    except (ValueError, TypeError, OverflowError):
        return None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return max((at - now).total_seconds(), 0.0)


def shown(text: str) -> str:
    """A server's message for people and logs: one line, bounded, without keys or web pages."""
    if _TAGS.match(text):
        return "a web page, not JSON"
    line = _SECRETS.sub("[redacted]", " ".join(text[: 4 * MAX_MESSAGE_CHARS].split()))
    return line if len(line) <= MAX_MESSAGE_CHARS else line[:MAX_MESSAGE_CHARS] + " …"


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\s*\d{1,12}(\.\d{1,9})?\s*", text) else None


def _advice(status: int) -> str:
    advice = {
        401: "check llm.api_key (AGENT_LLM__API_KEY or OPENAI_API_KEY)",
        402: "the account has no credit",
        403: "this key may not use the model",
        404: "check llm.base_url, which ends in /v1 for most servers, and llm.model",
        429: "the account has no credit left: check its plan and billing",
    }
    return f". To do: {advice[status]}" if status in advice else ""
