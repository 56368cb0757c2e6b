"""What a tool asks its user, put to MCP clients that can ask one, and told to the models of those that can't."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.toolserver.crib import Crib, running, serve_spec, settings
from tests.unit.toolserver.events_client import serving
from tests.unit.toolserver.mcp_client import McpClient, connected, events, text_of
from tests.unit.toolserver.test_questions import SCHEMA, asking
from tests.unit.toolserver.test_stdio_client import Peer
from toolserver.runtime.base import SandboxSpec
from toolserver.runtime.fake_runtime import FakeRuntime
from toolserver.runtime.fake_workspace import FakeWorkspace

FORM: dict[str, Any] = {"elicitation": {}}
CALL = {"name": "foreign_wait", "arguments": {}}
ANN = {"action": "accept", "content": {"name": "Ann"}}


async def asking_twice(peer: Peer, message: dict[str, Any]) -> None:
    """Asks again when it was answered for the first time."""
    if message.get("id") == "q" and "again" not in peer.heard[-1] and not any("again" in one for one in peer.heard):
        peer.heard.append({"again": True})
        await peer.say(
            {"id": "q", "method": "elicitation/create", "params": {"message": "Sure?", "requestedSchema": SCHEMA}}
        )
    else:
        await asking(peer, message)


@pytest.fixture(params=[asking])
async def crib(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Crib]:
    chosen = settings(tmp_path)
    serve = request.param

    def server(spec: SandboxSpec, workspace: FakeWorkspace) -> Any:
        return Peer(serve) if spec.image == "foreign" else serve_spec(spec, workspace)

    runtime = FakeRuntime("test", tmp_path, chosen.runtime, server=server)
    async with running(chosen, runtime) as found:
        yield found


@pytest.mark.parametrize("version", ["2024-11-05", "2025-06-18", "2025-11-25", "2026-07-28"])
async def test_a_client_that_asks_nobody_is_told_how_its_model_answers(crib: Crib, version: str) -> None:
    client = await connected(crib, version)
    result = await client.result("tools/call", CALL)
    assert result["isError"] is True
    told = text_of(result)
    assert "Who are you?" in told
    assert json.dumps(SCHEMA) in told
    arguments = json.loads(told.split("\ncall_answer ")[1].split(" requested_schema")[0])
    done = await client.call("call_answer", {**arguments, **ANN})
    assert json.loads(text_of(done)) == ANN


async def ask_and_answer(crib: Crib, said: Any, capabilities: Any = FORM) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a client with sessions is asked, and the result of the call after its response."""
    async with serving(crib) as http:
        client = McpClient(http, capabilities=capabilities)
        await client.begin("2025-06-18")
        message = client.message("tools/call", CALL)
        head = client.head("tools/call", CALL)
        async with asyncio.timeout(20), http.stream("POST", "/mcp", json=message, headers=head) as stream:
            asked: dict[str, Any] = {}
            async for _, told in events(stream):
                if told is not None and told.get("method") == "elicitation/create":
                    asked = told
                    answer = await client.post({"jsonrpc": "2.0", "id": told["id"], **said})
                    assert answer.status_code == 202
                elif told is not None and told.get("id") == message["id"]:
                    return asked, told
    raise AssertionError("the stream ended without an answer")


async def test_a_client_with_sessions_is_asked_on_the_stream_of_the_call(crib: Crib) -> None:
    asked, told = await ask_and_answer(crib, {"result": ANN})
    assert asked["params"] == {"message": "Who are you?", "mode": "form", "requestedSchema": SCHEMA}
    assert json.loads(text_of(told["result"])) == ANN


@pytest.mark.parametrize(
    "said",
    [
        {"result": {"action": "cancel"}},
        {"result": {"action": "accept", "content": {"name": 5}}},
        {"result": {"action": "perhaps"}},
        {"result": {}},
        {"error": {"code": -32601, "message": "no"}},
    ],
    ids=lambda said: json.dumps(said)[:50],
)
async def test_what_is_no_answer_dismisses_the_question(crib: Crib, said: Any) -> None:
    _, told = await ask_and_answer(crib, said)
    assert json.loads(text_of(told["result"])) == {"action": "cancel"}


async def test_a_client_that_asks_in_another_mode_only_is_not_asked(crib: Crib) -> None:
    asked, told = await ask_and_answer(crib, {"result": ANN}, {"elicitation": {"url": {}}})
    assert asked == {}
    assert told["result"]["isError"] is True


@pytest.mark.parametrize("crib", [asking_twice], indirect=True)
async def test_a_stateless_client_makes_the_call_again_with_its_answer(crib: Crib) -> None:
    client = await connected(crib, "2026-07-28", capabilities=FORM)
    first = await client.result("tools/call", CALL)
    assert first["resultType"] == "input_required"
    ((number, asked),) = first["inputRequests"].items()
    assert (asked["method"], asked["params"]["requestedSchema"]) == ("elicitation/create", SCHEMA)
    unanswered = await client.result("tools/call", {**CALL, "requestState": first["requestState"]})
    assert unanswered["inputRequests"] == first["inputRequests"]
    answers = {number: ANN, "unknown": 5}
    again = {**CALL, "requestState": first["requestState"], "inputResponses": answers}
    second = await client.result("tools/call", again)
    assert second["resultType"] == "input_required"
    assert second["requestState"] != first["requestState"]
    ((number, asked),) = second["inputRequests"].items()
    assert asked["params"]["message"] == "Sure?"
    repeated = await client.result("tools/call", again)
    assert repeated["inputRequests"] == second["inputRequests"]
    bo = {"action": "accept", "content": {"name": "Bo"}}
    last = {**CALL, "requestState": second["requestState"], "inputResponses": {number: bo}}
    done = await client.result("tools/call", last)
    assert (done["resultType"], json.loads(text_of(done))) == ("complete", bo)
    assert (await client.result("tools/call", last))["content"] == done["content"]


async def test_a_state_that_is_not_the_calls_is_refused(crib: Crib) -> None:
    client = await connected(crib, "2026-07-28", capabilities=FORM)
    first = await client.result("tools/call", CALL)
    state = first["requestState"]
    for wrong in ("x", 5, ["a"], "1:", "1:unknown", f"0:{state}", "9" * 5000):
        answer = await client.ask("tools/call", {**CALL, "requestState": wrong})
        assert answer["error"]["code"] == -32602, wrong
    other = {"name": "foreign_result", "arguments": {"result": {}}, "requestState": state}
    assert (await client.ask("tools/call", other))["error"]["code"] == -32602
    elsewhere = {**CALL, "requestState": state, "_meta": {"toolcrib/session": "b"}}
    assert (await client.ask("tools/call", elsewhere))["error"]["code"] == -32602
