"""The body of a request, and how it changes when a server refuses a field."""

import json
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.llm.dialect import Dialect, adapt
from agent.llm.model import Message, Request, ToolCall, ToolSpec
from agent.llm.normalise import CALL_EXTRAS
from agent.llm.wire import clean, extra_fields, payload

TOOL = ToolSpec("file_read", "Read.", {"type": "object", "properties": {"path": {"type": "string", "default": None}}})
CALLED = Message(
    "assistant",
    "",
    (ToolCall("c", "file_read", "{}"),),
    extra={"reasoning_content": "hm", CALL_EXTRAS: {"c": {"extra_content": {"sig": "s"}}}},
)
REQUEST = Request(
    "actor", (Message("user", "go"), CALLED, Message("tool", "x", tool_call_id="c")), (TOOL,), "required", 100, 0.5
)


def nulls(value: Any) -> bool:
    if isinstance(value, dict):
        return any(item is None or nulls(item) for item in value.values())
    return isinstance(value, list) and any(nulls(item) for item in value)


def body(request: Request = REQUEST, **dialect: Any) -> dict[str, Any]:
    return payload(request, request.messages, "m", Dialect(**dialect))


def test_no_null_is_on_the_wire() -> None:
    assert not nulls(body())
    assert not nulls(body(Request("actor", (Message("user", ""), Message("assistant", "x", extra={"a": None})))))


def test_the_body_of_a_request() -> None:
    sent = body()
    assert (sent["model"], sent["max_tokens"], sent["temperature"], sent["tool_choice"]) == ("m", 100, 0.5, "required")
    assert (sent["stream"], sent["stream_options"]) == (True, {"include_usage": True})
    assert sent["tools"][0]["function"]["name"] == "file_read"
    assert sent["messages"][2] == {"role": "tool", "content": "x", "tool_call_id": "c"}


def test_provider_fields_are_sent_back_where_they_came_from() -> None:
    message = body()["messages"][1]
    assert message["reasoning_content"] == "hm"
    assert message["tool_calls"][0]["extra_content"] == {"sig": "s"}
    assert CALL_EXTRAS not in message
    assert extra_fields(REQUEST.messages) == {"reasoning_content", "extra_content"}
    silent = body(echo_extra=False)["messages"][1]
    assert "reasoning_content" not in silent
    assert "extra_content" not in silent["tool_calls"][0]


def test_provider_fields_never_replace_ours() -> None:
    message = Message("assistant", "text", extra={"content": "other", "role": "system"})
    assert body(Request("r", (message,)))["messages"][0] == {"role": "assistant", "content": "text"}


def test_what_is_left_out_when_nothing_asks_for_it() -> None:
    sent = body(Request("actor", (Message("user", "go"),)))
    assert not {"tools", "tool_choice", "temperature"} & sent.keys()
    plain = body(streaming=False, required_choice=False, temperature=False, max_tokens_field="max_completion_tokens")
    assert not {"stream", "stream_options", "tool_choice", "temperature", "max_tokens"} & plain.keys()
    assert plain["max_completion_tokens"] == 100


@given(
    st.recursive(
        st.text() | st.floats() | st.none() | st.integers(),
        lambda s: st.lists(s) | st.dictionaries(st.text(), s),
        max_leaves=8,
    )
)
def test_everything_becomes_strict_json_in_utf8(value: Any) -> None:
    json.dumps(clean({"v": value, "s": "\ud800"}), ensure_ascii=False, allow_nan=False).encode()


@pytest.mark.parametrize(
    ("message", "changed"),
    [
        ("Unknown parameter: 'stream_options'", "stream_options"),
        ("extra fields not permitted: stream_options.include_usage", "stream_options"),
        ("'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.", "max_tokens_field"),
        ("Unsupported value: 'temperature' does not support 0.5", "temperature"),
        ("This model does not support this tool_choice", "required_choice"),
        ("property 'reasoning_content' is unsupported", "echo_extra"),
        ("Streaming is not supported by this server", "streaming"),
    ],
)
def test_a_refused_field_is_given_up_once(message: str, changed: str) -> None:
    sent = frozenset({"reasoning_content"})
    adapted = adapt(Dialect(), message, sent)
    assert adapted is not None
    assert [f.name for f in fields(Dialect) if getattr(adapted, f.name) != getattr(Dialect(), f.name)] == [changed]


@given(
    st.lists(
        st.sampled_from(
            ["stream_options", "max_completion_tokens", "temperature", "tool_choice", "reasoning_content", "stream"]
        )
    )
)
def test_adapting_ends(complaints: list[str]) -> None:
    dialect, changes = Dialect(), 0
    for complaint in complaints * 3:
        adapted = adapt(dialect, f"{complaint} is not supported", frozenset({"reasoning_content"}))
        if adapted is not None:
            dialect, changes = adapted, changes + 1
    assert changes <= len(fields(Dialect))


@pytest.mark.parametrize(
    "message", ["Invalid value: 'messages[0]'", "the stream of consciousness", "max_tokens: 5000 is too large", ""]
)
def test_other_complaints_change_nothing(message: str) -> None:
    assert adapt(Dialect(), message, frozenset()) is None
