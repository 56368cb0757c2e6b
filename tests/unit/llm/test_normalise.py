import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.llm.model import Message, Request, ToolCall, ToolSpec
from agent.llm.normalise import CALL_EXTRAS, Normalised, normalise
from agent.llm.stream import Completion, RawCall
from agent.llm.text_calls import find_calls

TOOLS = (ToolSpec("python_execute", "", {"type": "object"}), ToolSpec("file_read", "", {"type": "object"}))
NAMES = frozenset(tool.name for tool in TOOLS)
CODE = {"code": "print(1)"}
CALL = json.dumps({"name": "python_execute", "arguments": CODE})


def normal(
    text: str = "", *calls: RawCall, finish: str = "stop", history: tuple[Message, ...] = (), tools: Any = TOOLS
) -> Normalised:
    request = Request("actor", (Message("user", "go"), *history), tools)
    return normalise(Completion(text, list(calls), finish), request)


def test_calls_decide_the_finish_reason_not_what_the_server_says() -> None:
    assert normal("", RawCall(0, "c", "python_execute", "{}"), finish="stop").finish_reason == "tool_calls"
    assert normal("done", finish="tool_calls").finish_reason == "stop"
    assert normal("done", finish="eos_token").finish_reason == "stop"
    assert normal("done", finish="max_tokens").finish_reason == "length"
    assert normal("done", finish="SAFETY").finish_reason == "content_filter"


def test_missing_and_repeated_ids_are_replaced_by_unique_ones() -> None:
    found = normal(
        "", *(RawCall(None, id_, "python_execute", f'{{"n": {n}}}') for n, id_ in enumerate(["", "", "c", "c"]))
    )
    ids = [call.id for call in found.tool_calls]
    assert len(set(ids)) == 4
    assert all(ids)
    assert "c" in ids
    assert [json.loads(call.arguments)["n"] for call in found.tool_calls] == [0, 1, 2, 3]
    assert len(found.notes) == 3


def test_an_id_of_an_earlier_turn_is_not_used_again() -> None:
    history = (
        Message("assistant", "", (ToolCall("call_1", "file_read", "{}"),)),
        Message("tool", "x", tool_call_id="call_1"),
    )
    found = normal("", RawCall(0, "call_1", "python_execute", "{}"), history=history)
    assert found.tool_calls[0].id != "call_1"


def test_a_call_cut_by_the_token_limit_is_no_call_but_whole_ones_stay() -> None:
    found = normal(
        "",
        RawCall(0, "a", "file_read", '{"path": "x"}'),
        RawCall(1, "b", "python_execute", '{"code": "pri'),
        finish="length",
    )
    assert [call.id for call in found.tool_calls] == ["a"]
    assert found.finish_reason == "length"
    assert "cut" in found.notes[0]
    assert normal("", RawCall(0, "a", "file_read", ""), finish="length").tool_calls == ()


def test_broken_arguments_that_were_not_cut_are_handed_on_untouched() -> None:
    assert normal("", RawCall(0, "a", "file_read", '{"path": ')).tool_calls[0].arguments == '{"path": '


def test_a_call_without_a_name_is_dropped_and_noted() -> None:
    found = normal("text", RawCall(0, "a", " ", "{}"))
    assert found.tool_calls == ()
    assert found.notes


def test_fields_of_single_calls_are_kept_by_id() -> None:
    found = normal("", RawCall(0, "a", "file_read", "{}", {"extra_content": 1}))
    assert found.extra == {CALL_EXTRAS: {"a": {"extra_content": 1}}}


def test_an_empty_reply_is_noted() -> None:
    assert "empty" in normal(" \n").notes[0]


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>\n{CALL}\n</tool_call>",
        f"<tool_call>{CALL}",
        f"I run it. <tool_call>```json\n{CALL}\n```</tool_call> Then we see.",
        f"<function_call>{CALL}</function_call>",
        f"```json\n{CALL}\n```",
        f"Sure:\n```\n{CALL}\n```\nDone.",
        CALL,
        f"[{CALL}]",
        json.dumps({"name": "python_execute", "parameters": CODE}),
        json.dumps({"type": "function", "function": {"name": "python_execute", "arguments": json.dumps(CODE)}}),
        f"[TOOL_CALLS][{CALL}]",
        f"<|python_tag|>{json.dumps({'name': 'python_execute', 'parameters': CODE})}",
        "<tool_call>\n<function=python_execute>\n<parameter=code>\nprint(1)\n</parameter>\n</function>\n</tool_call>",
        '<function=python_execute>{"code": "print(1)"}</function>',
        "<tool_call>python_execute\n<arg_key>code</arg_key>\n<arg_value>print(1)</arg_value>\n</tool_call>",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>python_execute\n```json\n{"code": "print(1)"}\n```<｜tool▁call▁end｜>',
        '<|tool_call_begin|>functions.python_execute:0<|tool_call_argument_begin|>{"code": "print(1)"}<|tool_call_end|>',
        f"<think>I could write <tool_call>{{}}</tool_call></think><tool_call>{CALL}</tool_call>",
    ],
)
def test_a_call_written_as_text_is_a_call(text: str) -> None:
    found = normal(text)
    assert [(call.name, json.loads(call.arguments)) for call in found.tool_calls] == [("python_execute", CODE)]
    assert found.finish_reason == "tool_calls"
    assert CALL not in found.text
    assert any("written as text" in note for note in found.notes)


def test_several_text_calls_keep_their_order_and_the_prose_around_them() -> None:
    other = json.dumps({"name": "file_read", "arguments": {"path": "a"}})
    found = normal(f"First.\n<tool_call>{CALL}</tool_call>\n<tool_call>{other}</tool_call>\nThen.")
    assert [call.name for call in found.tool_calls] == ["python_execute", "file_read"]
    assert found.text.split() == ["First.", "Then."]


def test_a_marked_call_of_an_unknown_tool_is_a_call_so_that_it_can_be_answered() -> None:
    assert normal('<tool_call>{"name": "nope", "arguments": {}}</tool_call>').tool_calls[0].name == "nope"


@pytest.mark.parametrize(
    "text",
    [
        "Call python_execute with code print(1).",
        'python_execute(code="print(1)")',
        json.dumps({"name": "Ada", "arguments": {"a": 1}}),
        '```json\n{"name": "unknown_tool", "arguments": {}}\n```',
        '```json\n{"rows": 3}\n```',
        f"<tool_call>{CALL[:-9]}</tool_call>",
        "<tool_call>{}</tool_call>",
        f"<think>Perhaps <tool_call>{CALL}</tool_call>? No.</think> The answer is 4.",
        json.dumps({"name": "python_execute"}),
        "< tool_call >",
    ],
)
def test_what_is_not_certainly_a_call_stays_text(text: str) -> None:
    found = normal(text)
    assert found.tool_calls == ()
    assert found.text == text
    assert found.finish_reason == "stop"


def test_without_offered_tools_text_stays_text() -> None:
    assert normal(f"<tool_call>{CALL}</tool_call>", tools=()).tool_calls == ()


@given(st.text(alphabet='<tool_cal>/{}[]":,` \nfunction=', max_size=200))
def test_text_of_any_shape_never_raises(text: str) -> None:
    calls, rest = find_calls(text, NAMES)
    assert calls or rest == text


def test_two_million_characters_are_not_searched() -> None:
    assert find_calls("<tool_call>{" * 200_000, NAMES)[0] == []


@pytest.mark.parametrize(
    "piece",
    ["<tool_call>{", "<function=a>", "```json\n{", "<think>", "<｜tool▁call▁begin｜>a", "<tool_call>a\n<arg_key>"],
)
def test_marks_without_an_end_are_read_in_bounded_time(piece: str) -> None:
    started = time.process_time()
    find_calls(piece * (900_000 // len(piece)), NAMES)
    find_calls(piece + " " * 900_000, NAMES)
    assert time.process_time() - started < 10
