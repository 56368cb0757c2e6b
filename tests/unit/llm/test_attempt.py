from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from agent.llm.attempt import MAX_MESSAGE_CHARS, AttemptFailed, from_status, from_stream_error, retry_after_s, shown
from agent.llm.model import FailureKind as Kind

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def failed(status: int, text: str = "no", code: str = "", **headers: str) -> AttemptFailed:
    return from_status(status, {name.replace("_", "-"): v for name, v in headers.items()}, code, text, now=NOW)


@pytest.mark.parametrize(
    ("status", "kind", "again"),
    [
        (400, Kind.REFUSED, False), (401, Kind.REFUSED, False), (402, Kind.REFUSED, False), (403, Kind.REFUSED, False),
        (404, Kind.REFUSED, False), (405, Kind.REFUSED, False), (422, Kind.REFUSED, False),
        (408, Kind.UNREACHABLE, True), (409, Kind.UNREACHABLE, True), (429, Kind.RATE_LIMITED, True),
        (500, Kind.UNREACHABLE, True), (502, Kind.UNREACHABLE, True), (503, Kind.UNREACHABLE, True),
        (504, Kind.UNREACHABLE, True), (529, Kind.UNREACHABLE, True),
    ],
)  # fmt: skip
def test_status_decides_kind_and_retry(status: int, kind: Kind, again: bool) -> None:
    failure = failed(status)
    assert (failure.kind, failure.retryable) == (kind, again)
    assert str(status) in failure.message


@pytest.mark.parametrize(
    ("status", "code", "text"),
    [
        (400, "context_length_exceeded", "too long"),
        (400, "", "request (9001 tokens) exceeds the available context size (8192 tokens), try increasing it"),
        (400, "400 exceed_context_size_error", "x"),
        (400, "", "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens"),
        (400, "invalid_request_error", "prompt is too long: 210000 tokens > 200000 maximum"),
        (413, "", "Input is too long for requested model"),
        (400, "", "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576)."),
        (422, "", "Please reduce the length of the messages or completion."),
        (500, "", "context length exceeded"),
        (400, "", "Requested tokens (5000) exceed context window of 4096"),
    ],
)
def test_overflow_is_known_in_every_dialect(status: int, code: str, text: str) -> None:
    failure = failed(status, text, code)
    assert (failure.kind, failure.retryable) == (Kind.OVERFLOW, False)


def test_a_500_about_what_the_model_wrote_is_a_lost_reply_that_is_not_asked_for_again() -> None:
    failure = failed(500, "The model produced output that does not match the expected peg-native format")
    assert (failure.kind, failure.retryable) == (Kind.INCOMPLETE, False)


def test_a_500_that_repeats_is_refused_at_once() -> None:
    failure = failed(500, "Failed to parse grammar")
    assert (failure.kind, failure.retryable) == (Kind.REFUSED, False)
    assert not failed(503, "down", x_should_retry="false").retryable


def test_an_empty_account_is_no_rate_limit() -> None:
    failure = failed(429, "You exceeded your current quota", "insufficient_quota")
    assert (failure.kind, failure.retryable) == (Kind.REFUSED, False)
    assert "billing" in failure.message


def test_the_content_filter_is_told_apart() -> None:
    assert failed(400, "filtered", "content_filter").kind is Kind.FILTERED
    assert from_stream_error("content_filter", "x").kind is Kind.FILTERED


def test_refusals_say_what_to_do() -> None:
    assert "AGENT_LLM__API_KEY" in failed(401).message
    assert "base_url" in failed(404).message


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "0"}, 0.0),
        ({"retry-after-ms": "1500", "retry-after": "9"}, 1.5),
        ({"retry-after": format_datetime(NOW + timedelta(seconds=90), usegmt=True)}, 90.0),
        ({"retry-after": format_datetime(NOW - timedelta(days=3), usegmt=True)}, 0.0),
        ({"retry-after": "1000000"}, 1_000_000.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-5"}, None),
        ({"retry-after": "1e400"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "Wed, 99 Foo 2026"}, None),
        ({"retry-after": ""}, None),
        ({}, None),
    ],
)
def test_retry_after_in_seconds_as_a_date_or_garbage(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_s(headers, NOW) == seconds


def test_what_is_shown_is_one_bounded_line_without_keys_or_pages() -> None:
    assert (
        shown("Incorrect API key provided: sk-proj-abcdefghijklmnop. Bad\n  luck")
        == "Incorrect API key provided: [redacted]. Bad luck"
    )
    assert "abcdefgh" not in shown("Authorization: Bearer abcdefgh")
    assert len(shown("x" * 100_000)) < MAX_MESSAGE_CHARS + 10
    assert shown(" <!DOCTYPE html><p>secret</p>") == "a web page, not JSON"


@pytest.mark.parametrize(
    ("code", "text", "kind", "again"),
    [
        ("", "The engine is overloaded", Kind.UNREACHABLE, True),
        ("context_length_exceeded", "x", Kind.OVERFLOW, False),
        ("500", "output does not match the expected peg-native format", Kind.INCOMPLETE, False),
        ("500", "the chat template has no tools", Kind.REFUSED, False),
    ],
)
def test_an_error_inside_of_a_stream(code: str, text: str, kind: Kind, again: bool) -> None:
    failure = from_stream_error(code, text)
    assert (failure.kind, failure.retryable) == (kind, again)
