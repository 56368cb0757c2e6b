"""The HTTP protocol on a real socket: what a client can do to a connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from tests.unit.toolserver.crib import KEY, Crib, running, settings
from toolserver.api.protocol import protocol_class
from toolserver.serving import _bind, _Uvicorn

AUTH = f"Authorization: Bearer {KEY}\r\n".encode()


@asynccontextmanager
async def listening(tmp_path: Path, **http: Any) -> AsyncIterator[tuple[Crib, int]]:
    chosen = settings(tmp_path, http={"port": 0, **http})
    async with running(chosen) as crib:
        listener = _bind(chosen)
        protocol = protocol_class(chosen.http.header_timeout_s, chosen.http.max_connections)
        config = uvicorn.Config(
            crib.server.asgi,
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
        )
        server = _Uvicorn(config)
        task = asyncio.create_task(server.serve([listener]))
        async with asyncio.timeout(10):
            await server.up.wait()
        try:
            yield crib, listener.getsockname()[1]
        finally:
            server.should_exit = True
            await task


async def exchange(port: int, sent: bytes, wait_s: float = 10) -> tuple[int, dict[str, Any]]:
    """Send raw bytes, read until the server closes; status and JSON body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    raw = await asyncio.wait_for(reader.read(), wait_s)
    writer.close()
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), json.loads(body)


async def test_a_slow_header_is_given_up(tmp_path: Path) -> None:
    async with listening(tmp_path, header_timeout_s=0.3) as (_, port):
        slow = [exchange(port, b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: ") for _ in range(30)]
        results = await asyncio.gather(*slow)
        assert {(status, body["detail"]["code"]) for status, body in results} == {(408, "request_timeout")}


async def test_a_connection_without_a_byte_is_given_up_too(tmp_path: Path) -> None:
    async with listening(tmp_path, header_timeout_s=0.3) as (_, port):
        assert (await exchange(port, b""))[0] == 408


async def test_a_slow_body_is_given_up(tmp_path: Path) -> None:
    async with listening(tmp_path, body_timeout_s=0.3) as (_, port):
        head = b"POST /v1/sessions HTTP/1.1\r\nHost: x\r\n" + AUTH + b"Content-Length: 100\r\n\r\n{"
        status, body = await exchange(port, head)
        assert (status, body["detail"]["code"]) == (408, "request_timeout")


async def test_huge_or_many_headers_are_431(tmp_path: Path) -> None:
    async with listening(tmp_path) as (_, port):
        large = b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Large: " + b"x" * 70_000
        many = b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(500)) + b"\r\n"
        for sent in (large, large + b"\r\n\r\n", many):
            status, body = await exchange(port, sent)
            assert (status, body["detail"]["code"]) == (431, "headers_too_large")


async def test_ambiguous_framing_and_noise_are_400(tmp_path: Path) -> None:
    async with listening(tmp_path) as (_, port):
        both = (
            b"POST /v1/sessions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        )
        for sent in (both, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"GET\r\n\r\n"):
            status, body = await exchange(port, sent)
            assert (status, body["detail"]["code"]) == (400, "bad_request")


async def test_connections_beyond_the_limit_are_503(tmp_path: Path) -> None:
    async with listening(tmp_path, max_connections=3) as (_, port):
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        await asyncio.sleep(0.1)
        status, body = await exchange(port, b"")
        assert (status, body["detail"]["code"]) == (503, "no_capacity")
        for _, writer in held:
            writer.close()
        await asyncio.sleep(0.1)
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"http://127.0.0.1:{port}/healthz")).status_code == 200


async def test_a_connection_is_kept_for_many_requests(tmp_path: Path) -> None:
    async with listening(tmp_path, header_timeout_s=0.4) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
            assert head.startswith(b"HTTP/1.1 200")
            await reader.readexactly(len(b'{"status":"ok"}'))
            await asyncio.sleep(0.6)  # longer than the header's time: it counts from a request's first byte
        writer.close()


async def test_a_large_body_is_refused_before_it_is_read(tmp_path: Path) -> None:
    async with listening(tmp_path, max_body_mb=1) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/sessions HTTP/1.1\r\nHost: x\r\n" + AUTH + b"Content-Length: 67108864\r\n\r\n")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert head.startswith(b"HTTP/1.1 413")
        writer.close()


async def test_a_delete_whose_client_hangs_up_at_once_is_still_done(tmp_path: Path) -> None:
    async with listening(tmp_path) as (crib, port):
        session = await crib.session()
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"DELETE /v1/sessions/{session} HTTP/1.1\r\nHost: x\r\n".encode() + AUTH + b"\r\n")
        await writer.drain()
        writer.close()
        for _ in range(100):
            if (await crib.client.get(f"/v1/sessions/{session}")).status_code == 410:
                break
            await asyncio.sleep(0.02)
        else:
            raise AssertionError("the session lives on")


async def test_an_upload_that_breaks_off_changes_nothing(tmp_path: Path) -> None:
    async with listening(tmp_path) as (crib, port):
        base = f"/v1/sessions/{await crib.session()}/files/a"
        await crib.client.put(base, content=b"old")
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            f"PUT {base} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n".encode() + AUTH + b"\r\n" + b"x" * 300_000
        )
        await writer.drain()
        await asyncio.sleep(0.2)
        writer.close()
        await asyncio.sleep(0.2)
        assert (await crib.client.get(base)).content == b"old"


async def test_health_answers_while_many_calls_run(tmp_path: Path) -> None:
    async with listening(tmp_path) as (crib, port):
        session = await crib.session()
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {KEY}"}) as client:
            calls = [asyncio.create_task(crib.call(session, "sleep", {"seconds": 0.5})) for _ in range(20)]
            for _ in range(5):
                assert (await asyncio.wait_for(client.get("/healthz"), 2)).status_code == 200
            assert {answer.status_code for answer in await asyncio.gather(*calls)} == {200}
