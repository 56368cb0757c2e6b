import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.llm.history import GO_ON, LOST, lint
from agent.llm.model import Message, ToolCall
from agent.llm.normalise import CALL_EXTRAS
from agent.llm.stream import is_object
from agent.llm.tool_names import valid_name


def said(*ids: str, text: str = "") -> Message:
    return Message("assistant", text, tuple(ToolCall(id_, "file_read", "{}") for id_ in ids))


def told(id_: str, text: str = "result") -> Message:
    return Message("tool", text, tool_call_id=id_)


USER = Message("user", "go")


def test_a_valid_history_is_returned_as_it_is() -> None:
    history = (Message("system", "s"), USER, said("a", "b"), told("a"), told("b"), Message("user", "and?"))
    assert lint(history).messages == history
    assert lint(history).mends == ()


def test_a_call_without_an_answer_is_answered_as_lost() -> None:
    assert lint((USER, said("a", "b"), told("b"))).messages[2:] == (told("a", LOST), told("b"))


def test_answers_without_a_call_and_second_answers_are_dropped() -> None:
    linted = lint((USER, told("x"), said("a"), told("a", "first"), told("a", "second"), told("z")))
    assert linted.messages == (USER, said("a"), told("a", "first"))


def test_what_stood_between_a_call_and_its_answer_comes_after_it() -> None:
    note = Message("user", "hurry")
    assert lint((USER, said("a"), note, told("a"))).messages == (USER, said("a"), told("a"), note)


def test_an_id_used_again_is_renamed_with_its_answer() -> None:
    linted = lint((USER, said("call_1"), told("call_1", "one"), said("call_1"), told("call_1", "two")))
    first, second = linted.messages[1].tool_calls[0].id, linted.messages[3].tool_calls[0].id
    assert first == "call_1"
    assert second != first
    assert [(m.tool_call_id, m.content) for m in linted.messages if m.role == "tool"] == [
        (first, "one"),
        (second, "two"),
    ]


def test_two_calls_of_one_message_with_one_id_keep_their_answers_in_order() -> None:
    linted = lint((USER, said("c", "c"), told("c", "one"), told("c", "two")))
    ids = [call.id for call in linted.messages[1].tool_calls]
    assert len(set(ids)) == 2
    assert [(m.tool_call_id, m.content) for m in linted.messages[2:]] == [(ids[0], "one"), (ids[1], "two")]


def test_fields_of_a_renamed_call_go_with_it() -> None:
    marked = Message("assistant", "", (ToolCall("c", "f", "{}"),), extra={CALL_EXTRAS: {"c": {"sig": 1}}})
    linted = lint((USER, marked, told("c"), marked, told("c")))
    renamed = linted.messages[3]
    assert renamed.extra[CALL_EXTRAS] == {renamed.tool_calls[0].id: {"sig": 1}}


def test_empty_messages_are_dropped_and_late_system_messages_become_the_users() -> None:
    linted = lint(
        (
            Message("system", "a"),
            Message("system", "b"),
            USER,
            Message("assistant"),
            Message("system", "late"),
            Message("user", " "),
        )
    )
    assert linted.messages == (Message("system", "a\n\nb"), USER, Message("user", "late"))


@pytest.mark.parametrize("history", [(), (Message("system", "s"),), (USER, Message("assistant", "done"))])
def test_the_last_word_is_never_the_assistants(history: tuple[Message, ...]) -> None:
    assert lint(history).messages[-1] == Message("user", GO_ON)


@pytest.mark.parametrize(
    ("name", "valid"),
    [("file_read", "file_read"), ("functions.run it!", "functions_run_it_"), ("", "unnamed"), ("é" * 90, "_" * 64)],
)
def test_names_become_valid(name: str, valid: str) -> None:
    assert valid_name(name) == valid


def test_past_arguments_that_are_no_object_are_shown_inside_one() -> None:
    broken = Message("assistant", "", (ToolCall("a", "f", '{"code": "pri'), ToolCall("b", "f", "")))
    calls = lint((USER, broken)).messages[1].tool_calls
    assert json.loads(calls[0].arguments) == {"not_valid_json": '{"code": "pri'}
    assert calls[1].arguments == "{}"


IDS = st.sampled_from(["", "a", "b", "a_2", "call"])
CALLS = st.lists(
    st.builds(ToolCall, IDS, st.sampled_from(["f", "a b", ""]), st.sampled_from(["{}", "", "{", '{"x": 1}'])),
    max_size=3,
)
TEXTS = st.sampled_from(["", " ", "text"])
MESSAGES = st.lists(
    st.builds(Message, st.sampled_from(["system", "user"]), TEXTS)
    | st.builds(lambda text, calls: Message("assistant", text, tuple(calls)), TEXTS, CALLS)
    | st.builds(lambda text, id_: Message("tool", text, tool_call_id=id_), TEXTS, IDS),
    max_size=14,
)


@given(MESSAGES)
def test_any_history_becomes_one_that_every_provider_takes(history: list[Message]) -> None:
    messages = lint(history).messages
    used: set[str] = set()
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        assert message.role != "system" or position == 1
        assert message.role != "tool"
        assert message.content.strip() or message.tool_calls
        for call in message.tool_calls:
            assert call.id
            assert call.id not in used
            used.add(call.id)
            assert valid_name(call.name) == call.name
            assert is_object(call.arguments)
            assert messages[position].role == "tool"
            assert messages[position].tool_call_id == call.id
            position += 1
    assert messages[-1].role in ("user", "tool")
    assert any(message.role == "user" for message in messages)


@given(MESSAGES)
def test_linting_twice_changes_nothing_more(history: list[Message]) -> None:
    once = lint(history)
    assert lint(once.messages) == type(once)(once.messages)
