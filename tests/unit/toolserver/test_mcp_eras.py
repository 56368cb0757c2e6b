"""MCP servers of both eras, well-behaved and not, as the client meets them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.toolserver.crib import settings
from tests.unit.toolserver.test_stdio_client import SPEC, Peer
from toolserver.errors import RuntimeUnavailable
from toolserver.runtime.base import Limits
from toolserver.runtime.fake_runtime import FakeRuntime, FakeSandbox
from toolserver.sandbox.eras import LATEST_LEGACY, LEGACY_VERSIONS, MODERN_VERSION, Eras
from toolserver.sandbox.questions import Question, Reply
from toolserver.sandbox.tool_sandbox import ToolSandbox
from toolserver.sessions.starting import Starts, start_sandbox

FOREIGN = replace(SPEC, foreign=True, workspace="none", limits=Limits(64, 1, 16, 1))
Behaviour = Callable[[Peer, dict[str, Any]], Awaitable[None]]


async def tools_of(peer: Peer, message: dict[str, Any]) -> None:
    if message.get("method") == "tools/list":
        await peer.say({"id": message["id"], "result": {"tools": [{"name": "t"}]}})


def legacy(version: str = LATEST_LEGACY, probe: str = "error") -> Behaviour:
    """`probe`: what it does when it is asked for the other era: error, die, silent, odd."""

    async def behave(peer: Peer, message: dict[str, Any]) -> None:
        if message.get("method") == "initialize":
            if message["params"]["protocolVersion"] != version and version == "2024-11-05":
                data = {"supported": [version], "requested": message["params"]["protocolVersion"]}
                error = {"code": -32602, "message": "Unsupported protocol version", "data": data}
                await peer.say({"id": message["id"], "error": error})
                return
            await peer.say({"id": message["id"], "result": {"protocolVersion": version, "capabilities": {"tools": {}}}})
        elif message.get("method") == "server/discover":
            if probe == "die":
                await peer.stdout.close()
            elif probe == "error":
                await peer.say({"id": message["id"], "error": {"code": -32602, "message": "no such"}})
            elif probe == "odd":
                await peer.say({"id": message["id"], "result": {}})
        else:
            await tools_of(peer, message)

    return behave


def modern(*, dies_of_initialize: bool = False) -> Behaviour:
    async def behave(peer: Peer, message: dict[str, Any]) -> None:
        if message.get("method") == "initialize":
            if dies_of_initialize:
                await peer.stdout.close()
                return
            data = {"supported": [MODERN_VERSION], "requested": message["params"]["protocolVersion"]}
            await peer.say({"id": message["id"], "error": {"code": -32022, "message": "unsupported", "data": data}})
        elif message.get("method") == "server/discover":
            told = {"supportedVersions": [MODERN_VERSION], "capabilities": {"tools": {"listChanged": True}}}
            await peer.say({"id": message["id"], "result": {**told, "resultType": "complete"}})
        else:
            await tools_of(peer, message)

    return behave


async def started(tmp_path: Path, behaviour: Behaviour, eras: Eras, timeout_s: float = 5) -> tuple[str, int]:
    """The version that was agreed on, and how many sandboxes it took."""
    peers: list[Peer] = []

    def serve(*_: Any) -> Peer:
        peers.append(Peer(behaviour))
        return peers[-1]

    runtime = FakeRuntime("test", tmp_path, settings(tmp_path).runtime, server=serve)
    spec = replace(FOREIGN, foreign=False)  # the fake runtime takes none; what is known of it is told by the test
    sandbox = await start_sandbox(runtime, Starts(1), spec, frozenset({"t"}), timeout_s, eras=eras)
    await sandbox.close()
    return sandbox.era, len(peers)


class Unknown(Eras):
    """As of an image of others, of which nothing is known at first."""

    def hint(self, spec: Any) -> str | None:
        return super().hint(replace(spec, foreign=True))


@pytest.mark.parametrize(
    ("behaviour", "version", "sandboxes"),
    [
        pytest.param(legacy(), LATEST_LEGACY, 1, id="legacy"),
        *(pytest.param(legacy(version), version, 1, id=version) for version in LEGACY_VERSIONS[1:]),
        pytest.param(legacy(probe="odd"), LATEST_LEGACY, 1, id="answers-all"),
        pytest.param(legacy(probe="die"), LATEST_LEGACY, 2, id="dies-of-the-probe"),
        pytest.param(legacy(probe="silent"), LATEST_LEGACY, 2, id="silent-at-the-probe"),
        pytest.param(modern(), MODERN_VERSION, 1, id="modern"),
    ],
)
async def test_each_era_is_found_and_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behaviour: Behaviour, version: str, sandboxes: int
) -> None:
    monkeypatch.setattr("toolserver.sandbox.handshake.PROBE_S", 0.3)
    eras = Unknown()
    assert await started(tmp_path, behaviour, eras) == (version, sandboxes)
    assert await started(tmp_path, behaviour, eras) == (version, 1)


@pytest.mark.parametrize("behaviour", [modern(), modern(dies_of_initialize=True), legacy(), legacy(probe="die")])
@pytest.mark.parametrize("wrong", [LATEST_LEGACY, MODERN_VERSION])
async def test_a_wrong_memory_heals(tmp_path: Path, behaviour: Behaviour, wrong: str) -> None:
    eras = Unknown()
    eras.tell(replace(FOREIGN, foreign=False), wrong)
    version, _ = await started(tmp_path, behaviour, eras)
    assert eras.hint(FOREIGN) == version
    assert await started(tmp_path, behaviour, eras) == (version, 1)


async def test_a_server_of_no_known_version_is_refused_by_name(tmp_path: Path) -> None:
    async def future(peer: Peer, message: dict[str, Any]) -> None:
        data = {"supported": ["2031-01-01"]}
        await peer.say({"id": message["id"], "error": {"code": -32022, "message": "only 2031-01-01", "data": data}})

    with pytest.raises(RuntimeUnavailable, match="2031-01-01"):
        await started(tmp_path, future, Unknown())


async def test_a_tool_list_whose_cursors_go_round_is_refused() -> None:
    async def round_and_round(peer: Peer, message: dict[str, Any]) -> None:
        if message.get("method") == "tools/list":
            await peer.say({"id": message["id"], "result": {"tools": [], "nextCursor": "again"}})
        elif "id" in message:
            await legacy()(peer, message)

    sandbox = ToolSandbox(FakeSandbox(SPEC, Peer(round_and_round), lambda: None))
    with pytest.raises(RuntimeUnavailable, match="never ends"):
        await sandbox.open(frozenset(), 5)
    await sandbox.close()


async def test_input_of_several_rounds_is_asked_for_and_sent_with_the_state() -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    ask = {"method": "elicitation/create", "params": {"message": "Who?", "requestedSchema": schema}}

    async def asks(peer: Peer, message: dict[str, Any]) -> None:
        if message.get("method") != "tools/call":
            await modern()(peer, message)
        elif "inputResponses" not in message["params"]:
            told = {"resultType": "input_required", "inputRequests": {"who": ask}, "requestState": "s1"}
            await peer.say({"id": message["id"], "result": told})
        else:
            params = message["params"]
            text = f"{params['requestState']} {params['inputResponses']['who']}"
            await peer.say({"id": message["id"], "result": {"content": [{"type": "text", "text": text}]}})

    async def reply(question: Question) -> Reply:
        assert question.message == "Who?"
        return Reply("accept", {"name": "Ann"})

    sandbox = ToolSandbox(FakeSandbox(SPEC, Peer(asks), lambda: None))
    await sandbox.open(frozenset({"t"}), 5, None)
    result = await sandbox.call("t", {}, call_id="c", deadline_s=5, max_text_bytes=999, grace_s=1, ask=reply)
    assert result["content"][0]["text"] == "s1 {'action': 'accept', 'content': {'name': 'Ann'}}"
    await sandbox.close()
