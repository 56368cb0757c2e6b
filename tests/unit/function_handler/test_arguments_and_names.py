"""Nothing that was guessed ever runs: unknown names, broken arguments and refused ones are answered, not sent."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.events import EventKind
from agent.tools.arguments import Refused, read_arguments, schema_errors
from agent.tools.call_id import call_id_of
from agent.tools.outcome import OutcomeKind, ToolInfo
from tests.unit.function_handler.conftest import Agent
from tests.unit.function_handler.fake_toolserver import FakeToolServer


def tool(**schema: Any) -> ToolInfo:
    return ToolInfo("t", "a tool", {"type": "object", **schema})


@pytest.mark.parametrize(("wrong", "meant"), [("notes", "note"), ("Note", "note"), ("nota", "note"), ("pek", "peek")])
async def test_an_unknown_name_is_answered_with_the_nearest_and_never_redirected(
    agent: Agent, server: FakeToolServer, wrong: str, meant: str
) -> None:
    outcome = await agent.call(wrong)
    assert (outcome.kind, outcome.code, outcome.executed) == (OutcomeKind.UNKNOWN_TOOL, "tool_not_found", "none")
    assert f"Did you mean {meant}" in outcome.observation
    assert "note, peek, put" in outcome.observation
    assert server.effects == []
    assert server.sent("POST") == []
    assert agent.allowance.reserved == 0


async def test_a_tool_that_appeared_since_is_found(agent: Agent, server: FakeToolServer) -> None:
    await agent.handler.catalog()
    server.add_tool("young")
    assert (await agent.call("young")).ok


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "invalid_json"),
        ('{"text": "a"', "invalid_json"),
        ('{"text": NaN}', "invalid_json"),
        ('{"text": "\\ud800"}', "invalid_json"),
        ("[1]", "invalid_json"),
        ("run it please", "invalid_json"),
        ('{"text": 5}', "invalid_arguments"),
        ('{"text": "a", "bogus": 1}', "invalid_arguments"),
        ('{"number": 1.5, "seconds": "x"}', "invalid_arguments"),
        ("[" * 100_000, "invalid_json"),
        ('{"number": 1e999}', "invalid_json"),
    ],
)
async def test_broken_or_wrong_arguments_are_never_sent(
    agent: Agent, server: FakeToolServer, text: str, code: str
) -> None:
    outcome = await agent.call(arguments=text)
    assert (outcome.kind, outcome.code, outcome.executed) == (OutcomeKind.INVALID, code, "none")
    assert server.effects == []
    assert server.sent("POST") == []
    assert agent.of(EventKind.TOOL_SETTLED)
    assert len(outcome.observation) < 12_000


async def test_the_refusal_names_all_errors_and_shows_the_schema(agent: Agent) -> None:
    text = (await agent.call(arguments='{"text": 5, "number": "x"}')).observation
    assert "/text: 5 is not of type 'string'" in text
    assert "/number: 'x' is not of type 'integer'" in text
    assert '"additionalProperties": false' in text


@pytest.mark.parametrize("text", ["", "  ", "null", "{}"])
def test_no_arguments_is_an_empty_object(text: str) -> None:
    assert not isinstance(read_arguments(text, tool()), Refused)
    missing = read_arguments(text, tool(required=["code"], properties={"code": {}}))
    assert isinstance(missing, Refused)
    assert "'code' is a required property" in missing.message


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"$ref": "http://127.0.0.1:9/remote.json"}}},
        {"properties": {"a": {"$ref": "#/$defs/nowhere"}}},
        {"properties": {"a": {"$ref": "#/properties/a"}}},
        {"type": "no-such-type"},
    ],
)
def test_a_schema_that_can_not_be_used_leaves_the_word_to_the_server(schema: dict[str, Any]) -> None:
    assert schema_errors({"a": 1}, schema) == []


def test_many_errors_of_great_length_stay_short() -> None:
    wrong = {f"k{n}": "x" * 10_000 for n in range(100)}
    refused = read_arguments(
        json.dumps(wrong), tool(additionalProperties={"type": "integer"}, description="y" * 50_000)
    )
    assert isinstance(refused, Refused)
    assert len(refused.message) < 9_000


async def test_a_call_that_is_not_permitted_is_denied_with_the_reason(server: FakeToolServer, tmp_path: Path) -> None:
    agent = Agent(
        server,
        tmp_path,
        options={"permission": lambda _call, tool, _arguments: "not in this task" if tool.effect == "once" else None},
    )
    outcome = await agent.call()
    assert (outcome.kind, outcome.code) == (OutcomeKind.DENIED, "not_permitted")
    assert "not in this task" in outcome.observation
    assert server.effects == []
    assert (await agent.call("peek", key="t1/a1/actor/s2/c0")).ok


@given(st.text(max_size=200), st.text(max_size=200), st.integers(0, 1))
def test_a_call_id_is_stable_allowed_and_short(run_id: str, key: str, attempt: int) -> None:
    call_id = call_id_of(run_id, key, attempt)
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,128}", call_id)
    assert call_id == call_id_of(run_id, key, attempt)
    assert call_id != call_id_of(run_id, key, 1 - attempt)
    assert call_id != call_id_of(run_id + "x", key, attempt)
    assert call_id != call_id_of(run_id, key + "x", attempt)


def test_run_and_key_are_not_mixed_up() -> None:
    assert call_id_of("ab", "c") != call_id_of("a", "bc")
