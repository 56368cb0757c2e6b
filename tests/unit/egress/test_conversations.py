"""What ordinary and unhelpful clients do at a door: bodies both ways, connections kept, slow heads, silence, bounds. With a real proxy."""

from __future__ import annotations

import asyncio
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sandbox_images.egress.authority import Authority
from sandbox_images.egress.door import Grant
from sandbox_images.egress.rules import Policy
from tests.unit.egress.own_network import Network, open_door
from tests.unit.egress.proxy_process import ask, connect, get, running_proxy

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="door") as made:
        yield Path(made)


@asynccontextmanager
async def site(serve: Serve, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Another server; what it is called."""

    serving: set[asyncio.Task[None]] = set()

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def taken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.create_task(served(reader, writer)))

    server = await asyncio.start_server(taken, "127.0.0.1", 0, ssl=tls)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


async def body_of(reader: asyncio.StreamReader, head: bytes) -> bytes:
    """Of a message, by its head."""
    if b"transfer-encoding" in head.lower():
        body = b""
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
        return body
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return await reader.readexactly(int(lengths[0].split(b":")[1])) if lengths else b""


class Echo:
    """Answers each request with its body, on one connection; knows the requests of each."""

    def __init__(self) -> None:
        self.connections: list[list[bytes]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine: list[bytes] = []
        self.connections.append(mine)
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            mine.append(head)
            body = await body_of(reader, head)
            if head.startswith(b"HEAD"):
                writer.write(LENGTH % 5000)
            elif b"/pieces" in head:
                writer.write(
                    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
                )
            else:
                writer.write(LENGTH % len(body) + body)
            await writer.drain()


async def test_one_connection_carries_bodies_of_every_kind_one_after_the_other(folder: Path) -> None:
    echo = Echo()
    async with site(echo.serve) as here, running_proxy(folder, allow_private=[here]) as proxy:
        door = await proxy.open({"mode": "allow", "allow": [here]})
        reader, writer = await asyncio.open_unix_connection(str(door))

        async def exchange(request: bytes, *later: bytes) -> tuple[bytes, bytes]:
            writer.write(request)
            for piece in later:
                await asyncio.sleep(0.01)
                writer.write(piece)
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
            return head, b"" if request.startswith(b"HEAD") else await body_of(reader, head)

        def line(method: str, path: str = "/", *fields: str) -> bytes:
            more = "".join(f"{field}\r\n" for field in fields)
            return f"{method} http://{here}{path} HTTP/1.1\r\nHost: {here}\r\n{more}\r\n".encode()

        assert (await exchange(line("POST", "/", "Content-Length: 5"), b"he", b"llo"))[1] == b"hello"
        chunked = line("POST", "/", "Transfer-Encoding: chunked")
        assert (await exchange(chunked, b"3\r\nabc\r\n", b"2;x=y\r\nde\r\n0\r\n", b"X-Trailer: t\r\n\r\n"))[
            1
        ] == b"abcde"
        head, nothing = await exchange(line("HEAD"))
        assert (b"content-length: 5000" in head.lower(), nothing) == (True, b"")
        assert (await exchange(line("PUT", "/pieces", "Content-Length: 3"), b"xyz"))[1] == b"xyz"
        assert (await exchange(line("GET") + line("GET")))[1] == b""  # two at once
        assert (await body_of(reader, await reader.readuntil(b"\r\n\r\n"))) == b""
        writer.write(line("POST", "/", "Content-Length: 5", "Expect: 100-continue"))
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)).startswith(b"HTTP/1.1 100 ")
        assert (await exchange(b"later"))[1] == b"later"
        writer.close()
        heads = [head for one in echo.connections for head in one]
        assert len(heads) == 7
        assert len(echo.connections) < 7  # kept where nothing was sent that must not be sent twice
        assert all(head.count(b"Host: ") == 1 and b"Expect" not in head and b"X-Trailer" not in head for head in heads)


async def test_a_tunnel_is_for_any_protocol_and_closes_one_way_at_a_time(folder: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"Upgrade: websocket" in head
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
        said = await reader.read()  # to the client's end, and only then answer
        writer.write(b"\x81" + said[::-1])

    async with site(serve) as here, running_proxy(folder, allow_private=[here]) as proxy:
        door = await proxy.open({"mode": "allow", "allow": [here]})
        reader, writer = await asyncio.open_unix_connection(str(door))
        writer.write(connect(here))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.write(f"GET / HTTP/1.1\r\nHost: {here}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n".encode())
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        writer.write(b"frames")
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 60) == b"\x81semarf"
        writer.close()
        # outside a tunnel there is no upgrade: the other server is not even asked for one
        plain = await ask(
            door, get(f"http://{here}/").replace(b"Connection: close", b"Connection: Upgrade\r\nUpgrade: websocket")
        )
        assert plain.startswith(b"HTTP/1.1 502 ")


async def test_slow_heads_silence_and_long_lives_end(folder: Path) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def dripping(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(LENGTH % 100)
        for _ in range(100):
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.1)

    limits = {"head_s": 0.5, "idle_s": 1.0, "total_s": 3.0}
    async with (
        site(silent) as mute,
        site(dripping) as drip,
        running_proxy(folder, allow_private=[mute, drip], limits=limits) as proxy,
    ):
        door = await proxy.open({"mode": "open"})

        async def slow_head() -> bytes:
            reader, writer = await asyncio.open_unix_connection(str(door))
            try:
                for sign in get(f"http://{mute}/")[:200]:
                    writer.write(bytes((sign,)))
                    await asyncio.sleep(0.05)
                    if reader.at_eof() or reader._buffer:  # type: ignore[attr-defined]
                        break
            except OSError:
                pass
            got = await asyncio.wait_for(reader.read(), 60)
            writer.close()
            return got

        async def tunnel(to: str, say: bytes = b"") -> bytes:
            reader, writer = await asyncio.open_unix_connection(str(door))
            writer.write(connect(to) + say)
            try:
                return await asyncio.wait_for(reader.read(), 60)
            except ConnectionError:
                return b""
            finally:
                writer.close()

        began = time.monotonic()
        late, nothing, unanswered, silence, dripped = await asyncio.gather(
            slow_head(),
            ask(door, b""),
            ask(door, get(f"http://{mute}/")),
            tunnel(mute),
            tunnel(drip, b"GET / HTTP/1.1\r\n\r\n"),
        )
        assert time.monotonic() - began < 15
        assert late.startswith(b"HTTP/1.1 408 ")
        assert nothing == b""
        assert unanswered == b"" or b"X-Toolcrib-Error: timeout" in unanswered
        assert silence in (b"", b"HTTP/1.1 200 Connection established\r\n\r\n")
        assert b"x" in dripped  # it was never idle: its life was over
        async with asyncio.timeout(20):
            while (await proxy.ask("egress/list"))["result"]["doors"][0]["connections"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("way", ["up", "down", "tunnel up", "door"])
async def test_more_bytes_than_allowed_are_cut_and_told(folder: Path, way: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if way in ("down", "door"):
            writer.write(LENGTH % 1_000_000)
            writer.write(bytes(1_000_000))
            await writer.drain()
        await reader.read(10_000_000)
        while await reader.read(1 << 16):
            pass

    limits = {"door_bytes": 200_000} if way == "door" else {"connection_bytes": 200_000}
    async with site(serve) as here, running_proxy(folder, allow_private=[here], limits=limits) as proxy:
        door = await proxy.open({"mode": "open"})
        request = get(f"http://{here}/")
        if way == "up":
            request = (
                f"POST http://{here}/ HTTP/1.1\r\nHost: {here}\r\nContent-Length: 1000000\r\n\r\n".encode()
                + bytes(1_000_000)
            )
        elif way == "tunnel up":
            request = connect(here) + b"GET / HTTP/1.1\r\n\r\n" + bytes(1_000_000)
        try:
            got = await ask(door, request)
        except OSError:
            got = b""
        assert len(got) < 300_000
        assert [denial["rule"] for denial in await proxy.denials()] == ["bytes"]
        if way == "door":
            assert b"X-Toolcrib-Denied: bytes" in await ask(door, get(f"http://{here}/"))


@pytest.mark.parametrize(
    ("first", "rule"),
    [(b"GET / HTTP/1.1\r\n\r\n", "no_tls"), (b"SSH-2.0-x\r\n", "no_tls"), (b"\x16\x03\x01\x00\x00", "no_tls")],
)
async def test_what_is_no_tls_does_not_pass_the_port_of_tls(folder: Path, first: bytes, rule: str) -> None:
    sent = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent.extend(await reader.read())

    network = Network({"a.example": ["93.184.216.34"]}, serve)
    async with open_door(folder, network, Grant(Policy("allow", frozenset({"a.example:443"})))) as door:
        await door.say(connect("a.example:443"), first)
        assert door.denials() == [rule]
        await network.done()
        assert door.faults == []
    assert sent == b""


async def test_a_client_hello_in_many_packets_passes_whole(folder: Path) -> None:
    authority = Authority()
    echo = Echo()
    async with site(echo.serve, authority.context("localhost")) as address:
        here = address.replace("127.0.0.1", "localhost")
        async with running_proxy(folder, allow_private=[here]) as proxy:
            door = await proxy.open({"mode": "allow", "allow": [here]})
            reader, writer = await asyncio.open_unix_connection(str(door))
            writer.write(connect(here))
            await reader.readuntil(b"\r\n\r\n")
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            context = ssl.create_default_context(cadata=authority.pem)
            client = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
            while True:
                try:
                    client.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    for sign in outgoing.read():
                        writer.write(bytes((sign,)))
                        await asyncio.sleep(0)
                    incoming.write(await asyncio.wait_for(reader.read(65_536), 60))
            assert client.getpeercert()
            writer.close()


async def test_a_secret_header_follows_no_redirect_and_its_echo_is_starred_wherever_it_stands(folder: Path) -> None:
    secret = "the-secret-of-the-operator"
    seen: dict[str, list[bytes]] = {"named": [], "other": []}

    def remembering(name: str) -> Serve:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            seen[name].append(head)
            value = next((line[7:] for line in head.split(b"\r\n") if line.startswith(b"X-Key: ")), b"none")
            body = b"k=" + value
            writer.write(
                b"HTTP/1.1 302 %b\r\nLocation: http://%b/?%b\r\nTransfer-Encoding: chunked\r\n\r\n"
                % (value, other.encode(), value)
            )
            for sign in body:  # byte by byte, each a chunk of its own
                writer.write(b"1\r\n%c\r\n" % sign)
                await writer.drain()
            writer.write(b"0\r\n\r\n")

        return serve

    async with (
        site(remembering("other")) as other,
        site(remembering("named")) as named,
        running_proxy(folder, allow_private=[named, other]) as proxy,
    ):
        header = {"host": named, "header": "X-Key", "secret": secret}
        door = await proxy.open({"mode": "open"}, headers=[header])
        answer = await ask(door, get(f"http://{named}/"))
        assert b"X-Key: " + secret.encode() in seen["named"][0]
        assert secret.encode() not in answer
        assert answer.count(b"*" * len(secret)) >= 2  # reason and Location; the body in pieces
        plain = b"".join(
            part.split(b"\r\n")[1] for part in answer.split(b"\r\n\r\n", 1)[1].split(b"1\r\n") if part.count(b"\r\n")
        )
        assert secret.encode() not in plain.replace(b"\r\n", b"")
        await ask(door, get(f"http://{other}/"))
        await ask(door, get(f"http://{other}/", host=other))
        assert all(b"X-Key" not in head and secret.encode() not in head for head in seen["other"])
        assert b"X-Toolcrib-Denied: host_mismatch" in await ask(door, get(f"http://{other}/", host=named))
        tunnelled = await ask(
            door, connect(named) + get("/", host=named)
        )  # no TLS: the secret is not given in a tunnel
        assert secret.encode() not in tunnelled
        assert secret not in str(proxy.notices)
