"""What a tool asks in the midst of a call, over HTTP: told as input_required, answered by call_answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.toolserver import crib as cribs
from tests.unit.toolserver.crib import Crib, detail, running, settings
from tests.unit.toolserver.test_stdio_client import Peer
from toolserver.runtime.fake_runtime import FakeRuntime

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


async def asking(peer: Peer, message: dict[str, Any]) -> None:
    """A server of the legacy era whose tool asks by a request of its own."""
    if message.get("method") == "initialize":
        await peer.say({"id": message["id"], "result": {"protocolVersion": "2025-06-18", "capabilities": {}}})
    elif message.get("method") == "tools/list":
        tools = [{"name": fake.name} for fake in cribs.FOREIGN_TOOLS]
        await peer.say({"id": message["id"], "result": {"tools": tools}})
    elif message.get("method") == "tools/call":
        peer.heard.append({"open": message["id"]})
        params = {"message": "Who are you?", "requestedSchema": SCHEMA}
        await peer.say({"id": "q", "method": "elicitation/create", "params": params})
    elif message.get("id") == "q":
        number = next(one["open"] for one in peer.heard if "open" in one)
        said = json.dumps(message.get("result", message.get("error")))
        await peer.say({"id": number, "result": {"content": [{"type": "text", "text": said}]}})


@pytest.fixture
async def crib(tmp_path: Path) -> AsyncIterator[Crib]:
    chosen = settings(tmp_path)
    runtime = FakeRuntime("test", tmp_path, chosen.runtime, server=lambda _spec, _workspace: Peer(asking))
    async with running(chosen, runtime) as found:
        yield found


async def test_a_question_is_told_and_its_answer_reaches_the_tool(crib: Crib) -> None:
    session = await crib.session(images=["foreign"])
    told = detail(await crib.call(session, "foreign_wait", key="c"), 450, "still_running")
    assert (told["type"], told["next_calling"]) == ("input_required", "call_answer")
    assert told["arguments"] == {"call_id": "c", "elicitation_id": 1}
    asked = {"id": 1, "tool": "foreign_wait", "message": "Who are you?", "mode": "form", "requested_schema": SCHEMA}
    assert told["elicitation"] == asked
    again = detail(await crib.call(session, "call_wait", {"call_id": "c"}), 450, "still_running")
    assert again["type"] == "input_required"
    answer = {"call_id": "c", "action": "accept"}
    wrong = detail(await crib.call(session, "call_answer", {**answer, "content": {}}), 422, "invalid_arguments")
    assert wrong["errors"][0]["pointer"] == "/arguments/content"
    done = await crib.call(session, "call_answer", {**answer, "content": {"name": "Ann"}, "elicitation_id": 1})
    assert json.loads(done.json()["content"][0]["text"]) == {"action": "accept", "content": {"name": "Ann"}}
    repeated = await crib.call(session, "call_answer", {**answer, "content": {"name": "Bo"}, "elicitation_id": 1})
    assert repeated.json() == done.json()


async def test_a_question_that_nobody_answers_is_cancelled_before_the_deadline(crib: Crib) -> None:
    session = await crib.session(images=["foreign"])
    await crib.call(session, "foreign_wait", key="c", deadline_s=1)
    async with crib.client.stream("GET", "/v1/calls/c", headers={"Accept": "text/event-stream"}) as stream:
        text = "".join([chunk async for chunk in stream.aiter_text()])
    assert text.index("event: started") < text.index("event: input_required") < text.index("event: outcome")
    assert '\\"action\\": \\"cancel\\"' in text


async def test_a_call_that_asks_nothing_takes_no_answer(crib: Crib) -> None:
    session = await crib.session(images=["foreign"])
    await crib.call(session, "foreign_wait", key="c")
    decline = {"call_id": "c", "action": "decline"}
    await crib.call(session, "call_answer", {**decline, "content": {}})
    later = detail(await crib.call(session, "call_answer", {**decline, "elicitation_id": 7}), 422, "invalid_arguments")
    assert "asks nothing" in later["message"]
    assert (await crib.client.delete("/v1/calls/c")).status_code == 200
