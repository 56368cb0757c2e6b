from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.toolserver.crib import KEY, Crib, detail, running, settings
from tests.unit.toolserver.events_client import EVENTS, Heard, heard, parsed, serving
from toolserver.api import edge
from toolserver.calls import live
from toolserver.sandbox.call_place import OutputPart
from toolserver.sandbox.tool_sandbox import ToolSandbox


async def ask(client: httpx.AsyncClient, session: str, tool: str, arguments: Any, **more: Any) -> httpx.Response:
    headers = {**EVENTS, **more.pop("headers", {})}
    body = {"arguments": arguments, **more}
    return await client.post(f"/v1/sessions/{session}/tools/{tool}", json=body, headers=headers)


async def test_a_call_is_told_from_started_to_the_body_of_its_outcome(crib: Crib) -> None:
    session = await crib.session()
    answer = await ask(crib.client, session, "say", {"lines": ["one\n", "zwei ü\n"], "pause_s": 0.05})
    events = parsed(answer.text)
    assert answer.status_code == 200
    assert [event.name for event in events] == ["started", "stdout", "stdout", "outcome"]
    call_id = events[0].data["call_id"]
    assert events[0].data == {
        "call_id": call_id,
        "session_id": session,
        "tool": "say",
        "trace_id": answer.headers["traceparent"].split("-")[1],
    }
    assert next(iter(events[0].data)) == "call_id"
    assert [(event.data["text"], event.id) for event in events[1:3]] == [("one\n", "4"), ("zwei ü\n", "12")]
    assert events[-1].data == {"status": 200, "body": (await crib.client.get(f"/v1/calls/{call_id}")).json()}


async def test_output_is_heard_while_the_call_runs(crib: Crib) -> None:
    session = await crib.session()
    async with serving(crib) as client:
        path, body = f"/v1/sessions/{session}/tools/say", {"arguments": {"lines": ["one", "two"], "pause_s": 0.5}}
        async with client.stream("POST", path, json=body, headers=EVENTS) as answer:
            loop = asyncio.get_running_loop()
            times = {event.name + str(event.data.get("text", "")): loop.time() async for event in heard(answer)}
    assert times["outcome"] - times["stdoutone"] > 0.6


async def test_an_error_that_ends_a_call_is_its_outcome(crib: Crib) -> None:
    session = await crib.session()
    events = parsed((await ask(crib.client, session, "fail", {"message": "It broke."})).text)
    assert [event.name for event in events] == ["started", "outcome"]
    assert events[-1].data["status"] == 500
    assert events[-1].data["body"]["detail"]["code"] == "tool_failed"


@pytest.mark.parametrize(
    ("session", "tool", "arguments", "status", "code"),
    [
        ("ses_none", "echo", {"text": "x"}, 404, "session_not_found"),
        (None, "nothing", {}, 404, "tool_not_found"),
        (None, "echo", {"bogus": 1}, 422, "invalid_arguments"),
    ],
)
async def test_what_is_refused_before_it_begins_is_plain_json(
    crib: Crib, session: str | None, tool: str, arguments: Any, status: int, code: str
) -> None:
    answer = await ask(crib.client, session or await crib.session(), tool, arguments)
    assert answer.headers["content-type"] == "application/json"
    detail(answer, status, code)
    assert crib.server.streams.open == 0


@pytest.mark.parametrize(
    ("accept", "events"),
    [
        ("text/event-stream", True),
        ("application/json, text/event-stream", True),
        ("application/json, text/event-stream;q=0.5", False),
        ("text/event-stream;q=0", False),
        ("*/*", False),
        ("text/event-stream; charset=utf-8; q=1.0", True),
        ("Text/Event-Stream", True),
        ("text/event-stream-of-mine", False),
    ],
)
async def test_the_accept_header_decides(crib: Crib, accept: str, events: bool) -> None:
    session = await crib.session()
    answer = await ask(crib.client, session, "echo", {"text": "x"}, headers={"Accept": accept})
    assert answer.headers["content-type"].startswith("text/event-stream" if events else "application/json")


async def test_several_accept_headers_are_one_list(crib: Crib) -> None:
    await crib.call(await crib.session(), "echo", {"text": "x"}, key="accepted-1")
    head = {name: value for name, value in crib.client.headers.items() if name != "accept"}
    given = [*head.items(), ("Accept", "application/json;q=0.5"), ("Accept", "text/event-stream")]
    async with httpx.AsyncClient(transport=crib.client._transport, base_url="http://crib") as client:
        answer = await client.get("/v1/calls/accepted-1", headers=given)
        assert answer.headers["content-type"].startswith("text/event-stream")
        twice = [*given, ("Last-Event-ID", "1"), ("Last-Event-ID", "2")]
        told = detail(await client.get("/v1/calls/accepted-1", headers=twice), 422, "invalid_arguments")
        assert "more than once" in told["message"]


async def test_a_follower_goes_on_from_the_last_event_it_had(crib: Crib) -> None:
    session = await crib.session()
    lines = [f"line {number}\n" for number in range(8)]
    key = {"Idempotency-Key": "resumed-1"}
    async with serving(crib) as client:
        path, body = f"/v1/sessions/{session}/tools/say", {"arguments": {"lines": lines, "pause_s": 0.1}}
        had: list[Heard] = []
        async with client.stream("POST", path, json=body, headers={**EVENTS, **key}) as answer:
            async for event in heard(answer):
                had.append(event)
                if len(had) == 4:
                    break  # the client hangs up
        until = asyncio.get_running_loop().time() + 5
        while crib.server.streams.open:
            assert asyncio.get_running_loop().time() < until, "a stream without its client"
            await asyncio.sleep(0.02)
        assert had[-1].id is not None
        rest = parsed((await client.get("/v1/calls/resumed-1", headers={**EVENTS, "Last-Event-ID": had[-1].id})).text)
        text = "".join(event.data["text"] for event in [*had, *rest] if event.name == "stdout")
        assert text == "".join(lines)
        assert rest[-1].data["status"] == 200
        again = parsed((await client.get("/v1/calls/resumed-1?after=7", headers=EVENTS)).text)  # ended meanwhile
        assert "".join(event.data["text"] for event in again if event.name == "stdout") == "".join(lines[1:])
        assert again[-1].data == rest[-1].data
    assert len([r for r in crib.sandbox(session).requests if r["method"] == "tools/call"]) == 1


@pytest.mark.parametrize("mark", ["-1", "x", "1" * 16, "1.5"])
async def test_a_mark_that_is_none_is_422(crib: Crib, mark: str) -> None:
    session = await crib.session()
    await crib.call(session, "echo", {"text": "x"}, key="marked-1")
    answer = await crib.client.get("/v1/calls/marked-1", headers={**EVENTS, "Last-Event-ID": mark})
    detail(answer, 422, "invalid_arguments")


async def test_the_same_key_joins_the_running_call_and_later_gets_its_outcome_again(crib: Crib) -> None:
    session = await crib.session()
    arguments = {"lines": ["a", "b"], "pause_s": 0.2}
    key = {"Idempotency-Key": "joined-1"}
    answers = await asyncio.gather(*(ask(crib.client, session, "say", arguments, headers=key) for _ in range(3)))
    streams = [parsed(answer.text) for answer in answers]
    for stream in streams:
        assert "".join(event.data["text"] for event in stream if event.name == "stdout") == "ab"
        assert stream[-1].data == streams[0][-1].data
    replay = await ask(crib.client, session, "say", arguments, headers=key)
    assert replay.headers["idempotent-replay"] == "true"
    assert parsed(replay.text)[-1].data == streams[0][-1].data
    conflict = await ask(crib.client, session, "say", {"lines": []}, headers=key)
    detail(conflict, 409, "idempotency_conflict")
    assert len([r for r in crib.sandbox(session).requests if r["method"] == "tools/call"]) == 1


async def test_past_wait_s_the_stream_ends_with_a_450_and_the_call_goes_on(crib: Crib) -> None:
    session = await crib.session()
    events = parsed((await ask(crib.client, session, "sleep", {"seconds": 1.0}, wait_s=0.3)).text)
    assert events[-1].data["status"] == 450
    assert events[-1].data["body"]["detail"]["code"] == "still_running"
    call_id = events[0].data["call_id"]
    waited = await ask(crib.client, session, "call_wait", {"call_id": call_id})
    assert parsed(waited.text)[0].data["call_id"] == call_id
    assert parsed(waited.text)[-1].data["status"] == 200


async def test_progress_of_a_foreign_image_is_told(crib: Crib) -> None:
    session = await crib.session(images=["foreign"])
    events = parsed((await ask(crib.client, session, "foreign_steps", {})).text)
    assert [event.name for event in events] == ["started", "progress", "progress", "progress", "outcome"]
    assert events[1].data == {"progress": 1, "total": 3, "message": "step 1"}
    sent = [r for r in crib.sandbox(session, "foreign").requests if r["method"] == "tools/call"]
    assert sent[0]["params"]["_meta"]["progressToken"] == events[0].data["call_id"]


async def test_quiet_calls_are_kept_alive_by_comments(crib: Crib, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "QUIET_S", 0.1)
    session = await crib.session(images=["workspace", "foreign"])
    for tool, arguments in (("say", {"lines": [""], "pause_s": 0.5}), ("foreign_steps", {})):
        text = (await ask(crib.client, session, tool, arguments)).text
        assert (": nothing new\n\n" in text) == (tool == "say")


@pytest.mark.parametrize("setting", ["max_streams", "max_streams_per_tenant"])
async def test_streams_are_bounded_and_the_refused_call_did_not_run(tmp_path: Path, setting: str) -> None:
    async with running(settings(tmp_path, http={setting: 2})) as crib:
        session = await crib.session()
        tasks = [asyncio.create_task(ask(crib.client, session, "sleep", {"seconds": 0.5})) for _ in range(2)]
        await asyncio.sleep(0.2)
        key = {"Idempotency-Key": "too-many"}
        detail(await ask(crib.client, session, "count", {}, headers=key), 429, "quota_exceeded")
        detail(await crib.client.get("/v1/calls/too-many"), 404, "call_not_found")
        await asyncio.gather(*tasks)
        assert (await ask(crib.client, session, "count", {}, headers=key)).headers["content-type"].startswith("text/ev")
        assert crib.server.streams.open == 0


async def test_a_reader_that_stops_is_cut_off_and_the_call_goes_on(crib: Crib, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "_STALLED_S", 0.3)
    session = await crib.session()
    async with serving(crib) as client:
        body = json.dumps({"arguments": {"lines": ["x" * (1 << 20)], "times": 2}}).encode()
        head = f"POST /v1/sessions/{session}/tools/say HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        head += f"Accept: text/event-stream\r\nIdempotency-Key: stalled-1\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.socket() as wire:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            wire.connect(("127.0.0.1", client.base_url.port))
            wire.sendall(head.encode() + body)
            async with asyncio.timeout(10):
                while not crib.server.streams.open:  # noqa: ASYNC110 - it tells nobody
                    await asyncio.sleep(0.02)
                while crib.server.streams.open:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            assert (await client.get("/v1/calls/stalled-1")).status_code == 200


async def test_the_end_of_the_session_and_of_the_sandbox_end_the_stream(crib: Crib) -> None:
    session = await crib.session()
    died = parsed((await ask(crib.client, session, "die", {})).text)
    assert died[-1].data["body"]["detail"]["code"] == "tool_crashed"
    following = asyncio.create_task(ask(crib.client, session, "sleep", {"seconds": 60}))
    await asyncio.sleep(0.3)
    await crib.client.delete(f"/v1/sessions/{session}")
    events = parsed((await following).text)
    assert events[-1].data["status"] == 410
    assert events[-1].data["body"]["detail"]["cause"] == "deleted"


async def test_a_call_that_is_found_again_over_another_stream_is_followed_on(crib: Crib) -> None:
    session = await crib.session()
    following = asyncio.create_task(ask(crib.client, session, "say", {"lines": ["a", "b", "c"], "pause_s": 0.2}))
    while not (calls := crib.server.executor.admission.held()):  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(0.01)
    first = await calls[0].placed
    output, asked = first.output, 0

    async def broken(*told: Any) -> OutputPart | None:
        nonlocal asked
        asked += 1
        return await output(*told) if asked == 1 else None

    first.output = broken  # type: ignore[method-assign, assignment]
    await asyncio.sleep(0.3)
    another = ToolSandbox.__new__(ToolSandbox)
    another.output = output  # type: ignore[method-assign]
    another.peek, another.cancel = first.peek, first.cancel  # type: ignore[method-assign]
    calls[0].hand_to(another)
    events = parsed((await following).text)
    assert "".join(event.data["text"] for event in events if event.name == "stdout") == "abc"
    assert asked > 1


async def test_a_gap_is_told(crib: Crib) -> None:
    session = await crib.session()
    sandbox = crib.sandbox(session)
    truth = sandbox.answer

    async def forgetful(method: str, params: dict[str, Any]) -> dict[str, Any]:
        told = await truth(method, params)
        if method == "toolcrib/output" and params["offset"] == 0 and told["chunks"]:
            return {**told, "chunks": [{"stream": "stderr", "text": "tail"}], "next": 104, "lost": 100}
        return told

    sandbox.answer = forgetful  # type: ignore[method-assign]
    events = parsed((await ask(crib.client, session, "say", {"lines": ["x"]})).text)
    assert [(e.name, e.data, e.id) for e in events[1:3]] == [
        ("lost", {"bytes": 100}, "100"),
        ("stderr", {"text": "tail"}, "104"),
    ]


@pytest.mark.parametrize(
    "told",
    [
        {"chunks": [], "next": 7, "lost": 0, "ended": False},
        {"chunks": [{"stream": "stdout", "text": "x"}], "next": -1, "lost": 0, "ended": False},
        {"chunks": "x", "next": 1, "lost": 0, "ended": False},
        {},
    ],
)
async def test_a_sandbox_that_tells_nonsense_of_its_output_ends_no_call(crib: Crib, told: dict[str, Any]) -> None:
    session = await crib.session()
    sandbox = crib.sandbox(session)
    truth = sandbox.answer

    async def nonsense(method: str, params: dict[str, Any]) -> dict[str, Any]:
        return told if method == "toolcrib/output" else await truth(method, params)

    sandbox.answer = nonsense  # type: ignore[method-assign]
    async with asyncio.timeout(10):
        events = parsed((await ask(crib.client, session, "say", {"lines": ["x"], "pause_s": 0.1})).text)
    assert [event.name for event in events] == ["started", "outcome"]


async def test_followers_that_leave_are_no_garbage_of_the_sandbox(crib: Crib) -> None:
    session = await crib.session()
    async with serving(crib) as client:
        path = f"/v1/sessions/{session}/tools/sleep"
        for _ in range(5):
            async with client.stream("POST", path, json={"arguments": {"seconds": 0.3}}, headers=EVENTS) as answer:
                async for _event in heard(answer):
                    break
        await asyncio.sleep(0.6)
    live_one = crib.server.registry.live()[0].boxes["workspace"].live
    assert live_one is not None
    assert live_one.client.garbage_lines == 0


async def test_the_openapi_document_tells_of_events(crib: Crib) -> None:
    document = (await crib.client.get("/openapi.json")).json()
    for path, method in (("/v1/sessions/{session_id}/tools/{tool_name}", "post"), ("/v1/calls/{call_id}", "get")):
        content = document["paths"][path][method]["responses"]["200"]["content"]
        assert set(content) == {"application/json", "text/event-stream"}, json.dumps(content)
