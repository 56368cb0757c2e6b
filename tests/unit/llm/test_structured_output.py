from typing import Any

import pytest
from referencing.exceptions import Unresolvable

from agent.llm.history import lint
from agent.llm.model import Message, Reply, ToolCall, ToolSpec, Usage
from agent.llm.structured_output import (
    MAX_ERRORS,
    Answer,
    Problem,
    corrective_messages,
    parse_reply,
    schema_errors,
)

PLAN = ToolSpec(
    "submit_plan",
    "Hand in the plan.",
    {
        "type": "object",
        "properties": {
            "tasks": {"type": "array", "minItems": 1, "items": {"type": "string"}},
            "note": {"type": "string"},
        },
        "required": ["tasks"],
        "additionalProperties": False,
    },
)
GOOD = '{"tasks": ["load", "plot"]}'


def reply(text: str = "", *calls: tuple[str, str], finish: Any = "stop") -> Reply:
    made = tuple(ToolCall(f"c{number}", name, arguments) for number, (name, arguments) in enumerate(calls))
    return Reply(text, made, finish, Usage(1, 1), "m")


@pytest.mark.parametrize(
    "given",
    [
        reply("", ("submit_plan", GOOD)),
        reply("Here it is.", ("other", "{}"), ("submit_plan", GOOD)),
        reply(GOOD),
        reply(f"The plan:\n```json\n{GOOD}\n```\nGood luck!"),
        reply(f"The plan is {GOOD} as you wished."),
        reply("", ("submit_plan", "{'tasks': ['load', 'plot'],}")),
        reply("", ("submit_plan", f"```json\n{GOOD}\n```")),
    ],
)
def test_an_answer_is_found_in_a_call_or_in_the_text(given: Reply) -> None:
    answer = parse_reply(given, PLAN)
    assert isinstance(answer, Answer)
    assert answer.value == {"tasks": ["load", "plot"]}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (reply("", ("submit_plan", '{"tasks": [], "x": 1}')), ["/tasks", "'x'"]),
        (reply("", ("submit_plan", '{"tasks": [1, "a", 2]}')), ["/tasks/0", "/tasks/2"]),
        (reply("", ("submit_plan", '{"tasks": [')), ["no valid JSON"]),
        (reply("", ("submit_plan", "")), ["'tasks' is a required property"]),
        (reply("", ("make_plan", GOOD)), ["make_plan", "submit_plan"]),
        (reply("I would rather talk."), ["submit_plan"]),
        (reply('{"a": 1} or {"b": 2}'), ["submit_plan"]),
        (reply('{"tasks": ["lo', finish="length"), ["cut", "shorter"]),
        (reply(), ["submit_plan"]),
    ],
)
def test_a_problem_names_what_is_wrong(given: Reply, words: list[str]) -> None:
    problem = parse_reply(given, PLAN)
    assert isinstance(problem, Problem)
    for word in words:
        assert word in problem.message


@pytest.mark.parametrize(
    "given",
    [
        reply("", ("submit_plan", "{"), ("submit_plan", GOOD)),
        reply("words"),
        reply(),
        reply("", ("make_plan", GOOD), ("other", "{}")),
    ],
)
def test_the_corrective_turn_is_a_valid_history(given: Reply) -> None:
    problem = parse_reply(given, PLAN)
    assert isinstance(problem, Problem)
    turn = corrective_messages(given, problem, PLAN)
    history = (Message("user", "plan"), *turn)
    mends = [mend for mend in lint(history).mends if "no JSON object" not in mend]
    assert mends == []
    assert problem.message in "".join(message.content for message in turn)


def test_errors_are_bounded_and_a_recursive_schema_is_survived() -> None:
    assert len(schema_errors([1] * 1000, {"items": {"type": "string"}})) == MAX_ERRORS
    deep: Any = []
    for _ in range(3000):
        deep = [deep]
    assert "nested" in schema_errors(deep, {"items": {"$ref": "#"}})[0]


def test_a_remote_reference_is_never_fetched() -> None:
    with pytest.raises(Unresolvable):
        schema_errors({}, {"$ref": "http://127.0.0.1:1/schema.json"})


def test_two_million_characters_of_text_are_no_answer() -> None:
    assert isinstance(parse_reply(reply("{" * 2_000_000), PLAN), Problem)
    assert isinstance(parse_reply(reply("All work and no play { " * 90_000), PLAN), Problem)
