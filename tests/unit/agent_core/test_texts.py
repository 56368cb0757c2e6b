"""Prompts, marks around data, keys, lessons and the working set."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.llm.model import Message, ToolCall
from agent.planning.plan import Plan
from agent.planning.task import TaskNode
from agent.roles.context import Room, plan_outline
from agent.roles.fence import fence
from agent.roles.prompt_file import places, render
from agent.roles.transcript import LEVELS, Transcript
from agent.trajectory.attempt import Attempt
from agent.trajectory.keys import StepKey, attempt_of
from agent.trajectory.printable import clip, printable
from agent.trajectory.step import Reflection
from agent.trajectory.working_memory import MAX_LESSONS, plan_lessons


def test_a_prompt_is_filled_once_and_its_values_are_not_read_as_places() -> None:
    names = [p.name.removesuffix(".md") for p in (files("agent.roles") / "prompts").iterdir() if p.name.endswith(".md")]
    assert len(names) == 14
    for name in names:
        text = render(name, **dict.fromkeys(places(name), "{{goal}} {{rule}}"))
        assert text.count("{{") == 2 * len(places(name)) or "{{" in text
    with pytest.raises(KeyError):
        render("summariser", goal="g")
    with pytest.raises(ValueError, match="no place for nonsense"):
        render("summariser_system", rule="r", nonsense="x")


@given(st.text())
def test_what_is_shown_to_people_has_no_control_characters(text: str) -> None:
    shown = printable(text)
    assert not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 for c in shown)
    assert printable(shown) == shown


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07after", "after"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]0;never closed\nnext line", "\nnext line"),
        ("50%\r100%\r\n", "50%\n100%\n"),
        ("a\u202eb\u2066c", "abc"),
        ("日本 é\tz", "日本 é\tz"),
    ],
)
def test_escapes_are_taken_out_and_text_stays(raw: str, shown: str) -> None:
    assert printable(raw) == shown


@given(st.text(max_size=300), st.integers(0, 100))
def test_a_clipped_text_keeps_head_and_tail(text: str, limit: int) -> None:
    short = clip(text, limit)
    if len(text) <= limit:
        assert short == text
    else:
        assert len(short) <= limit + 60
        assert f"{len(text) - limit} characters left out" in short
        assert short.startswith(text[: limit * 2 // 3])


@given(st.text(max_size=200))
def test_a_text_can_not_close_its_own_mark(text: str) -> None:
    lines = fence("label", text, 1000)
    mark = lines.split(" ")[1]
    assert lines.endswith(f"<<end {mark}>>")
    assert f"<<end {mark}>>" not in printable(text)


@pytest.mark.parametrize(
    "key", [StepKey("t1", 1, 3), StepKey("t2.1.3", 4, 15, 2), StepKey("t1", 1, 3, 0, 7), StepKey("t1", 1, 3, 5, 0)]
)
def test_keys_are_read_as_they_are_written(key: StepKey) -> None:
    written = key.request if key.call is None else key.of_call(key.call)
    assert StepKey.parse(written) == key
    assert attempt_of(written) == (key.task_id, key.attempt)


def test_other_keys_belong_to_no_step() -> None:
    for key in ("plan/generator/r0", "answer/summariser/r1", "t1/a1/critic/r0", "t1/a1/actor/s1/c0/again", ""):
        assert StepKey.parse(key) is None
    assert attempt_of("t1/a2/refiner/s1/r0") == ("t1", 2)
    assert attempt_of("plan/generator/r0") is None


def test_lessons_are_kept_once_and_the_newest_stay() -> None:
    attempts = [
        Attempt("t1", n, ended_at=float(n), reflection=Reflection("s", (f"lesson {n}", "always the same")))
        for n in range(20)
    ]
    lessons = plan_lessons(attempts)
    assert len(lessons) == MAX_LESSONS
    assert lessons[-1] == "always the same"
    assert lessons[-2] == "lesson 19"
    assert lessons.count("always the same") == 1


def transcript(exchanges: int, size: int) -> Transcript:
    made = Transcript()
    for n in range(exchanges):
        call = ToolCall(f"c{n}", "look", "{}")
        made.add(Message("assistant", f"thought {n}", (call,)), Message("tool", "x" * size, tool_call_id=call.id))
    return made


def test_each_level_of_the_working_set_is_shorter_and_the_last_is_bounded() -> None:
    for exchanges in (6, 30):
        sizes = [sum(len(m.content) for m in transcript(exchanges, 10_000).messages(level)) for level in range(LEVELS)]
        assert sizes == sorted(sizes, reverse=True)
        assert len(set(sizes)) == LEVELS
        assert sizes[-1] < 3000


def test_what_is_left_out_is_said_and_the_newest_stays() -> None:
    messages = transcript(6, 10).messages(3)
    assert messages[0].role == "user"
    assert "4 earlier exchanges" in messages[0].content
    assert "look (4 times)" in messages[0].content
    assert messages[-2].content == "thought 5"


def test_the_outline_shows_parts_below_their_whole() -> None:
    plan = Plan(
        {
            n.id: n
            for n in (TaskNode("t1", "a"), TaskNode("t2", "b", depends_on=("t1",)), TaskNode("t1.1", "c", parent="t1"))
        }
    )
    assert plan_outline(plan, Room()).splitlines() == [
        "- t1 [pending] a",
        "  - t1.1 [pending] c",
        "- t2 [pending] b (after t1)",
    ]


def test_what_the_model_itself_wrote_at_length_is_shortened_too_and_stays_valid() -> None:
    made = Transcript()
    for _ in range(3):
        call = ToolCall("c", "write", json.dumps({"text": "x" * 500_000}))
        made.add(
            Message("assistant", "y" * 2_000_000, (call,), extra={"reasoning_content": "z" * 90_000}),
            Message("tool", "ok", tool_call_id="c"),
        )
    said = [m for m in made.messages(LEVELS - 1) if m.role == "assistant"]
    assert len(said) == 2
    for message in said:
        assert len(message.content) < 3000
        assert len(message.extra["reasoning_content"]) < 3000
        assert (
            json.loads(message.tool_calls[0].arguments)["left_out"] == f"{len(call.arguments)} characters of arguments"
        )
    assert made.messages(0)[0].content == "y" * 2_000_000
