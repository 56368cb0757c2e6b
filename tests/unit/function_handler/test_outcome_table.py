"""Every row of the contract's table, as a real HTTP answer to a call, becomes the outcome that the design names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agent.events import EventKind
from agent.tools.answer_table import TABLE, Mark, Move, meaning_of
from agent.tools.outcome import Outcome, OutcomeKind
from agent.toolserver_client.errors import ToolServerAnswer
from tests.unit.function_handler.conftest import Agent
from tests.unit.function_handler.fake_toolserver import FakeToolServer, Reply, refusal

POST = ("POST", "/tools/")
K = OutcomeKind

FINAL = [
    (401, "unauthorized", K.UNAVAILABLE, "none"),
    (403, "forbidden", K.DENIED, "none"),
    (404, "not_found", K.UNAVAILABLE, "none"),
    (404, "tool_not_found", K.UNKNOWN_TOOL, "none"),
    (409, "idempotency_conflict", K.UNKNOWN, "possible"),
    (413, "too_large", K.INVALID, "none"),
    (422, "invalid_arguments", K.INVALID, "none"),
    (450, "deadline_exceeded", K.TIMEOUT, "yes"),
    (500, "tool_failed", K.FAILED, "yes"),
    (500, "tool_crashed", K.FAILED, "yes"),
    (500, "oom_killed", K.FAILED, "yes"),
    (500, "disk_full", K.FAILED, "yes"),
    (500, "policy_denied", K.DENIED, "none"),
    (500, "cancelled", K.CANCELLED, "possible"),
    (500, "outcome_unknown", K.UNKNOWN, "possible"),
    (501, "not_implemented", K.UNAVAILABLE, "none"),
    (418, "from_the_future", K.UNAVAILABLE, "none"),
]


@pytest.mark.parametrize(("status", "code", "kind", "executed"), FINAL)
async def test_an_answer_that_ends_the_call(
    agent: Agent, server: FakeToolServer, status: int, code: str, kind: OutcomeKind, executed: str
) -> None:
    server.answer_with(*POST, refusal(status, code, "what happened and what to do"))
    outcome = await agent.call()
    assert (outcome.kind, outcome.executed, outcome.code) == (kind, executed, code)
    assert len(server.sent(*POST)) == 1, "none of these is sent again"
    assert agent.of(EventKind.TOOL_SETTLED)[0]["outcome"] == outcome.as_json()
    assert Outcome.from_json(outcome.as_json()) == outcome
    assert len(outcome.observation) > 20


@pytest.mark.parametrize(
    "status_code",
    [
        (503, "no_capacity"),
        (503, "runtime_unavailable"),
        (503, "starting"),
        (503, "draining"),
        (429, "quota_exceeded"),
        (503, "new_reason"),
    ],
)
async def test_an_answer_after_which_the_same_call_is_sent_again(
    agent: Agent, server: FakeToolServer, status_code: tuple[int, str]
) -> None:
    server.answer_with(*POST, refusal(*status_code), refusal(*status_code))
    assert (await agent.call()).kind is K.DONE
    ids = [request.headers["idempotency-key"] for request in server.sent(*POST)]
    assert len(ids) == 3
    assert len(set(ids)) == 1
    assert len(server.effects) == 1


@pytest.mark.parametrize("status_code", [(503, "no_capacity"), (429, "quota_exceeded")])
async def test_a_server_that_stays_without_room_is_unavailable(
    agent: Agent, server: FakeToolServer, status_code: tuple[int, str]
) -> None:
    server.answer_with(*POST, *[refusal(*status_code, retry_after_s=2)] * 20)
    outcome = await agent.call()
    assert (outcome.kind, outcome.code, outcome.executed) == (K.UNAVAILABLE, status_code[1], "none")
    assert len(server.sent(*POST)) == agent.settings.max_attempts
    assert "Nothing was run" in outcome.observation
    assert "2 s" in outcome.observation


async def test_an_internal_error_is_asked_about_before_anything_else(agent: Agent, server: FakeToolServer) -> None:
    server.fault(*POST, "drop_after")
    server.answer_with("GET", "/v1/calls/", refusal(500, "internal", effects="possible"))
    assert (await agent.call()).kind is K.DONE
    assert len(server.effects) == 1
    assert len(server.sent("GET", "/v1/calls/")) == 2


async def test_an_internal_error_that_is_the_stored_end_of_the_call_is_unknown(
    agent: Agent, server: FakeToolServer
) -> None:
    async def broken(_session: str, _arguments: object) -> tuple[int, dict[str, object]]:
        return 500, {"code": "internal", "effects": "possible"}

    server.behaviours["note"] = broken
    outcome = await agent.call()
    assert (outcome.kind, outcome.code) == (K.UNKNOWN, "internal")
    assert len(server.effects) == 1


async def test_a_tool_that_is_gone_makes_the_list_be_fetched_again(agent: Agent, server: FakeToolServer) -> None:
    await agent.call("peek")
    del server.tools["note"]
    server.add_tool("note_2")
    outcome = await agent.call("note", key="t1/a1/actor/s2/c0")
    assert outcome.kind is K.UNKNOWN_TOOL
    assert "note_2" in outcome.observation
    assert [tool.name for tool in await agent.handler.catalog()] == ["peek", "put", "note_2"]


async def test_a_wrong_key_names_the_setting_and_the_list_is_fetched_anew(agent: Agent, server: FakeToolServer) -> None:
    await agent.call("peek")
    server.key = "another-key"
    outcome = await agent.call(key="t1/a1/actor/s2/c0")
    assert (outcome.kind, outcome.code) == (K.UNAVAILABLE, "unauthorized")
    assert "AGENT_TOOLSERVER__API_KEY" in outcome.observation
    assert "secret-key" not in outcome.observation
    server.key = agent.key
    server.requests.clear()
    assert (await agent.call(key="t1/a1/actor/s3/c0")).kind is K.DONE
    assert server.sent("GET", "/v1/tools")


async def test_a_failure_brings_the_output_code_fault_and_advice(agent: Agent, server: FakeToolServer) -> None:
    content = [{"type": "text", "text": "Traceback: ValueError no"}]
    server.answer_with(*POST, refusal(500, "tool_failed", "exit code 3", content=content, exit_code=3, fault="tool"))
    outcome = await agent.call()
    for part in (
        "The tool ran and failed (tool_failed)",
        "exit code 3",
        "Fault: tool",
        "Traceback: ValueError no",
        "change the call",
    ):
        assert part in outcome.observation


async def test_all_errors_of_a_422_are_shown_with_their_pointers(agent: Agent, server: FakeToolServer) -> None:
    errors = [
        {"pointer": "/arguments/text", "message": "must not be empty"},
        {"pointer": "/arguments/x", "message": "is unknown"},
    ]
    server.answer_with(*POST, refusal(422, "invalid_arguments", "2 errors", errors=errors))
    text = (await agent.call()).observation
    assert "/arguments/text: must not be empty" in text
    assert "/arguments/x: is unknown" in text


def test_every_code_of_the_contract_has_its_row() -> None:
    """The codes of design section 2 that an answer to a call, or to a question about one, can bring."""
    codes = {code for _, code in TABLE}
    text = Path("toolserver/errors.py").read_text()
    contract = set(re.findall(r'^    [A-Z_]+ = "([a-z_]+)"', text, re.MULTILINE))
    elsewhere = {  # of files and snapshots, and of the edge, which are read by their status
        "file_not_found", "snapshot_not_found", "range_not_satisfiable", "unsupported_media_type", "method_not_allowed", "not_implemented",
        "bad_request", "request_timeout", "headers_too_large",
    }  # fmt: skip
    assert contract - elsewhere - codes == set()


@pytest.mark.parametrize(("status", "detail", "move"), [
    (450, {"type": "retry"}, Move.FOLLOW), (450, {}, Move.TAKE), (502, {}, Move.ASK), (503, {}, Move.RETRY), (429, {}, Move.RETRY),
    (500, {}, Move.ASK), (400, {}, Move.TAKE),
])  # fmt: skip
def test_an_unknown_code_is_read_by_its_status(status: int, detail: dict[str, str], move: Move) -> None:
    assert meaning_of(ToolServerAnswer(status, "from_the_future", dict(detail))).move is move


@pytest.mark.parametrize(
    ("status", "code"), [key for key in TABLE if key[0] in (401, 403, 404, 409, 410, 413, 422, 429)]
)
def test_no_4xx_says_anything_to_the_breaker(status: int, code: str) -> None:
    assert TABLE[status, code].mark is Mark.NOTHING


async def test_a_proxy_that_says_too_large_in_html_is_understood(agent: Agent, server: FakeToolServer) -> None:
    server.answer_with(*POST, Reply(413, b"<html>too large</html>"))
    assert (await agent.call()).code == "too_large"
