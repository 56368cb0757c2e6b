"""Parts that are functions of their input: output bounds, keys, traces, log lines, settings of the command line."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolserver.api import strict_json
from toolserver.calls import failure, output
from toolserver.calls.answer import Answer, encode_body
from toolserver.calls.idempotency import canonical, request_hash
from toolserver.calls.outcome import ENDS, Outcome, empty_fields, from_worker
from toolserver.errors import CODES, Code, ToolServerError
from toolserver.telemetry.logs import EventFormatter, without
from toolserver.telemetry.metrics import Metrics
from toolserver.telemetry.trace import Trace, current_trace

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**300), 10**300)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), VALUES, max_size=5))
def test_every_json_object_that_python_writes_is_read_back(value: dict[str, Any]) -> None:
    assert strict_json.read_object(json.dumps(value).encode()) == value
    assert strict_json.read_object(json.dumps(value, ensure_ascii=False).encode()) == value


@given(st.binary(max_size=200))
def test_any_bytes_are_an_object_or_a_refusal(raw: bytes) -> None:
    try:
        value = strict_json.read_object(raw)
    except ToolServerError as error:
        refused = error
    else:
        assert isinstance(value, dict)
        return
    assert refused.code is Code.INVALID_ARGUMENTS
    encode_body(refused.detail("0" * 32))


def test_all_that_is_wrong_with_a_body_is_told_at_once() -> None:
    raw = b'{"a": NaN, "b": [1, 1e999, {"c/d~": "\\ud800"}], "e": 1, "e": 2}'
    with pytest.raises(ToolServerError) as caught:
        strict_json.read_object(raw)
    assert {e["pointer"] for e in caught.value.extra["errors"]} == {"/a", "/b/1", "/b/2/c~1d~0", "/e"}


def test_nesting_is_bounded_but_not_needlessly() -> None:
    assert strict_json.read_object(b'{"a":' + b"[" * 99 + b"]" * 99 + b"}")
    with pytest.raises(ToolServerError, match="nested"):
        strict_json.read_object(b'{"a":' + b"[" * 101 + b"]" * 101 + b"}")
    assert strict_json.read_object(json.dumps({"a": [[1], [2]] * 500}).encode())


def test_every_code_has_a_meaning_and_a_whole_detail() -> None:
    for code in Code:
        detail = ToolServerError(code, "what happened and what to do").detail("0" * 32)
        assert set(detail) >= {"code", "message", "fault", "retryable", "effects", "trace_id"}
        meaning = CODES[code]
        assert not (meaning.status in (401, 404, 409, 422) and (meaning.effects == "possible" or meaning.retryable))
        assert ("retry_after_s" in detail) == (meaning.retry_after_s is not None)


def test_every_end_of_a_worker_has_a_code() -> None:
    for end in ENDS - {"done"}:
        error = failure.refusal(Outcome(end, "", [], empty_fields()), "c")
        assert error is not None
        assert len(error.message) > 20
    assert failure.refusal(Outcome("done", "", [], empty_fields()), "c") is None


@pytest.mark.parametrize(
    "meta", [None, {}, {"toolcrib/outcome": 5}, {"toolcrib/outcome": {"end": "victory"}}, {"toolcrib/outcome": {}}]
)
def test_a_result_without_the_workers_word_is_foreign(meta: Any) -> None:
    assert from_worker({"content": [], "_meta": meta}) is None


@given(st.lists(st.text(max_size=400), max_size=6), st.integers(300, 900))
def test_bounded_text_stays_within_its_limit_and_tells_what_was_left_out(texts: list[str], limit: int) -> None:
    blocks = [{"type": "text", "text": text} for text in texts]
    shown, truncated = output.bound(blocks, limit)
    total = sum(len(text.encode("utf-8", "replace")) for text in texts)
    size = sum(len(block["text"].encode("utf-8", "replace")) for block in shown)
    assert size <= limit
    if total <= limit:
        assert (shown, truncated) == (blocks, None)
    else:
        assert truncated == {"bytes_total": total, "bytes_kept": size, "artifact": None}


def test_huge_binary_blocks_are_replaced_by_a_word() -> None:
    shown, truncated = output.bound([{"type": "image", "data": "x" * (5 << 20), "mimeType": "image/png"}], 1000)
    assert shown[0]["type"] == "text"
    assert truncated is not None
    assert truncated["bytes_kept"] == 0


def test_the_request_hash_sees_content_not_order() -> None:
    assert request_hash("s", "t", canonical({"a": 1, "b": 2}), None) == request_hash(
        "s", "t", canonical({"b": 2, "a": 1}), None
    )
    different = {
        request_hash("s", "t", canonical({"a": 1}), None),
        request_hash("s", "t", canonical({"a": "1"}), None),
        request_hash("s", "t", canonical({"a": True}), None),
    }
    assert len(different) == 3


def test_bodies_are_valid_utf8_whatever_a_tool_said() -> None:
    assert json.loads(Answer.of(200, {"a": "\ud800 ü"}).body) == {"a": "? ü"}


@pytest.mark.parametrize(
    "bad", [None, "", "garbage", "00-" + "0" * 32 + "-" + "1" * 16 + "-01", "ff-" + "1" * 32 + "-" + "1" * 16 + "-01"]
)
def test_a_trace_that_is_not_well_formed_is_replaced(bad: str | None) -> None:
    trace = Trace.of(bad, None)
    assert len(trace.trace_id) == 32
    assert trace.trace_id.strip("01")


def test_log_lines_carry_event_fields_and_trace() -> None:
    record = logging.LogRecord("toolserver.x", logging.INFO, "", 0, "call_done", None, None)
    record.fields = {"call_id": "c", "odd": "line\nbreak"}
    token = current_trace.set(Trace.of(None, None))
    try:
        entry = json.loads(EventFormatter(as_json=True).format(record))
        plain = EventFormatter(as_json=False).format(record)
    finally:
        current_trace.reset(token)
    assert (entry["event"], entry["call_id"], len(entry["trace_id"])) == ("call_done", "c", 32)
    assert "\n" not in plain
    assert 'call_id="c"' in plain


def test_histograms_are_cumulative() -> None:
    metrics = Metrics()
    metrics.histogram("h", "Help.")
    for seconds in (0.002, 0.3, 1000):
        metrics.observe("h", seconds)
    text = metrics.render()
    assert 'h_bucket{le="0.0025"} 1' in text
    assert 'h_bucket{le="0.5"} 2' in text
    assert 'h_bucket{le="+Inf"} 3' in text
    assert "h_count 3" in text


def test_values_of_the_environment_are_blotted_out_of_what_a_sandbox_said() -> None:
    told = "KEY=abcd1234 and abcd12345 at 1, in /x"
    assert without(["abcd1234", "abcd12345", "1", ""], told) == "KEY=[…] and […] at 1, in /x"
