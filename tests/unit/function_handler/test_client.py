"""The client: what is sent, what comes back as a typed answer, and how every fault of the wire is named."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from email.utils import formatdate
from time import time

import pytest

from agent.errors import UsageProblem
from agent.toolserver_client import transport
from agent.toolserver_client.client import ToolServerClient
from agent.toolserver_client.errors import NoAnswer, NoAnswerKind, ToolServerAnswer
from agent.toolserver_client.wire import outcome_in_detail, read_json, refusal, retry_after_s
from tests.unit.function_handler.fake_toolserver import KEY, FakeToolServer, Reply
from tests.unit.function_handler.fake_toolserver import refusal as refused


@pytest.fixture
async def client(server: FakeToolServer) -> AsyncIterator[ToolServerClient]:
    client = ToolServerClient(server.url, KEY, connect_s=1, answer_s=0.5, trace_seed="run-1")
    yield client
    await client.close()


async def _called(client: ToolServerClient, session_id: str, **arguments: object) -> object:
    return await client.call(session_id, "note", arguments, call_id="call-1", wait_s=0.2, deadline_s=5)


async def test_a_request_carries_key_trace_and_request_id(client: ToolServerClient, server: FakeToolServer) -> None:
    await client.tools()
    await client.tools()
    one, two = server.requests
    assert one.headers["authorization"] == f"Bearer {KEY}"
    assert one.headers["traceparent"].split("-")[1] == two.headers["traceparent"].split("-")[1] == client.trace_id
    assert one.headers["traceparent"] != two.headers["traceparent"]
    assert one.headers["x-request-id"] != two.headers["x-request-id"]
    assert one.headers["accept-encoding"] == "identity"


async def test_the_whole_life_of_a_session(client: ToolServerClient, server: FakeToolServer) -> None:
    await client.alive()
    await client.ready()
    assert [tool.name for tool in await client.tools()] == ["note", "peek", "put"]
    session = await client.create_session(labels={"run": "r"})
    assert (await client.session(session.id)).id == session.id
    outcome = await client.call(session.id, "note", {}, call_id="call-1", wait_s=1, deadline_s=5)
    assert outcome.content == [{"type": "text", "text": "ok"}]
    assert (await client.get_call("call-1")).call_id == "call-1"
    assert (await client.cancel_call("call-1")).call_id == "call-1"
    await client.delete_session(session.id)
    await client.delete_session(session.id)
    with pytest.raises(ToolServerAnswer) as gone:
        await client.session(session.id)
    assert (gone.value.status, gone.value.code) == (410, "session_gone")


async def _pieces(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def test_files_and_archives_are_streamed_byte_for_byte(client: ToolServerClient, server: FakeToolServer) -> None:
    session_id = (await client.create_session()).id
    name = "été 世界 (1)/a#b?c%41.txt"
    await client.put_file(session_id, name, _pieces(b"ab", b"\x00\xff"), 4)
    assert server.sessions[session_id] == {name: b"ab\x00\xff"}
    async with client.get_file(session_id, name) as download:
        assert download.bytes_total == 4
        assert b"".join([chunk async for chunk in download.chunks]) == b"ab\x00\xff"
    assert [entry.name for entry in (await client.list_files(session_id)).entries] == [name]
    async with client.get_archive(session_id) as download:
        archive = b"".join([chunk async for chunk in download.chunks])
    await client.delete_file(session_id, name)
    assert server.sessions[session_id] == {}
    await client.put_archive(session_id, _pieces(archive), len(archive))
    assert server.sessions[session_id] == {name: b"ab\x00\xff"}
    with pytest.raises(ToolServerAnswer, match="file_not_found"):
        async with client.get_file(session_id, "missing"):
            pass


async def test_a_download_that_is_cut_is_no_file(client: ToolServerClient, server: FakeToolServer) -> None:
    session_id = (await client.create_session()).id
    server.sessions[session_id]["a"] = b"x" * 1000
    server.fault("GET", "/files/a", "cut_after")
    with pytest.raises(NoAnswer) as lost:
        async with client.get_file(session_id, "a") as download:
            [chunk async for chunk in download.chunks]
    assert lost.value.kind is NoAnswerKind.LOST


async def test_a_refused_connection_never_arrived(client: ToolServerClient, server: FakeToolServer) -> None:
    await server.stop()
    with pytest.raises(NoAnswer) as lost:
        await client.tools()
    assert lost.value.kind is NoAnswerKind.REFUSED
    assert not lost.value.may_have_arrived
    assert "is it running?" in lost.value.message


async def test_an_unknown_name_never_arrived() -> None:
    client = ToolServerClient("http://no-such-host.invalid:1", KEY, connect_s=3)
    with pytest.raises(NoAnswer) as lost:
        await client.tools()
    assert lost.value.kind in (NoAnswerKind.DNS, NoAnswerKind.CONNECT_TIMEOUT)
    assert not lost.value.may_have_arrived
    await client.close()


async def test_a_connection_that_is_never_accepted_never_arrived() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        fillers = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
            fillers.append(filler)
        client = ToolServerClient(f"http://127.0.0.1:{full.getsockname()[1]}", KEY, connect_s=0.3, answer_s=0.5)
        with pytest.raises(NoAnswer) as lost:
            await client.tools()
        assert lost.value.kind in (NoAnswerKind.CONNECT_TIMEOUT, NoAnswerKind.TIMEOUT)
        await client.close()
        for filler in fillers:
            filler.close()


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("drop_before", NoAnswerKind.LOST),
        ("drop_after", NoAnswerKind.LOST),
        ("cut_after", NoAnswerKind.LOST),
        ("hang_before", NoAnswerKind.TIMEOUT),
        ("hang_after", NoAnswerKind.TIMEOUT),
    ],
)
async def test_what_was_sent_may_have_arrived(
    client: ToolServerClient, server: FakeToolServer, kind: str, named: NoAnswerKind
) -> None:
    session_id = (await client.create_session()).id
    server.fault("POST", "/tools/", kind)
    with pytest.raises(NoAnswer) as lost:
        await _called(client, session_id)
    assert lost.value.kind is named
    assert lost.value.may_have_arrived


async def test_a_body_that_drips_ends_at_the_deadline() -> None:
    hung_up = asyncio.Event()

    async def drip(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
        try:
            while True:
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.05)
        except ConnectionError:
            writer.transport.abort()
            hung_up.set()

    async with await asyncio.start_server(drip, "127.0.0.1", 0) as slow:
        other = ToolServerClient(
            f"http://127.0.0.1:{slow.sockets[0].getsockname()[1]}", KEY, connect_s=0.3, answer_s=0.5
        )
        with pytest.raises(NoAnswer) as lost:
            await other.tools()
        assert lost.value.kind is NoAnswerKind.TIMEOUT
        await other.close()
        await asyncio.wait_for(hung_up.wait(), 5)


async def test_a_body_without_end_is_not_read_to_its_end(
    client: ToolServerClient, server: FakeToolServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "MAX_BODY_BYTES", 100_000)
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 200000000\r\n\r\n"
    server.fault("GET", "/v1/tools", "raw", raw=head + b" " * 200_000)
    with pytest.raises(NoAnswer) as lost:
        await client.tools()
    assert lost.value.kind is NoAnswerKind.BAD_ANSWER
    assert "longer than" in lost.value.message


@pytest.mark.parametrize(
    "body",
    [
        b"<html>",
        b"",
        b"[]",
        b"{",
        b'{"tools": 5}',
        b'{"tools": [{"name": NaN}]}',
        b"[" * 100_000,
        b'{"tools": [{"name": 1e999}]}',
        b"\xff\xfe",
        b"9" * 6000,
    ],
)
async def test_an_answer_out_of_shape_is_a_named_failure(
    client: ToolServerClient, server: FakeToolServer, body: bytes
) -> None:
    server.answer_with("GET", "/v1/tools", Reply(200, body))
    with pytest.raises(NoAnswer) as bad:
        await client.tools()
    assert bad.value.kind is NoAnswerKind.BAD_ANSWER
    assert bad.value.status == 200


async def test_a_redirect_is_not_followed(client: ToolServerClient, server: FakeToolServer) -> None:
    server.answer_with("GET", "/v1/tools", Reply(307, b"", {"location": "http://127.0.0.1:9/"}))
    with pytest.raises(NoAnswer) as bad:
        await client.tools()
    assert bad.value.kind is NoAnswerKind.BAD_ANSWER


async def test_the_key_is_in_no_log_and_no_message(
    client: ToolServerClient, server: FakeToolServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await client.tools()
    server.answer_with("GET", "/v1/tools", refused(401, "unauthorized"))
    with pytest.raises(ToolServerAnswer) as answer:
        await client.tools()
    await server.stop()
    with pytest.raises(NoAnswer) as lost:
        await client.tools()
    for text in (caplog.text, str(answer.value), str(lost.value), repr(client), repr(client.__dict__)):
        assert KEY not in text


@pytest.mark.parametrize("url", ["ftp://x", "nonsense", "http://", "http://127.0.0.1:99999"])
def test_an_address_that_is_none_is_wrong_usage(url: str) -> None:
    with pytest.raises(UsageProblem, match="AGENT_TOOLSERVER__URL"):
        ToolServerClient(url, KEY)


@pytest.mark.parametrize("key", ["two words", "line\nbreak", "schlüssel"])
def test_a_key_that_no_header_can_hold_is_wrong_usage_and_is_not_shown(key: str) -> None:
    with pytest.raises(UsageProblem, match="AGENT_TOOLSERVER__API_KEY") as problem:
        ToolServerClient("http://127.0.0.1:1", key)
    assert key not in problem.value.message


async def test_a_proxy_of_the_environment_does_not_come_between_us_and_loopback(
    server: FakeToolServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    client = ToolServerClient(server.url, KEY)
    assert await client.tools()
    await client.close()


def test_half_characters_never_get_into_the_journal() -> None:
    assert read_json(b'{"a": "x\\ud800y", "b": "\\ud83d\\ude00"}', 200) == {"a": "x?y", "b": "\U0001f600"}


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("7", 7.0), ("0.5", 0.5), ("-3", 0.0), (None, None), ("soon", None), ("nan", None), ("1e6", 1e6)],
)
def test_retry_after_in_seconds(value: str | None, seconds: float | None) -> None:
    assert retry_after_s(value) == seconds


def test_retry_after_as_a_date() -> None:
    assert retry_after_s(formatdate(time() + 60, usegmt=True)) == pytest.approx(60, abs=2)


def test_the_longer_of_two_retry_advices_counts() -> None:
    body = b'{"detail": {"code": "no_capacity", "message": "m", "retry_after_s": 9}}'
    assert refusal(503, {"retry-after": "2"}, body).retry_after_s == 9


def test_what_is_out_of_shape_in_an_errors_detail_is_left_out() -> None:
    known = outcome_in_detail(
        {"content": [{"type": "text", "text": "a"}], "artifacts": "none", "workspace_changed": None, "exit_code": 3}
    )
    assert known.content == [{"type": "text", "text": "a"}]
    assert (known.artifacts, known.workspace_changed, known.exit_code) == ([], None, 3)
