from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolserver.errors import RuntimeUnavailable, SandboxGone
from toolserver.runtime.base import Limits, SandboxSpec
from toolserver.runtime.fake_pipe import FakePipe
from toolserver.runtime.fake_runtime import FakeSandbox
from toolserver.sandbox.eras import MODERN_VERSION
from toolserver.sandbox.framing import LineBuffer, Oversized
from toolserver.sandbox.stdio_client import RESPONSE_TOO_LARGE, RpcError, StdioClient
from toolserver.sandbox.tool_sandbox import ToolSandbox

SPEC = SandboxSpec("sbx_1", "ses_1", "image", "ref", ("x",), Limits(64, 1, 16, 1))
Answering = Callable[["Peer", dict[str, Any]], Awaitable[None]]


class Peer:
    """The other side of the stream: what it does with each message is the test's."""

    def __init__(self, answering: Answering) -> None:
        self.answering = answering
        self.heard: list[dict[str, Any]] = []
        self.stdout = FakePipe()

    async def serve(self, stdin: FakePipe, stdout: FakePipe) -> None:
        self.stdout = stdout
        rest = b""
        while data := await stdin.read():
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                self.heard.append(message)
                await self.answering(self, message)

    async def say(self, message: dict[str, Any]) -> None:
        await self.stdout.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")


@asynccontextmanager
async def talking(answering: Answering) -> AsyncIterator[tuple[StdioClient, Peer]]:
    peer = Peer(answering)
    client = StdioClient(FakeSandbox(SPEC, peer, lambda: None))
    try:
        yield client, peer
    finally:
        await client.close()


async def echo(peer: Peer, message: dict[str, Any]) -> None:
    if "id" in message and "method" in message:
        await peer.say({"id": message["id"], "result": {"method": message["method"], "params": message["params"]}})


async def silent(_peer: Peer, _message: dict[str, Any]) -> None:
    pass


async def test_answers_find_their_request_in_any_order() -> None:
    held: list[dict[str, Any]] = []

    async def reversed_pairs(peer: Peer, message: dict[str, Any]) -> None:
        held.append(message)
        if len(held) == 4:
            for one in reversed(held):
                await echo(peer, one)

    async with talking(reversed_pairs) as (client, _):
        answers = await asyncio.gather(*(client.request(f"m{n}", {"n": n}, 5) for n in range(4)))
    assert [a["params"]["n"] for a in answers] == [0, 1, 2, 3]


async def test_lines_that_are_no_answer_are_skipped_and_counted() -> None:
    async def noisy(peer: Peer, message: dict[str, Any]) -> None:
        for line in (
            b"not json",
            b"[1]",
            b'{"jsonrpc":"1.0"}',
            b"\xff\xfe",
            b'{"jsonrpc":"2.0","id":999,"result":{}}',
            b'{"jsonrpc":"2.0","method":5}',
            b"[" * 5000,
        ):
            await peer.stdout.write(line + b"\n")
        await peer.stdout.write(b"\n   \n")
        await peer.say({"id": str(message["id"]), "result": {}})
        await peer.say({"id": message["id"], "result": {"a": float("nan")}})

    async with talking(noisy) as (client, _):
        assert await client.request("m", {}, 5) == {"a": None}
        assert client.garbage_lines == 8


async def test_garbage_without_end_ends_the_stream() -> None:
    async def endless(peer: Peer, _message: dict[str, Any]) -> None:
        for _ in range(200):
            await peer.stdout.write(b"x\n" * 100)

    async with talking(endless) as (client, _):
        with pytest.raises(SandboxGone, match="too much"):
            await client.request("m", {}, 20)
        assert not client.alive


async def test_a_cut_line_is_no_answer() -> None:
    async def cut(peer: Peer, message: dict[str, Any]) -> None:
        await peer.stdout.write(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": {}}).encode())
        await peer.stdout.close()

    async with talking(cut) as (client, _):
        with pytest.raises(SandboxGone):
            await client.request("m", {}, 5)


async def test_the_end_of_the_stream_fails_every_open_request_at_once() -> None:
    async def last(peer: Peer, message: dict[str, Any]) -> None:
        if message["method"] == "die":
            await peer.stdout.close()

    async with talking(last) as (client, _):
        work = [asyncio.ensure_future(client.request(name, {}, 60)) for name in ("a", "b", "die")]
        results = await asyncio.wait_for(asyncio.gather(*work, return_exceptions=True), 5)
        assert all(isinstance(result, SandboxGone) for result in results)
        with pytest.raises(SandboxGone):
            await client.request("late", {}, 5)


async def test_a_request_has_a_deadline_and_its_late_answer_is_dropped() -> None:
    async def late(peer: Peer, message: dict[str, Any]) -> None:
        if message["method"] == "slow":
            await asyncio.sleep(0.2)
        await echo(peer, message)

    async with talking(late) as (client, _):
        with pytest.raises(TimeoutError):
            await client.request("slow", {}, 0.05)
        assert (await client.request("quick", {}, 5))["method"] == "quick"
        assert client.garbage_lines == 0  # nobody waits for it any more, and it was asked for


async def test_errors_carry_code_message_and_kind() -> None:
    async def refuse(peer: Peer, message: dict[str, Any]) -> None:
        await peer.say({"id": message["id"], "error": {"code": -32000, "message": "no", "data": {"kind": "not_found"}}})

    async with talking(refuse) as (client, _):
        with pytest.raises(RpcError) as caught:
            await client.request("m", {}, 5)
    assert (caught.value.code, caught.value.message, caught.value.kind) == (-32000, "no", "not_found")


async def test_an_answer_longer_than_a_message_may_be_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolserver.sandbox.stdio_client.LineBuffer", lambda: LineBuffer(10_000))

    async def large(peer: Peer, message: dict[str, Any]) -> None:
        size = 50_000 if message["method"] == "large" else 5
        await peer.say({"id": message["id"], "result": {"x": "y" * size}})

    async with talking(large) as (client, _):
        with pytest.raises(RpcError) as caught:
            await client.request("large", {}, 5)
        assert caught.value.code == RESPONSE_TOO_LARGE
        assert await client.request("small", {}, 5) == {"x": "yyyyy"}


async def test_requests_of_the_sandbox_are_refused_and_ping_is_answered() -> None:
    async def asks(peer: Peer, message: dict[str, Any]) -> None:
        if message.get("method") == "m":
            await peer.say({"id": 1, "method": "sampling/createMessage", "params": {}})
            await peer.say({"id": "p", "method": "ping"})
            await peer.say({"method": "notifications/message", "params": {}})
            await asyncio.sleep(0.05)
            await peer.say({"id": message["id"], "result": {}})

    async with talking(asks) as (client, peer):
        await client.request("m", {}, 5)
        await asyncio.sleep(0.1)
        replies = {m["id"]: m for m in peer.heard if "method" not in m}
    assert replies[1]["error"]["code"] == -32601
    assert replies["p"]["result"] == {}


async def test_a_sandbox_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolserver.sandbox.stdio_client._SEND_S", 0.1)

    class Deaf:
        async def serve(self, _stdin: FakePipe, _stdout: FakePipe) -> None:
            await asyncio.Event().wait()

    client = StdioClient(FakeSandbox(SPEC, Deaf(), lambda: None))
    with pytest.raises(SandboxGone):
        await client.request("m", {"x": "y" * 1_000_000}, 5)
    assert not client.alive
    await client.close()


async def test_a_send_that_is_cancelled_half_way_ends_the_stream() -> None:
    class Deaf:
        async def serve(self, _stdin: FakePipe, _stdout: FakePipe) -> None:
            await asyncio.Event().wait()

    client = StdioClient(FakeSandbox(SPEC, Deaf(), lambda: None))
    work = asyncio.ensure_future(client.request("m", {"x": "y" * 1_000_000}, 5))
    await asyncio.sleep(0.05)
    work.cancel()
    await asyncio.wait([work])
    assert not client.alive
    await client.close()


@pytest.mark.parametrize("pages", [1, 3])
async def test_all_pages_of_the_tool_list_are_read(pages: int) -> None:
    async def paged(peer: Peer, message: dict[str, Any]) -> None:
        if message["method"] == "tools/list":
            page = int(message["params"].get("cursor", "0"))
            following = {"nextCursor": str(page + 1)} if page + 1 < pages else {}
            await peer.say({"id": message["id"], "result": {"tools": [{"name": f"t{page}"}], **following}})
        elif "id" in message:
            await peer.say({"id": message["id"], "result": {"capabilities": {}}})

    sandbox = ToolSandbox(FakeSandbox(SPEC, Peer(paged), lambda: None))
    await sandbox.open(frozenset({f"t{n}" for n in range(pages)}), 5)
    assert not sandbox.has_worker
    await sandbox.close()


async def test_a_server_of_the_stateless_era_is_recognised() -> None:
    async def modern(peer: Peer, message: dict[str, Any]) -> None:
        if message["method"] == "initialize":
            await peer.say({"id": message["id"], "error": {"code": -32601, "message": "no initialize here"}})
        elif "id" in message:
            assert message["params"]["_meta"]["io.modelcontextprotocol/protocolVersion"] == MODERN_VERSION
            versions = {"supportedVersions": [MODERN_VERSION]}
            await peer.say({"id": message["id"], "result": {**versions, "tools": [], "content": []}})

    sandbox = ToolSandbox(FakeSandbox(SPEC, Peer(modern), lambda: None))
    await sandbox.open(frozenset(), 5)
    assert sandbox.era == MODERN_VERSION
    assert await sandbox.call("t", {}, call_id="c", deadline_s=5, max_text_bytes=1000, grace_s=1) == {
        "supportedVersions": [MODERN_VERSION],
        "tools": [],
        "content": [],
    }
    await sandbox.close()


async def test_a_server_that_never_answers_is_not_ready_in_time() -> None:
    sandbox = ToolSandbox(FakeSandbox(SPEC, Peer(silent), lambda: None))
    with pytest.raises(RuntimeUnavailable, match="not ready"):
        await sandbox.open(frozenset(), 0.1)
    await sandbox.close()


@given(st.lists(st.binary(max_size=40).filter(lambda b: b"\n" not in b), max_size=20), st.integers(1, 30))
def test_lines_come_out_as_they_went_in_however_they_are_cut(lines: list[bytes], size: int) -> None:
    stream = b"".join(line + b"\n" for line in lines)
    buffer = LineBuffer(30)
    out = [line for start in range(0, len(stream), size) for line in buffer.feed(stream[start : start + size])]
    for came, sent in zip(out, lines, strict=True):
        assert sent.startswith(came.head) if isinstance(came, Oversized) else came == sent
    assert [isinstance(o, Oversized) for o in out] == [len(line) > 30 for line in lines]
