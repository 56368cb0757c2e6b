"""What /mcp does with messages, headers and origins that are wrong, huge or somebody else's."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.toolserver import crib as cribs
from tests.unit.toolserver.crib import KEY, Crib, running
from tests.unit.toolserver.mcp_client import HEAD, McpClient, connected, text_of
from toolserver.api.mcp_messages import RpcFault, read
from toolserver.api.mcp_results import page
from toolserver.store import keys

BEARER = {"Authorization": f"Bearer {KEY}"}
PING = {"jsonrpc": "2.0", "id": 1, "method": "ping"}


async def post(crib: Crib, body: Any, **headers: str) -> httpx.Response:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await crib.client.post("/mcp", content=raw, headers={**HEAD, **BEARER, **headers})


def code_of(answer: httpx.Response) -> tuple[int, int]:
    body = answer.json()
    assert (body["jsonrpc"], "result" in body) == ("2.0", False)
    assert len(body["error"]["message"]) > 8
    return answer.status_code, body["error"]["code"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", (400, -32700)),
        (b"{", (400, -32700)),
        (b"\xff\xfe", (400, -32700)),
        (b'{"jsonrpc": "2.0", "id": 1, "id": 2, "method": "ping"}', (400, -32700)),
        (b'{"jsonrpc": "2.0", "id": NaN, "method": "ping"}', (400, -32700)),
        (b"[" * 5000, (400, -32700)),
        (b'{"a":' * 200 + b"1" + b"}" * 200, (400, -32700)),
        (b"5", (400, -32600)),
        (b"null", (400, -32600)),
        (b"{}", (400, -32600)),
        ({**PING, "jsonrpc": "1.0"}, (400, -32600)),
        ({**PING, "id": None}, (400, -32600)),
        ({**PING, "id": 1.5}, (400, -32600)),
        ({**PING, "id": True}, (400, -32600)),
        ({**PING, "id": [1]}, (400, -32600)),
        ({**PING, "id": 10**30}, (400, -32600)),
        ({**PING, "id": "x" * 257}, (400, -32600)),
        ({**PING, "method": 5}, (400, -32600)),
        ({**PING, "method": ""}, (400, -32600)),
        ({**PING, "method": "x" * 100_000}, (400, -32600)),
        ({**PING, "params": [1]}, (400, -32602)),
        ({**PING, "params": {"_meta": 5}}, (400, -32602)),
        ({"jsonrpc": "2.0", "id": 1}, (400, -32600)),
        ({"jsonrpc": "2.0", "id": 1, "result": {}, "error": {}}, (400, -32600)),
        (PING, (400, -32600)),
        ([PING], (400, -32600)),
        ({**PING, "method": "initialize"}, (400, -32602)),
        ({**PING, "method": "initialize", "params": {"protocolVersion": 5}}, (400, -32602)),
    ],
    ids=lambda value: None if isinstance(value, tuple) else repr(value)[:40],
)
async def test_what_is_no_request_is_refused_by_name(crib: Crib, body: Any, expected: tuple[int, int]) -> None:
    assert code_of(await post(crib, body)) == expected


async def test_a_body_that_is_too_large_is_413(tmp_path: Path) -> None:
    async with running(cribs.settings(tmp_path, http={"max_body_mb": 1})) as crib:
        assert (await post(crib, b" " * (1 << 20) + b"{}")).status_code == 413


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Accept": "application/json"}, 406),
        ({"Accept": "text/event-stream"}, 406),
        ({"Accept": "text/html"}, 406),
        ({"Accept": "application/json, text/event-stream;q=0"}, 406),
        ({"Accept": "*/*"}, 200),
        ({"Accept": "application/*, text/*"}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Content-Encoding": "gzip"}, 415),
        ({"MCP-Protocol-Version": "1999-01-01"}, 400),
        ({"MCP-Protocol-Version": "x" * 5000}, 400),
        ({"MCP-Protocol-Version": "2024-11-05"}, 200),
        ({"Mcp-Session-Id": "mcp_" + "0" * 32}, 404),
        ({"Mcp-Session-Id": "x" * 9000}, 404),
        ({"Mcp-Session-Id": ""}, 404),
        ({"Mcp-Session-Id": "ses_" + "0" * 24}, 404),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_headers_that_are_wrong_are_refused(crib: Crib, headers: dict[str, str], status: int) -> None:
    client = await connected(crib)
    answer = await client.post(PING, **headers)
    assert answer.status_code == status
    if status != 200:
        code_of(answer)


@pytest.mark.parametrize(
    ("headers", "meta", "status", "code"),
    [
        ({}, {"io.modelcontextprotocol/protocolVersion": "2030-01-01"}, 400, -32020),
        (
            {"MCP-Protocol-Version": "2030-01-01"},
            {"io.modelcontextprotocol/protocolVersion": "2030-01-01"},
            400,
            -32022,
        ),
        ({"MCP-Protocol-Version": "2025-11-25"}, {}, 400, -32020),
        ({"Mcp-Method": "tools/list"}, {}, 400, -32020),
        ({"Mcp-Name": "count"}, {}, 400, -32020),
        ({"Mcp-Name": "=?base64?!!?="}, {}, 400, -32020),
        ({"Mcp-Name": "=?base64?ZWNobw==?="}, {}, 200, 0),
        ({}, {"io.modelcontextprotocol/protocolVersion": 5}, 400, -32602),
        ({}, {"io.modelcontextprotocol/clientCapabilities": 5}, 400, -32602),
    ],
)
async def test_a_stateless_request_must_say_the_same_in_headers_and_body(
    crib: Crib, headers: dict[str, str], meta: dict[str, Any], status: int, code: int
) -> None:
    client = McpClient(crib.client, modern=True)
    params = {"name": "echo", "arguments": {"text": "x"}, "_meta": meta}
    answer = await client.post(client.message("tools/call", params), **headers)
    assert answer.status_code == status
    assert answer.json().get("error", {}).get("code", 0) == code
    if code == -32022:
        assert "2026-07-28" in answer.json()["error"]["data"]["supported"]


async def test_a_stateless_request_without_what_it_must_have_is_refused(crib: Crib) -> None:
    client = McpClient(crib.client, modern=True)
    message = client.message("tools/list", {})
    for name in ("protocolVersion", "clientCapabilities"):
        meta = {key: value for key, value in message["params"]["_meta"].items() if not key.endswith(name)}
        answer = await client.post({**message, "params": {"_meta": meta}})
        assert code_of(answer) == (400, -32602)
    for name in ("MCP-Protocol-Version", "Mcp-Method"):
        head = {key: value for key, value in client.head("tools/list", {}).items() if key != name}
        answer = await crib.client.post("/mcp", json=message, headers=head)
        assert code_of(answer) == (400, -32020)
    batch = await client.post([message], **{"MCP-Protocol-Version": "2026-07-28"})
    assert code_of(batch) == (400, -32600)
    response = await client.post({"jsonrpc": "2.0", "id": 1, "result": {}}, **{"MCP-Protocol-Version": "2026-07-28"})
    assert code_of(response) == (400, -32600)
    for method in ("GET", "DELETE"):
        answer = await crib.client.request(method, "/mcp", headers=client.head("", {}))
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize("version", ["2025-11-25", "2026-07-28"])
async def test_methods_that_are_not_there_are_told(crib: Crib, version: str) -> None:
    client = await connected(crib, version)
    for method in ("resources/list", "prompts/get", "tasks/get", "completion/complete", "tools", "\n", "__class__"):
        answer = await client.post(client.message(method, {"name": "x"}), **{"Mcp-Name": "x"})
        status = 404 if client.modern else 200
        if method == "\n" and client.modern:
            continue  # can't be sent as a header
        assert code_of(answer) == (status, -32601), method


WRONG_ARGUMENTS: list[Any] = [[], "x", 5, True, {"text": {"a": [1] * 1000}}, {"\x00": 1}, {"text": "x", "more": 1}]


@pytest.mark.parametrize("arguments", WRONG_ARGUMENTS, ids=lambda value: repr(value)[:30])
async def test_arguments_of_no_sense_never_reach_a_tool(crib: Crib, arguments: Any) -> None:
    client = await connected(crib)
    result = await client.result("tools/call", {"name": "echo", "arguments": arguments})
    assert (result["isError"], result["_meta"]["toolcrib/error"]["code"]) == (True, "invalid_arguments")


@pytest.mark.parametrize("name", [None, 5, "", ["echo"], {}])
async def test_a_tool_without_a_name_is_refused(crib: Crib, name: Any) -> None:
    client = await connected(crib)
    assert (await client.ask("tools/call", {"name": name}))["error"]["code"] == -32602


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:8500"}, 403),
        ({"Host": "localhost.evil.example"}, 403),
        ({"Host": "user@evil.example"}, 403),
        ({"Host": "["}, 403),
        ({"Host": ""}, 403),
        ({"Host": "localhost:8500"}, 200),
        ({"Host": "127.0.0.1:1"}, 200),
        ({"Host": "[::1]:1"}, 200),
        ({"Host": "tools.example"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://localhost.evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": ""}, 403),
        ({"Origin": "http://["}, 403),
        ({"Origin": "https://good.example:99"}, 403),
        ({"Origin": "https://good.example"}, 200),
        ({"Origin": "http://localhost:3000"}, 200),
        ({"Origin": "http://127.0.0.1:3000"}, 200),
    ],
    ids=str,
)
async def test_requests_from_elsewhere_are_refused(tmp_path: Path, headers: dict[str, str], status: int) -> None:
    http = {"allowed_hosts": ["tools.example"], "allowed_origins": ["https://good.example"]}
    async with running(cribs.settings(tmp_path, http=http)) as crib:
        client = await connected(crib)
        assert (await client.post(PING, **headers)).status_code == status
        if status == 403:
            for method in ("GET", "DELETE"):
                answer = await crib.client.request(method, "/mcp", headers=client.head("", {}) | headers)
                assert code_of(answer) == (403, 403)


async def test_browsers_are_told_which_pages_may_use_it(tmp_path: Path) -> None:
    good, preflight = "https://good.example", {"Access-Control-Request-Method": "POST", "Host": "localhost"}
    async with running(cribs.settings(tmp_path, http={"allowed_origins": [good]})) as crib:
        crib.client.headers.pop("Authorization")
        asked = await crib.client.options("/mcp", headers={"Origin": good, **preflight})
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (204, good)
        assert "Mcp-Session-Id" in asked.headers["access-control-allow-headers"]
        client = await connected(crib)
        answer = await client.post(PING, Origin=good)
        assert (answer.headers["access-control-allow-origin"], answer.headers["vary"]) == (good, "Origin")
        refused = await crib.client.post(
            "/mcp", json=PING, headers={"Origin": good}
        )  # without a key, readable all the same
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, good)
        for origin, path in (("https://evil.example", "/mcp"), (good, "/v1/tools")):
            elsewhere = await crib.client.options(path, headers={"Origin": origin, **preflight})
            assert elsewhere.status_code == 401
            assert "access-control-allow-origin" not in elsewhere.headers


async def test_a_server_for_other_machines_takes_any_host_unless_it_names_some(tmp_path: Path) -> None:
    async with running(cribs.settings(tmp_path, http={"host": "0.0.0.0"})) as crib:
        assert (await (await connected(crib)).post(PING, Host="toolserver")).status_code == 200


async def test_a_session_of_another_tenant_is_as_one_that_never_was(crib: Crib) -> None:
    mine = await crib.session()
    await crib.server.database.write(lambda c: keys.create(c, "foe", "foe", "other", "admin"))
    foe = McpClient(crib.client, modern=True, key="foe")
    asked = {"name": "count", "arguments": {}}
    theirs = await foe.ask("tools/call", {**asked, "_meta": {"toolcrib/session": mine}})
    never = await foe.ask("tools/call", {**asked, "_meta": {"toolcrib/session": "ses_" + "0" * 24}})
    assert theirs["error"]["data"]["code"] == never["error"]["data"]["code"] == "session_not_found"
    assert theirs["error"]["message"] == never["error"]["message"]
    await crib.call(mine, "count", key="theirs")
    for tool in ("call_wait", "call_cancel"):
        answer = await foe.ask("tools/call", {"name": tool, "arguments": {"call_id": "theirs"}})
        assert answer["error"]["data"]["code"] == "call_not_found"
    own = await foe.call("count", toolcrib__idempotency_key="theirs")
    assert text_of(own) == "count 1"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(["jsonrpc", "id", "method", "params", "result", "error", "_meta"])
VALUES = JSON | st.sampled_from(["2.0", "tools/call", "tools/list", "ping", {"_meta": {}}, {"name": "echo"}])


@given(JSON | st.dictionaries(FIELDS, VALUES, max_size=6))
def test_any_message_is_read_or_refused(message: Any) -> None:
    with contextlib.suppress(RpcFault):
        rpc = read(message)
        assert rpc.kind in ("request", "notification", "response")
        assert isinstance(rpc.meta, dict)


@given(JSON | st.text())
def test_any_cursor_is_read_or_refused(cursor: Any) -> None:
    tools = cribs.catalog().tools()
    with contextlib.suppress(RpcFault):
        shown, _ = page(tools, cursor, 3)
        assert len(shown) <= 3
