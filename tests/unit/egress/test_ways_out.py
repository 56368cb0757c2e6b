"""What passes a door: secrets for named hosts alone, tunnels that name their host, much data in little memory, new policies at once."""

from __future__ import annotations

import asyncio
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from sandbox_images.egress import vetting
from sandbox_images.egress.authority import Authority
from sandbox_images.egress.door import Grant
from sandbox_images.egress.problems import Refused
from sandbox_images.egress.rules import Policy
from sandbox_images.egress.target import Target
from sandbox_images.egress.vetting import Outside, Streams, Vetting
from tests.unit.egress.own_network import Network, open_door
from tests.unit.egress.proxy_process import ask, connect, get, running_proxy


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="door") as made:
        yield Path(made)


SERVERS: list[asyncio.Server] = []


@pytest.fixture(autouse=True)
async def sites_end() -> AsyncIterator[None]:
    yield
    while SERVERS:
        SERVERS.pop().close()
    await asyncio.sleep(0)


class Site:
    """Answers each connection once, by what `body` makes of the request's head."""

    def __init__(
        self, body: Callable[[bytes], bytes], tls: ssl.SSLContext | None = None, head: bytes = b"200 OK"
    ) -> None:
        self._body, self._tls, self._head = body, tls, head
        self.seen: list[bytes] = []

    async def start(self) -> int:
        server = await asyncio.start_server(self._take, "127.0.0.1", 0, ssl=self._tls)
        SERVERS.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.seen.append(await reader.readuntil(b"\r\n\r\n"))
            body = self._body(self.seen[-1])
            writer.write(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n" % (self._head, len(body)))
            for start in range(0, len(body), 1 << 16):
                writer.write(body[start : start + (1 << 16)])
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


async def tunnel(door: Path, authority: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_unix_connection(str(door))
    writer.write(connect(authority))
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    return reader, writer


async def test_a_secret_header_reaches_its_host_and_never_the_sandbox(folder: Path) -> None:
    authority = Authority()
    site = Site(lambda head: b"you sent " + head, authority.context("localhost"))
    port = await site.start()
    here = f"localhost:{port}"
    header = {"host": here, "header": "X-Key", "secret": "abcdefghijkl", "prefix": "Bearer "}
    async with running_proxy(folder, allow_private=[here], authorities=authority.pem) as proxy:
        door = await proxy.open({"mode": "allow", "allow": [here]}, headers=[header])
        reader, writer = await tunnel(door, here)
        await writer.start_tls(ssl.create_default_context(cafile=str(folder / "ca.pem")), server_hostname="localhost")
        writer.write(f"GET /a HTTP/1.1\r\nHost: {here}\r\nx-key: mine\r\nConnection: close\r\n\r\n".encode())
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert site.seen[0].count(b"X-Key: Bearer abcdefghijkl\r\n") == 1
        assert b"mine" not in site.seen[0]
        assert b"abcdefghijkl" not in answer
        assert b"Bearer ************" in answer
        assert "abcdefghijkl" not in str(await proxy.ask("egress/list"))


async def test_another_server_can_not_pass_for_the_named_host(folder: Path) -> None:
    site = Site(lambda _: b"", Authority().context("localhost"))  # of an authority that nobody trusts
    here = f"localhost:{await site.start()}"
    async with running_proxy(folder, allow_private=[here]) as proxy:
        door = await proxy.open({"mode": "open"}, headers=[{"host": here, "header": "X-Key", "secret": "abcdefghijkl"}])
        reader, writer = await tunnel(door, here)
        await writer.start_tls(ssl.create_default_context(cafile=str(folder / "ca.pem")), server_hostname="localhost")
        writer.write(f"GET / HTTP/1.1\r\nHost: {here}\r\n\r\n".encode())
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        assert b"X-Toolcrib-Error: tls" in answer
        assert site.seen == []


@pytest.mark.parametrize(("name", "passes"), [("localhost", True), ("other.example", False)])
async def test_tls_in_a_tunnel_names_the_host_that_is_allowed(folder: Path, name: str, passes: bool) -> None:
    authority = Authority()
    here = f"localhost:{await Site(lambda _: b'', authority.context('localhost')).start()}"
    trusting = ssl.create_default_context(cadata=authority.pem)
    trusting.check_hostname = False
    async with running_proxy(folder, allow_private=[here]) as proxy:
        door = await proxy.open({"mode": "allow", "allow": [here]})
        _, writer = await tunnel(door, here)
        if passes:
            await writer.start_tls(trusting, server_hostname=name)
        else:
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await writer.start_tls(trusting, server_hostname=name)
            assert [denial["rule"] for denial in await proxy.denials()] == ["tls_name"]
        writer.close()


async def test_much_data_passes_in_little_memory(folder: Path) -> None:
    size = 100 << 20
    here = f"127.0.0.1:{await Site(lambda _: bytes(size)).start()}"
    async with running_proxy(folder, allow_private=[here]) as proxy:
        door = await proxy.open({"mode": "open"})

        def resident_mb() -> int:
            text = Path(f"/proc/{proxy.process.pid}/status").read_text()
            return int(text.split("VmHWM:")[1].split()[0]) // 1024

        before = resident_mb()
        reader, writer = await asyncio.open_unix_connection(str(door))
        writer.write(get(f"http://{here}/"))
        await asyncio.sleep(0.5)  # a client that does not read at first
        got = 0
        while data := await reader.read(1 << 18):
            got += len(data)
        writer.close()
        assert got > size
        assert resident_mb() - before < 16


async def test_a_new_policy_cuts_what_it_does_not_allow(folder: Path) -> None:
    here = f"127.0.0.1:{await Site(lambda _: b'x').start()}"
    async with running_proxy(folder, allow_private=[here]) as proxy:
        door = await proxy.open({"mode": "open"})
        reader, writer = await tunnel(door, here)
        answer = await proxy.ask("egress/open", door=door.name, policy={"mode": "none"})
        assert answer["result"] == {"existed": True, "cut": 1}
        assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()
        assert (await ask(door, get(f"http://{here}/"))).startswith(b"HTTP/1.1 403 ")


async def test_a_flood_of_connections_leaves_other_doors_alone(folder: Path) -> None:
    async with running_proxy(folder) as proxy:
        flooded, other = await proxy.open({"mode": "open"}), await proxy.open({"mode": "none"})
        held = [await asyncio.open_unix_connection(str(flooded)) for _ in range(64)]
        answers = await asyncio.gather(*(ask(flooded, b"") for _ in range(100)))
        assert all(b"X-Toolcrib-Error: limit" in answer for answer in answers)
        assert (await ask(other, get("http://egress.toolcrib/ready"))).startswith(b"HTTP/1.1 204 ")
        for _, writer in held:
            writer.close()


class Rebinding(Outside):
    """A resolver that answers with a public address first, then with loopback. Nothing is ever connected to."""

    def __init__(self) -> None:
        self.answers = [
            ["93.184.216.34"],
            ["127.0.0.1"],
            ["93.184.216.34", "10.0.0.1"],
            ["::ffff:127.0.0.1"],
            ["fe80::1%2"],
        ]

    async def resolve(self, name: str, port: int) -> list[str]:  # noqa: ARG002
        return self.answers.pop(0)

    async def connect(self, address: str, port: int, tls: ssl.SSLContext | None, name: str | None) -> Streams:  # noqa: ARG002
        raise AssertionError(address)


async def test_a_name_that_changes_its_mind_is_judged_each_time() -> None:
    judge, target, turns = Vetting(Rebinding()), Target("turning.example", 80), asyncio.Semaphore(1)
    assert await judge.addresses(target, turns) == ["93.184.216.34"]  # what is then dialled, unasked again
    for _ in range(4):
        with pytest.raises(Refused, match="resolves to"):
            await judge.addresses(target, turns)


async def test_names_that_take_long_hold_up_their_own_door_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Network):
        def __init__(self) -> None:
            super().__init__({}, lambda _reader, _writer: asyncio.sleep(0))
            self.asked, self.go_on = 0, asyncio.Event()

        async def resolve(self, name: str, port: int) -> list[str]:
            self.asked += 1
            if name.startswith("slow"):
                await self.go_on.wait()
            return await super().resolve(name, port)

    monkeypatch.setattr(vetting, "RESOLVE_S", 0.3)
    network, grant = Slow(), Grant(Policy("open"))
    async with open_door(folder, network, grant) as door, open_door(folder, network, grant) as other:
        late = await asyncio.gather(*(door.say(get(f"http://slow{number}.example/")) for number in range(30)))
        assert all(answer.startswith(b"HTTP/1.1 504 ") for answer in late)
        assert network.asked == 8  # given up on, and still being resolved
        assert (await door.say(get("http://quick.example/"))).startswith(b"HTTP/1.1 504 ")
        assert b"X-Toolcrib-Error: no_address" in await other.say(get("http://quick.example/"))
        network.go_on.set()
        await asyncio.sleep(0)
        assert b"X-Toolcrib-Error: no_address" in await door.say(get("http://quick.example/"))
        assert door.faults == []
