"""/mcp: the tools for MCP clients of every revision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.toolserver.crib import KEY, Crib, detail, running, settings
from tests.unit.toolserver.mcp_client import McpClient, connected, messages, note, text_of
from toolserver.store import keys

OLD = ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"]
ALL = [*OLD, "2026-07-28"]


async def with_key(crib: Crib, name: str, tenant: str = "default", scope: str = "use") -> str:
    await crib.server.database.write(lambda c: keys.create(c, name, name, tenant, scope))
    return name


def sessions_of(crib: Crib) -> list[Any]:
    return crib.server.registry.listing("default")


@pytest.mark.parametrize("version", OLD)
async def test_initialize_agrees_on_the_revision_that_is_asked_for(crib: Crib, version: str) -> None:
    client = McpClient(crib.client)
    told = await client.begin(version)
    assert told["protocolVersion"] == version
    assert told["capabilities"]["tools"] == {"listChanged": True}
    assert told["serverInfo"]["name"] == "toolcrib"
    assert await client.result("ping") == {}


@pytest.mark.parametrize("version", ["1999-01-01", "2026-07-28", "x" * 5000, ""])
async def test_initialize_of_any_other_revision_agrees_on_the_newest_with_sessions(crib: Crib, version: str) -> None:
    assert (await McpClient(crib.client).begin(version))["protocolVersion"] == "2025-11-25"


async def test_discover_tells_the_revisions_and_what_there_is(crib: Crib) -> None:
    client = McpClient(crib.client, modern=True)
    told = await client.result("server/discover")
    assert told["supportedVersions"] == ALL[::-1]
    assert (told["resultType"], told["cacheScope"]) == ("complete", "private")
    assert told["_meta"]["io.modelcontextprotocol/serverInfo"]["name"] == "toolcrib"
    assert "tools" in told["capabilities"]


@pytest.mark.parametrize("version", ALL)
async def test_calls_share_one_session_of_their_client(crib: Crib, version: str) -> None:
    client = await connected(crib, version)
    assert sessions_of(crib) == []  # nothing is started before it is needed
    assert text_of(await client.call("count")) == "count 1"
    result = await client.call("count")
    assert (text_of(result), result["isError"]) == ("count 2", False)
    (session,) = sessions_of(crib)
    assert result["_meta"]["toolcrib/session"] == session.session_id
    assert result["_meta"]["toolcrib/outcome"]["usage"]["wall_ms"] >= 0
    other = await connected(crib, version, headers={"Toolcrib-Session": "other"})
    assert text_of(await other.call("count")) == "count 1"


@pytest.mark.parametrize("version", ALL)
async def test_a_tool_that_fails_is_a_result_that_its_model_reads(crib: Crib, version: str) -> None:
    client = await connected(crib, version)
    result = await client.call("fail", {"message": "It broke."})
    assert result["isError"] is True
    assert "It broke." in text_of(result)
    assert result["_meta"]["toolcrib/error"]["code"] == "tool_failed"
    crashed = await client.call("exit", {"cause": "oom"})
    assert (crashed["isError"], crashed["_meta"]["toolcrib/error"]["code"]) == (True, "oom_killed")


@pytest.mark.parametrize("version", ALL)
async def test_arguments_that_do_not_fit_are_told_as_the_revision_wants_it(crib: Crib, version: str) -> None:
    client = await connected(crib, version)
    answer = await client.ask("tools/call", {"name": "echo", "arguments": {"text": 5}})
    if version in ("2025-11-25", "2026-07-28"):
        assert answer["result"]["isError"] is True
        assert "/arguments/text" in text_of(answer["result"])
    else:
        assert answer["error"]["code"] == -32602
        assert answer["error"]["data"]["errors"][0]["pointer"] == "/arguments/text"


@pytest.mark.parametrize("version", ALL)
async def test_a_tool_that_is_not_there_is_an_error_and_starts_nothing(crib: Crib, version: str) -> None:
    client = await connected(crib, version)
    error = (await client.ask("tools/call", {"name": "ecko", "arguments": {}}))["error"]
    assert (error["code"], error["data"]["suggestions"][0]) == (-32602, "echo")
    assert sessions_of(crib) == []


@pytest.mark.parametrize("version", ALL)
async def test_all_tools_are_listed_page_by_page(tmp_path: Path, version: str) -> None:
    async with running(settings(tmp_path, mcp={"page_tools": 4})) as crib:
        client = await connected(crib, version)
        pages, cursor = [], None
        while True:
            told = await client.result("tools/list", {} if cursor is None else {"cursor": cursor})
            pages.append([tool["name"] for tool in told["tools"]])
            assert all(tool["inputSchema"]["type"] == "object" for tool in told["tools"])
            if (cursor := told.get("nextCursor")) is None:
                break
        names = [name for page in pages for name in page]
        known = [tool["name"] for tool in (await crib.client.get("/v1/tools")).json()["tools"]]
        assert names == [*known, "call_wait", "call_cancel", "call_answer"]
        assert {len(page) for page in pages[:-1]} == {4}
        for wrong in ("x", "", 5, "bm90aGluZw=="):
            assert (await client.ask("tools/list", {"cursor": wrong}))["error"]["code"] == -32602


async def test_a_session_is_its_keys_alone(crib: Crib) -> None:
    client = await connected(crib)
    await client.call("count")
    for key in (await with_key(crib, "mate"), await with_key(crib, "foe", "other")):
        thief = McpClient(crib.client, key=key, session=client.session)
        answer = await thief.post(thief.message("tools/list", {}))
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, 404)
        assert (await thief.end()).status_code == 404
        modern = McpClient(crib.client, modern=True, key=key)
        assert text_of(await modern.call("count")) == "count 1"
    assert text_of(await client.call("count")) == "count 2"


async def test_nobody_lays_out_a_session_for_an_mcp_client(crib: Crib) -> None:
    labels = {"mcp.session": "default", "mcp.key": "some", "mine": "x"}
    told = detail(await crib.client.post("/v1/sessions", json={"labels": labels}), 422, "invalid_arguments")
    assert [error["pointer"] for error in told["errors"]] == ["/labels/mcp.session", "/labels/mcp.key"]


async def test_the_end_of_an_mcp_session_ends_what_was_made_for_it(crib: Crib) -> None:
    client = await connected(crib)
    await client.call("count")
    assert (await client.end()).status_code == 204
    assert sessions_of(crib) == []
    answer = await client.post(client.message("ping", {}))
    assert answer.status_code == 404
    assert (await client.end()).status_code == 404


async def test_a_session_that_was_closed_is_404_to_its_client(crib: Crib) -> None:
    client = await connected(crib)
    await client.call("count")
    assert (await crib.client.delete(f"/v1/sessions/{sessions_of(crib)[0].session_id}")).status_code == 204
    assert (await client.post(client.message("ping", {}))).status_code == 404


async def test_a_stateless_client_is_told_that_its_session_was_begun_anew(crib: Crib) -> None:
    client = await connected(crib, "2026-07-28")
    await client.call("count")
    await crib.client.delete(f"/v1/sessions/{sessions_of(crib)[0].session_id}")
    result = await client.call("count")
    assert "a new one was begun" in text_of(result)
    assert "count 1" in text_of(result)
    assert text_of(await client.call("count")) == "count 2"


async def test_a_stateless_client_may_name_a_session_of_its_tenant(crib: Crib) -> None:
    mine = await crib.session()
    await crib.call(mine, "count")
    client = await connected(crib, "2026-07-28", headers={"Toolcrib-Session": mine})
    assert text_of(await client.call("count")) == "count 2"
    assert "web_echo" not in str(await client.result("tools/list"))
    assert text_of(await client.call("count", toolcrib__session="b")) == "count 1"
    assert "web_echo" in str(await client.result("tools/list", {"_meta": {"toolcrib/session": "b"}}))
    for name in ("", "a b", "ü", "x" * 65, 5, None, ["a"]):
        answer = await client.ask("tools/call", {"name": "count", "_meta": {"toolcrib/session": name}})
        assert answer["error"]["code"] == -32602
    gone = await client.ask("tools/call", {"name": "count", "_meta": {"toolcrib/session": "ses_" + "0" * 24}})
    assert gone["error"]["data"]["code"] == "session_not_found"


async def test_progress_and_output_are_told_while_a_call_runs(crib: Crib) -> None:
    client = await connected(crib)
    await client.result("logging/setLevel", {"level": "info"})
    assert text_of(await client.call("foreign_steps", progressToken="t")) == "done"
    steps = [one["params"] for one in client.heard if one.get("method") == "notifications/progress"]
    assert [step["progress"] for step in steps] == sorted({step["progress"] for step in steps})
    assert steps[-1] == {"progressToken": "t", "progress": 3, "total": 3, "message": "step 3"}
    await client.call("say", {"lines": ["one\n", "two\n"], "pause_s": 0.05})
    said = [one["params"] for one in client.heard if one.get("method") == "notifications/message"]
    assert "".join(one["data"] for one in said) == "one\ntwo\n"
    assert {(one["level"], one["logger"]) for one in said} == {("info", "stdout")}
    await client.result("logging/setLevel", {"level": "error"})
    client.heard.clear()
    await client.call("say", {"lines": ["one\n"]})
    assert len(client.heard) == 1


async def test_a_call_repeated_with_its_key_runs_once(crib: Crib) -> None:
    client = await connected(crib, "2026-07-28")
    first = await client.call("count", toolcrib__idempotency_key="k")
    again = await client.call("count", toolcrib__idempotency_key="k")
    assert text_of(first) == text_of(again) == "count 1"
    assert (await crib.client.get("/v1/calls/k")).json()["content"] == first["content"]
    for meta in ({"toolcrib/idempotency_key": "a b"}, {"toolcrib/deadline_s": 0}, {"toolcrib/deadline_s": 1e9}):
        answer = await client.ask("tools/call", {"name": "count", "_meta": meta})
        assert answer["result"]["isError"] is True


async def test_a_deadline_ends_a_call(crib: Crib) -> None:
    client = await connected(crib)
    result = await client.call("sleep", {"seconds": 30}, toolcrib__deadline_s=0.6)
    assert result["_meta"]["toolcrib/error"]["code"] == "deadline_exceeded"


async def test_a_quota_is_an_error_with_the_time_to_wait(tmp_path: Path) -> None:
    async with running(settings(tmp_path, session={"max_sessions_per_tenant": 1}, queue={"wait_s": 0})) as crib:
        await crib.session()
        client = await connected(crib)
        error = (await client.ask("tools/call", {"name": "count"}))["error"]
        assert (error["code"], error["data"]["code"]) == (429, "quota_exceeded")


async def test_a_key_that_may_only_read_lists_and_calls_nothing(crib: Crib) -> None:
    client = await connected(crib, key=await with_key(crib, "reader", scope="read"))
    assert len((await client.result("tools/list"))["tools"]) > 3
    error = (await client.ask("tools/call", {"name": "count"}))["error"]
    assert (error["code"], error["data"]["code"]) == (403, "forbidden")
    assert (await client.end()).status_code == 204


async def test_a_batch_is_answered_together_where_the_revision_has_them(crib: Crib) -> None:
    client = await connected(crib, "2025-03-26")
    batch = [
        client.message("tools/call", {"name": "echo", "arguments": {"text": "a"}}, 1),
        note("notifications/nothing"),
        client.message("ping", {}, 2),
        client.message("nowhere", {}, 3),
        client.message("tools/call", {"name": "echo", "arguments": {}}, 4),
        client.message("initialize", {}, 5),
    ]
    found = {one["id"]: one for one in messages(await client.post(batch))}
    assert text_of(found[1]["result"]) == "a"
    assert found[2]["result"] == {}
    assert [found[number]["error"]["code"] for number in (3, 4, 5)] == [-32601, -32602, -32600]
    assert (await client.post([note("notifications/nothing")])).status_code == 202
    for wrong in ([], [client.message("ping", {}, 1)] * 2, [client.message("ping", {}, n) for n in range(33)], [5]):
        assert (await client.post(wrong)).status_code == 400
    newer = await connected(crib, "2025-06-18")
    assert (await newer.post([newer.message("ping", {})])).status_code == 400


async def test_mcp_calls_are_in_the_journal_as_all_others(crib: Crib) -> None:
    client = await connected(crib, "2026-07-28")
    await client.call("echo", {"text": "x"})
    segments = sorted((crib.server.settings.state_dir / "journal").glob("*"))
    assert any(b'"echo"' in one.read_bytes() for one in segments if one.is_file())
    assert 'toolserver_calls_total{code="ok",tool="echo"} 1' in crib.server.metrics.render() or (
        'toolserver_calls_total{tool="echo",code="ok"} 1' in crib.server.metrics.render()
    )
    assert KEY not in crib.server.metrics.render()


async def test_initialize_is_no_method_of_the_stateless_revision(crib: Crib) -> None:
    client = McpClient(crib.client, modern=True)
    answer = await client.post(client.message("initialize", {"protocolVersion": "2026-07-28"}))
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, -32601)


async def test_blanks_around_header_values_mean_nothing(crib: Crib) -> None:
    client = McpClient(crib.client, modern=True)
    blanks = {"Mcp-Name": "  echo\t", "Mcp-Method": " tools/call ", "MCP-Protocol-Version": " 2026-07-28 "}
    message = client.message("tools/call", {"name": "echo", "arguments": {"text": "x"}})
    assert text_of(messages(await client.post(message, **blanks))[0]["result"]) == "x"
