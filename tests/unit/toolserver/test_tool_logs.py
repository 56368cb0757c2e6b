"""What a tool image logs in the midst of a call: told to who follows the call, over HTTP and MCP, and to nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.toolserver import crib as cribs
from tests.unit.toolserver.crib import Crib, running, settings
from tests.unit.toolserver.events_client import EVENTS, parsed
from tests.unit.toolserver.mcp_client import McpClient, connected
from tests.unit.toolserver.test_stdio_client import Peer, talking
from toolserver.calls.news import KEPT_LOGS, News
from toolserver.runtime.fake_runtime import FakeRuntime
from toolserver.sandbox.foreign_calls import META_LOG_LEVEL, ForeignCalls

SAID = (
    {"level": "debug", "data": "looking"},
    {"level": "warning", "logger": "disk", "data": {"free_mb": 3}},
    {"level": "loud", "data": "no such level"},
    {"level": "error"},
    {"level": "error", "data": ["x" * 5000], "logger": 5},
)
DISK = {"level": "warning", "data": {"free_mb": 3}, "logger": "disk"}
LONG = {"level": "error", "data": '["' + "x" * 1998}


async def logging(peer: Peer, message: dict[str, Any]) -> None:
    """A server of the legacy era that logs while it works."""
    match message.get("method"):
        case "initialize":
            await peer.say({"id": message["id"], "result": {"protocolVersion": "2025-06-18", "capabilities": {}}})
        case "tools/list":
            tools = [{"name": fake.name} for fake in cribs.FOREIGN_TOOLS]
            await peer.say({"id": message["id"], "result": {"tools": tools}})
        case "tools/call":
            for params in SAID:
                await peer.say({"method": "notifications/message", "params": params})
            await peer.say({"id": message["id"], "result": {"content": [{"type": "text", "text": "done"}]}})


@pytest.fixture
async def crib(tmp_path: Path) -> AsyncIterator[Crib]:
    chosen = settings(tmp_path)
    runtime = FakeRuntime("test", tmp_path, chosen.runtime, server=lambda _spec, _workspace: Peer(logging))
    async with running(chosen, runtime) as found:
        yield found


async def test_a_log_is_told_as_events(crib: Crib) -> None:
    session = await crib.session(images=["foreign"])
    path = f"/v1/sessions/{session}/tools/foreign_wait"
    answer = await crib.client.post(path, json={"arguments": {}}, headers=EVENTS)
    events = parsed(answer.text)
    assert [event.name for event in events] == ["started", "log", "log", "log", "outcome"]
    assert [event.data for event in events[1:4]] == [{"level": "debug", "data": "looking"}, DISK, LONG]


def heard(client: McpClient) -> list[dict[str, Any]]:
    return [one["params"] for one in client.heard if one.get("method") == "notifications/message"]


async def called(crib: Crib, client: McpClient, **meta: Any) -> None:
    """`foreign_wait`, in a session that has none but the image that logs."""
    result = await client.call("foreign_wait", toolcrib__session=await crib.session(images=["foreign"]), **meta)
    assert result["content"][-1]["text"] == "done"


@pytest.mark.parametrize(("level", "told"), [("debug", 3), ("warning", 2), ("emergency", 0), (None, 0)])
async def test_an_mcp_client_hears_from_its_level_on(crib: Crib, level: str | None, told: int) -> None:
    client = await connected(crib, "2026-07-28")
    await called(crib, client, **({} if level is None else {META_LOG_LEVEL.replace("/", "__"): level}))
    assert len(heard(client)) == told
    if told:
        assert heard(client)[-2:] == [DISK, LONG]


@pytest.mark.parametrize(("owners", "expected"), [("ab", 0), ("aa", 1)])
async def test_what_calls_of_two_sessions_log_is_told_to_none(owners: str, expected: int) -> None:
    async def answer_both(peer: Peer, _message: dict[str, Any]) -> None:
        if len(peer.heard) == 2:
            await peer.say({"method": "notifications/message", "params": {"level": "info", "data": "whose?"}})
            for one in peer.heard:
                await peer.say({"id": one["id"], "result": {}})

    told: list[dict[str, Any]] = []
    async with talking(answer_both) as (client, _):
        calls = ForeignCalls(client)
        client.noticed = calls.noticed
        both = [
            calls.run(f"c{number}", {"name": "t"}, 5, 1, owner=owner, ask=None, on_progress=None, on_log=told.append)
            for number, owner in enumerate(owners)
        ]
        await asyncio.gather(*both)
        client.noticed("notifications/message", {"level": "info", "data": "after the end"})
    assert told == [{"level": "info", "data": "whose?"}] * expected


async def test_servers_of_the_era_that_wants_to_be_asked_are_asked_to_log() -> None:
    async def done(peer: Peer, message: dict[str, Any]) -> None:
        await peer.say({"id": message["id"], "result": {}})

    async with talking(done) as (client, peer):
        client.meta = {"io.modelcontextprotocol/protocolVersion": "2026-07-28"}
        calls = ForeignCalls(client)
        await calls.run("c", {"name": "t"}, 5, 1, owner="a", ask=None, on_progress=None, on_log=lambda _: None)
        await calls.run("d", {"name": "t"}, 5, 1, owner="a", ask=None, on_progress=None)
    first, second = (one["params"]["_meta"] for one in peer.heard)
    assert first[META_LOG_LEVEL] == "info"
    assert META_LOG_LEVEL not in second


async def test_a_slow_follower_hears_the_last_of_the_log() -> None:
    news = News()
    for number in range(KEPT_LOGS + 20):
        news.log({"level": "info", "data": str(number)})
    assert news.logged == KEPT_LOGS + 20
    assert [told["data"] for told in news.log_after(0)] == [str(number) for number in range(20, KEPT_LOGS + 20)]
    assert [told["data"] for told in news.log_after(KEPT_LOGS + 18)] == [str(KEPT_LOGS + 18), str(KEPT_LOGS + 19)]
    assert news.log_after(news.logged) == []
