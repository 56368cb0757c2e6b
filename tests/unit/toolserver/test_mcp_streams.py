"""Streams of /mcp over a real socket: taken up again, cancelled, left, and kept open for changes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.toolserver.crib import Crib, crashing, new_runtime, running, settings
from tests.unit.toolserver.events_client import serving
from tests.unit.toolserver.mcp_client import McpClient, connected, events, note, text_of
from toolserver.api import edge, mcp_listen

pytestmark = pytest.mark.usefixtures("_soon")


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_listen, "_LOOK_S", 0.05)


@pytest.fixture
async def http(crib: Crib) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(crib) as client:
        yield client


def begun(client: McpClient, tool: str, arguments: Any, number: Any = 7, **meta: Any) -> Any:
    """The stream of a call."""
    params = {"name": tool, "arguments": arguments, "_meta": {"progressToken": "p", **meta}}
    head = client.head("tools/call", params)
    return client.http.stream("POST", "/mcp", json=client.message("tools/call", params, number), headers=head)


def listening(client: McpClient, **headers: str) -> Any:
    head = client.head("", {}) | {"Accept": "text/event-stream"} | headers
    return client.http.stream("GET", "/mcp", headers=head)


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(15):
        while not true():  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.02)


async def until_idle(crib: Crib) -> None:
    await until(lambda: not crib.server.executor.admission.held())


async def code_of_only_call(crib: Crib, tool: str) -> set[str]:
    lines = [line for line in crib.server.metrics.render().splitlines() if line.startswith("toolserver_calls_total{")]
    return {line.split('code="')[1].split('"')[0] for line in lines if f'tool="{tool}"' in line}


@pytest.mark.parametrize("version", ["2025-03-26", "2025-06-18", "2025-11-25"])
async def test_a_stream_that_broke_is_taken_up_behind_the_last_event(
    crib: Crib, http: httpx.AsyncClient, version: str
) -> None:
    client = McpClient(http)
    await client.begin(version)
    await client.result("logging/setLevel", {"level": "info"})
    lines = [f"line {number}\n" for number in range(12)]
    heard, last = "", ""
    async with begun(client, "say", {"lines": lines, "pause_s": 0.08}) as stream:
        async for mark, told in events(stream):
            assert mark is not None
            last = mark
            heard += told["params"]["data"] if told is not None else ""
            if len(heard) > 30:
                break
    async with listening(client, **{"Last-Event-ID": last}) as stream:
        assert stream.status_code == 200
        async for _, told in events(stream):
            if told is not None and "method" in told:
                heard += told["params"]["data"]
            elif told is not None:
                assert (told["id"], text_of(told["result"])) == (7, "".join(lines))
    assert heard == "".join(lines)
    async with listening(client, **{"Last-Event-ID": last}) as stream:  # also long after
        found = [told async for _, told in events(stream) if told is not None]
    assert found[-1]["id"] == 7
    assert len([one for one in found if "result" in one]) == 1
    thief = McpClient(http, session=(await connected(crib)).session)
    for wrong in ("x", "W10=", "bnVsbA==", "9" * 9000):
        async with listening(thief, **{"Last-Event-ID": wrong}) as stream:
            assert stream.status_code == 400


async def test_only_the_newest_revision_with_sessions_begins_a_stream_with_an_event_of_no_message(
    http: httpx.AsyncClient,
) -> None:
    for version, primed in (("2025-11-25", True), ("2025-06-18", False)):
        client = McpClient(http)
        await client.begin(version)
        async with begun(client, "echo", {"text": "x"}) as stream:
            found = [(mark, told) async for mark, told in events(stream)]
        assert (found[0][1] is None) == primed
        assert found[0][0] is not None


@pytest.mark.parametrize("early", [False, True], ids=["as a stream", "before the stream"])
async def test_a_cancelled_request_ends_its_call_and_is_not_answered(
    crib: Crib, http: httpx.AsyncClient, early: bool
) -> None:
    client = McpClient(http)
    await client.begin()
    params: dict[str, Any] = {"name": "sleep", "arguments": {"seconds": 60}}
    message = client.message("tools/call", params if early else {**params, "_meta": {"progressToken": 1}}, "mine")
    asking = asyncio.create_task(client.post(message))
    await until(crib.server.executor.admission.held)
    assert (await client.post(note("notifications/cancelled", {"requestId": "other"}))).status_code == 202
    assert (await client.post(note("notifications/cancelled", {"requestId": ["mine"]}))).status_code == 202
    assert not asking.done()
    assert (await client.post(note("notifications/cancelled", {"requestId": "mine"}))).status_code == 202
    answer = await asking
    assert '"result"' not in answer.text
    await until_idle(crib)
    assert await code_of_only_call(crib, "sleep") == {"cancelled"}
    assert text_of(await client.call("echo", {"text": "still"})) == "still"


async def test_many_cancelled_calls_leave_the_session_as_it_was(crib: Crib, http: httpx.AsyncClient) -> None:
    client = McpClient(http)
    await client.begin()
    for number in range(10):
        message = client.message("tools/call", {"name": "sleep", "arguments": {"seconds": 60}}, number)
        asking = asyncio.create_task(client.post(message))
        await asyncio.sleep(0.01 * (number % 3))
        await client.post(note("notifications/cancelled", {"requestId": number}))
        quick = await asyncio.gather(*(client.call("echo", {"text": str(n)}) for n in range(10)))
        assert [text_of(one) for one in quick] == [str(n) for n in range(10)]
        asking.cancel()
    for call in crib.server.executor.admission.held():
        await crib.client.delete(f"/v1/calls/{call.call_id}")
    await until_idle(crib)


@pytest.mark.parametrize("version", ["2025-11-25", "2026-07-28"])
@pytest.mark.parametrize("streamed", [True, False])
async def test_hanging_up_cancels_in_the_stateless_revision_alone(
    crib: Crib, http: httpx.AsyncClient, version: str, streamed: bool
) -> None:
    client = McpClient(http, modern=version == "2026-07-28")
    if not client.modern:
        await client.begin(version)
    meta = {"progressToken": 1} if streamed else {}
    params = {"name": "sleep", "arguments": {"seconds": 1.0}, "_meta": meta}
    with contextlib.suppress(httpx.ReadTimeout):
        head = client.head("tools/call", params)
        async with http.stream("POST", "/mcp", json=client.message("tools/call", params), headers=head, timeout=0.3):
            await asyncio.sleep(0.2)
    await until_idle(crib)
    assert await code_of_only_call(crib, "sleep") == {"cancelled" if client.modern else "ok"}


async def test_a_stateless_client_that_stops_reading_has_left(crib: Crib, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "_STALLED_S", 0.3)
    async with serving(crib) as http:
        client = McpClient(http, modern=True)
        meta = {"io.modelcontextprotocol/logLevel": "debug"}
        arguments = {"lines": ["x" * (1 << 20)], "times": 200, "pause_s": 0.1}
        params = {"name": "say", "arguments": arguments, "_meta": meta}
        body = json.dumps(client.message("tools/call", params)).encode()
        lines = [f"{name}: {value}" for name, value in client.head("tools/call", params).items()]
        head = "\r\n".join(["POST /mcp HTTP/1.1", *lines, f"Content-Length: {len(body)}", "", ""])
        with socket.socket() as wire:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            wire.connect(("127.0.0.1", http.base_url.port))
            wire.sendall(head.encode() + body)
            await until(crib.server.executor.admission.held)
            await until_idle(crib)
        assert await code_of_only_call(crib, "say") == {"cancelled"}


async def test_an_id_that_is_not_answered_yet_is_not_taken_twice(crib: Crib, http: httpx.AsyncClient) -> None:
    client = McpClient(http)
    await client.begin()
    async with begun(client, "sleep", {"seconds": 60}):
        answer = await client.post(client.message("tools/call", {"name": "count"}, 7))
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, -32600)
        assert text_of(await client.call("count")) == "count 1"
        await client.post(note("notifications/cancelled", {"requestId": 7}))
        await until_idle(crib)
        assert (await client.post(client.message("tools/call", {"name": "count"}, 7))).status_code == 200


async def next_change(stream: httpx.Response) -> dict[str, Any]:
    async with asyncio.timeout(15):
        async for _, told in events(stream):
            if told is not None:
                return told
    raise AssertionError("the stream ended")


async def test_changes_of_the_tool_list_are_told(crib: Crib, http: httpx.AsyncClient) -> None:
    old, new = McpClient(http), McpClient(http, modern=True)
    await old.begin()
    params = {"notifications": {"toolsListChanged": True, "promptsListChanged": True}}
    message, head = new.message("subscriptions/listen", params, "sub"), new.head("subscriptions/listen", params)
    async with listening(old) as plain, http.stream("POST", "/mcp", json=message, headers=head) as stateless:
        marks = events(stateless)
        async with asyncio.timeout(15):
            _, first = await anext(marks)
            assert first is not None
            assert first["method"] == "notifications/subscriptions/acknowledged"
            assert first["params"]["notifications"] == {"toolsListChanged": True}
            await asyncio.sleep(0.2)
            image = crib.server.catalog.images.pop("web")
            assert (await next_change(plain))["method"] == "notifications/tools/list_changed"
            _, told = await anext(marks)
            assert told is not None
            assert told["params"]["_meta"] == {"io.modelcontextprotocol/subscriptionId": "sub"}
            assert "web_echo" not in str(await old.result("tools/list"))
            crib.server.catalog.images["web"] = image


async def test_a_second_stream_for_changes_takes_over_from_the_first(crib: Crib, http: httpx.AsyncClient) -> None:
    client = McpClient(http)
    await client.begin()
    async with listening(client) as first, listening(client) as second:
        async with asyncio.timeout(15):
            assert [told async for _, told in events(first) if told is not None] == []
        crib.server.catalog.images.pop("web")
        assert (await next_change(second))["method"] == "notifications/tools/list_changed"


async def test_streams_for_changes_end_with_their_session(http: httpx.AsyncClient) -> None:
    client = McpClient(http)
    await client.begin()
    await client.call("echo", {"text": "x"})
    async with listening(client) as stream:
        assert (await client.end()).status_code == 204
        async with asyncio.timeout(15):
            assert [told async for _, told in events(stream) if told is not None] == []


async def test_streams_for_changes_are_bounded_and_take_nothing_from_calls(tmp_path: Path) -> None:
    bounds = {"max_listeners": 3, "max_listeners_per_tenant": 2}
    async with running(settings(tmp_path, mcp=bounds)) as crib, serving(crib) as http:
        clients = [McpClient(http) for _ in range(3)]
        for client in clients:
            await client.begin()
        async with listening(clients[0]) as one, listening(clients[1]) as two, listening(clients[2]) as three:
            assert [one.status_code, two.status_code, three.status_code] == [200, 200, 429]
            assert text_of(await clients[2].call("echo", {"text": "x"}, progressToken=1)) == "x"
        await until(lambda: not crib.server.listeners.open)


async def test_when_too_many_streams_are_open_a_call_is_answered_whole(tmp_path: Path) -> None:
    async with running(settings(tmp_path, http={"max_streams": 1})) as crib, serving(crib) as http:
        client = McpClient(http)
        await client.begin()
        async with begun(client, "sleep", {"seconds": 60}) as stream:
            await anext(events(stream))
            message = client.message("tools/call", {"name": "foreign_steps", "_meta": {"progressToken": 1}})
            answer = await client.post(message)
            assert answer.headers["content-type"] == "application/json"
            assert text_of(answer.json()["result"]) == "done"
            await client.post(note("notifications/cancelled", {"requestId": 7}))


async def test_sessions_go_on_after_a_crash_and_their_calls_are_still_told(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    runtime = new_runtime(chosen)
    async with crashing(chosen, runtime) as crib:
        client = await connected(crib, "2025-06-18", capabilities={"elicitation": {}})
        assert text_of(await client.call("count")) == "count 1"
        idle = await connected(crib)
    async with running(chosen, runtime) as crib:
        again = McpClient(crib.client, session=client.session)
        assert text_of(await again.call("count")) == "count 2"
        lost = McpClient(crib.client, session=idle.session)
        assert (await lost.post(lost.message("ping", {}))).status_code == 404


async def test_a_session_without_calls_is_forgotten_when_unused_unless_it_listens(tmp_path: Path) -> None:
    async with running(settings(tmp_path, session={"idle_s": 2})) as crib, serving(crib) as http:
        unused, listener = McpClient(http), McpClient(http)
        await unused.begin()
        await listener.begin()
        async with listening(listener):
            await asyncio.sleep(2.1)
            assert await listener.result("ping") == {}
            assert (await unused.post(unused.message("ping", {}))).status_code == 404


@pytest.mark.parametrize("bound", ["_MOST", "_MOST_OF_KEY"])
async def test_more_sessions_than_are_kept_push_out_the_one_that_is_unused_longest(
    crib: Crib, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(f"toolserver.api.mcp_sessions.{bound}", 5)
    working, idle = await connected(crib), await connected(crib)
    await working.call("count")
    for _ in range(5):
        last = await connected(crib)
        await last.result("ping")
    assert (await idle.post(idle.message("ping", {}))).status_code == 404
    assert text_of(await working.call("count")) == "count 2"
