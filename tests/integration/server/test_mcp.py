"""/mcp of a server in a process of its own, with real sandboxes: what clients see across calls, kills, floods and a stop."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.server_process import CANARY, ServerProcess
from tests.unit.toolserver.mcp_client import McpClient, events, note, text_of

RUNTIMES = [pytest.param("docker", marks=pytest.mark.docker), pytest.param("bubblewrap", marks=pytest.mark.bubblewrap)]
MODERN, NEWEST = "2026-07-28", "2025-11-25"


@pytest.fixture(scope="module", params=RUNTIMES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    settings = {
        "TOOLSERVER_MCP__EGRESS": "allow",
        "TOOLSERVER_MCP__EGRESS_ALLOW": '["no-such-host.invalid:443"]',
        "TOOLSERVER_HTTP__MAX_CONNECTIONS": "300",
    }
    process = ServerProcess(request.param, tmp_path_factory.mktemp("mcp"), settings).start()
    yield process
    process.end()


def http(server: ServerProcess) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False, limits=limits)


async def connected(client: httpx.AsyncClient, server: ServerProcess, version: str = NEWEST) -> McpClient:
    found = McpClient(client, modern=version == MODERN, key=server.key)
    if not found.modern:
        await found.begin(version)
    return found


@pytest.mark.parametrize("version", [NEWEST, MODERN])
async def test_interpreter_files_and_shell_are_one_session(server: ServerProcess, version: str) -> None:
    async with http(server) as client:
        mcp = await connected(client, server, version)
        await mcp.call("python_execute", {"code": "open('a.txt', 'w').write('from Python'); x = 41"})
        assert "42" in text_of(await mcp.call("python_execute", {"code": "print(x + 1)"}))
        assert "from Python" in text_of(await mcp.call("shell_execute", {"command": "cat a.txt"}))
        failed = await mcp.call("python_execute", {"code": "raise ValueError('no')"})
        assert (failed["isError"], "ValueError: no" in text_of(failed)) == (True, True)
        session = failed["_meta"]["toolcrib/session"]
        head = {"Authorization": f"Bearer {server.key}"}
        assert (await client.get(f"/v1/sessions/{session}/files/a.txt", headers=head)).text == "from Python"
        shown = (await client.get(f"/v1/sessions/{session}", headers=head)).json()
        assert shown["egress"]["mode"] == "allow"
        assert CANARY not in json.dumps(failed)
        await client.delete(f"/v1/sessions/{session}", headers=head)


async def counted(mcp: McpClient, count: int) -> bool:
    """Whether in the sandbox so many programs are running, soon."""
    for _ in range(50):
        found = await mcp.call("shell_execute", {"command": "pgrep -xc sleep || true"})
        if text_of(found).split()[0] == str(count):
            return True
        await asyncio.sleep(0.1)
    return False


@pytest.mark.parametrize("version", [NEWEST, MODERN])
async def test_a_cancelled_call_ends_its_program(server: ServerProcess, version: str) -> None:
    async with http(server) as client:
        mcp = await connected(client, server, version)
        await mcp.call("shell_execute", {"command": "true"})
        params = {"name": "shell_execute", "arguments": {"command": "sleep 4711"}, "_meta": {"progressToken": 1}}
        message, head = mcp.message("tools/call", params, "long"), mcp.head("tools/call", params)
        async with client.stream("POST", "/mcp", json=message, headers=head) as stream:
            assert stream.status_code == 200
            assert await counted(mcp, 1)
            if not mcp.modern:
                await mcp.post(note("notifications/cancelled", {"requestId": "long"}))
        assert await counted(mcp, 0)


async def test_output_comes_while_the_program_runs(server: ServerProcess) -> None:
    async with http(server) as client:
        mcp = await connected(client, server)
        await mcp.call("python_execute", {"code": "import time"})
        await mcp.result("logging/setLevel", {"level": "debug"})
        code = "for n in range(4):\n    print('line', n, flush=True)\n    time.sleep(0.5)"
        params = {"name": "python_execute", "arguments": {"code": code}}
        times: list[tuple[float, Any]] = []
        message, head = mcp.message("tools/call", params), mcp.head("tools/call", params)
        async with client.stream("POST", "/mcp", json=message, headers=head) as stream:
            async for _, told in events(stream):
                times.append((time.monotonic(), told))
        said = [(at, told["params"]["data"]) for at, told in times if told and told.get("method")]
        assert "".join(text for _, text in said) == "".join(f"line {n}\n" for n in range(4))
        assert times[-1][0] - said[0][0] > 1


async def test_a_session_goes_on_after_the_server_was_killed(server: ServerProcess) -> None:
    async with http(server) as client:
        mcp = await connected(client, server)
        await mcp.call("python_execute", {"code": "x = 'kept'"})
        idle = await connected(client, server)
    server.kill()
    server.start()
    async with http(server) as client:
        again = McpClient(client, key=server.key, session=mcp.session)
        assert "kept" in text_of(await again.call("python_execute", {"code": "print(x)"}))
        lost = McpClient(client, key=server.key, session=idle.session)
        assert (await lost.post(lost.message("ping", {}))).status_code == 404
        assert (await again.end()).status_code == 204


async def test_a_flood_of_streams_is_bounded_and_others_are_served(server: ServerProcess) -> None:
    async with http(server) as client, http(server) as beside:
        mcp = await connected(client, server, MODERN)
        params = {"notifications": {"toolsListChanged": True}}
        head = mcp.head("subscriptions/listen", params)
        statuses: list[int] = []

        async def listen(number: int) -> None:
            message = mcp.message("subscriptions/listen", params, number)
            try:
                async with client.stream("POST", "/mcp", json=message, headers=head) as stream:
                    statuses.append(stream.status_code)
                    if stream.status_code == 200:
                        await asyncio.sleep(60)
            except httpx.HTTPError:
                statuses.append(0)

        flood = [asyncio.create_task(listen(number)) for number in range(1200)]
        for _ in range(300):
            if len(statuses) >= 1200:
                break
            await asyncio.sleep(0.1)
        assert statuses.count(200) == 64
        assert set(statuses) <= {0, 200, 429, 503}
        good = await connected(beside, server, MODERN)
        assert "2" in text_of(await good.call("python_execute", {"code": "1 + 1"}))
        for task in flood:
            task.cancel()
        await asyncio.wait(flood)


def test_a_stop_ends_open_streams_within_seconds(server: ServerProcess) -> None:
    """The last one: the server is gone after it."""
    head = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
    first = {"protocolVersion": NEWEST, "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    with server.client() as client, ExitStack() as streams:
        begun = client.post(
            "/mcp", json={"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": first}, headers=head
        )
        head["Mcp-Session-Id"] = begun.headers["mcp-session-id"]
        params = {"name": "python_execute", "arguments": {"code": "import time; time.sleep(300)"}}
        asked = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {**params, "_meta": {"progressToken": 1}}}
        calling = streams.enter_context(client.stream("POST", "/mcp", json=asked, headers=head))
        waiting = streams.enter_context(client.stream("GET", "/mcp", headers={**head, "Accept": "text/event-stream"}))
        assert (calling.status_code, waiting.status_code) == (200, 200)
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < 20
        end = [json.loads(line[6:]) for line in calling.iter_lines() if line.startswith("data: {")][-1]
        assert end["id"] == 1
        assert end["result"]["isError"] is True
        assert list(waiting.iter_lines())
