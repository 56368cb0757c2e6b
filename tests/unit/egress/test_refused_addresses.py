"""Whatever a not public address is written as, a door refuses it, and nothing is connected to. Through a real proxy."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from tests.unit.egress.proxy_process import ask, connect, get, running_proxy

# {port} is where a listener waits on IPv4 and IPv6 that must never be connected to
HOSTS = [
    "127.0.0.1", "localhost", "LOCALHOST.", "a.localhost", "127.0.0.1.", "127.127.127.127", "127.1", "127.0.1", "0", "0.0.0.0",
    "2130706433", "0x7f000001", "0x7f.1", "0X7F.0x0.0x0.0x1", "0177.0.0.1", "017700000001", "00.0.0.0", "1.0.0.127.1", "127.0.0.1..",
    "%31%32%37.0.0.1", "127%2e0%2e0%2e1", "①②⑦.⓪.⓪.①", "ⓛⓞⓒⓐⓛⓗⓞⓢⓣ", "127。0。0。1", "１２７.0.0.1", "127.0.0.1%00.example.org",
    "[::1]", "[0:0:0:0:0:0:0:1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::FFFF:7F00:1]", "[::127.0.0.1]", "[::ffff:0:127.0.0.1]",
    "[64:ff9b::127.0.0.1]", "[64:ff9b:1::7f00:1]", "[2002:7f00:1::]", "[2001:0:7f00:1::]", "[2606:4700::5efe:7f00:1]", "[2606:4700::200:5efe:7f00:1]",
    "[fe80::1]", "[fe80::1%25lo]", "[fe80::1%lo]", "[::1%lo]", "[fec0::1]", "[fc00::1]", "[fd00:ec2::254]", "[fd20:ce::254]", "[ff02::1]", "[100::1]",
    "[2001:db8::1]", "[3fff::1]", "[5f00::1]", "[4000::1]", "[::ffff:169.254.169.254]", "[::ffff:a9fe:a9fe]", "169.254.169.254", "2852039166",
    "169.254.170.2", "192.0.0.192", "100.100.100.200", "168.63.129.16", "metadata.google.internal", "metadata", "10.0.0.1", "172.17.0.1", "172.31.255.255",
    "192.168.1.1", "100.64.0.1", "198.18.0.1", "192.0.2.1", "203.0.113.7", "198.51.100.1", "192.88.99.1", "224.0.0.1", "240.0.0.1", "255.255.255.255",
    "host.docker.internal", "printer.local", "gateway.lan", "user@127.0.0.1", "example.org@127.0.0.1", "127.0.0.1#.example.org", "", "xn--", "-a.org",
]  # fmt: skip


@pytest.fixture
def short_folder() -> Iterator[Path]:  # a socket's path has at most 107 bytes
    with tempfile.TemporaryDirectory(prefix="door") as folder:
        yield Path(folder)


class Canary:
    """Listens on one port of both loopback addresses."""

    def __init__(self) -> None:
        self.connections = 0
        self.port = 0

    async def __aenter__(self) -> Self:
        self._servers = [await asyncio.start_server(self._take, "127.0.0.1", 0)]
        self.port = self._servers[0].sockets[0].getsockname()[1]
        if socket.has_ipv6:
            self._servers.append(await asyncio.start_server(self._take, "::1", self.port))
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()

    async def _take(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        writer.close()


@pytest.mark.parametrize("mode", ["open", "allow"])
async def test_what_is_not_public_is_refused_and_never_connected_to(short_folder: Path, mode: str) -> None:
    async with Canary() as canary, running_proxy(short_folder) as proxy:
        listed = [f"{host.lower()}:{canary.port}" for host in HOSTS] if mode == "allow" else []
        door = await proxy.open({"mode": mode, **({"allow": listed} if listed else {})})
        wrong = []
        for host in HOSTS:
            for request in (get(f"http://{host}:{canary.port}/"), connect(f"{host}:{canary.port}")):
                answer = await ask(door, request)
                if answer[9:12] not in (b"403", b"400"):
                    wrong.append((host, answer[:200]))
        assert wrong == []
        assert canary.connections == 0
        denials = await proxy.denials()
        assert {denial["rule"] for denial in denials} <= {"host", "private_name", "private_address", "not_allowed"}
        assert len(denials) >= 60


async def test_a_listed_private_pair_is_reached_and_no_other_port_of_it(short_folder: Path) -> None:
    async with Canary() as canary, running_proxy(short_folder, allow_private=[f"127.0.0.1:{canary.port}"]) as proxy:
        door = await proxy.open({"mode": "open"})
        answer = await ask(door, get(f"http://127.0.0.1:{canary.port}/"))
        assert answer.startswith(b"HTTP/1.1 502 ")  # the canary says nothing
        assert b"X-Toolcrib-Error: reply" in answer
        assert canary.connections == 1
        assert (await ask(door, get("http://127.0.0.1:1/"))).startswith(b"HTTP/1.1 403 ")
        assert (await ask(door, get(f"http://[::1]:{canary.port}/"))).startswith(b"HTTP/1.1 403 ")
        assert canary.connections == 1


@pytest.mark.parametrize(
    "head",
    [
        b"GET http://a.org/ HTTP/1.1\r\nHost: a.org\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET http://a.org/ HTTP/1.1\r\nHost: a.org\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\n",
        b"GET http://a.org/ HTTP/1.1\r\nHost: a.org\r\nContent-Length: +3\r\n\r\n",
        b"GET http://a.org/ HTTP/1.1\r\nHost: a.org\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"GET http://a.org/ HTTP/1.1\r\nHost: a.org\r\nX: a\r\n b\r\n\r\n",
        b"GET http://a.org/ HTTP/1.1\nHost: a.org\r\n\r\n",
        b"GET http://a.org/ HTTP/1.1\r\nHost: a.org\r\nX: a\nY: b\r\n\r\n",
        b"GET http://a.org/ HTTP/1.1\r\nHost : a.org\r\n\r\n",
        b"GET http://a.org/ HTTP/1.1\r\nHost: a.org\r\nHost: b.org\r\n\r\n",
        b"GET http://a.org/ HTTP/1.1\r\n\r\n",
        b"GET http://a.org/ HTTP/1.1\r\nHost: b.org\r\n\r\n",
        b"CONNECT a.org:443 HTTP/1.1\r\nHost: b.org:443\r\n\r\n",
        b"CONNECT a.org HTTP/1.1\r\nHost: a.org\r\n\r\n",
        b"CONNECT a.org:0 HTTP/1.1\r\nHost: a.org:0\r\n\r\n",
        b"CONNECT a.org:65536 HTTP/1.1\r\nHost: a.org:65536\r\n\r\n",
        b"CONNECT a.org: HTTP/1.1\r\nHost: a.org\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a.org\r\n\r\n",
        b"GET https://a.org/ HTTP/1.1\r\nHost: a.org\r\n\r\n",
        b"GET ftp://a.org/ HTTP/1.1\r\nHost: a.org\r\n\r\n",
        b"TRACE http://a.org/ HTTP/1.1\r\nHost: a.org\r\n\r\n",
        b"GET http://a.org/ HTTP/2.0\r\nHost: a.org\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
        b"GET http://a.org/ HTTP/1.1\r\nHost: a.org\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        b"GET http://a.org/ HTTP/1.1\r\nHost: a.org\r\nX: " + b"y" * 70_000 + b"\r\n\r\n",
    ],
    ids=lambda head: ascii(head[:60]),
)
async def test_a_request_that_two_readers_could_understand_in_two_ways_is_refused(
    short_folder: Path, head: bytes
) -> None:
    async with running_proxy(short_folder) as proxy:
        door = await proxy.open({"mode": "none"})
        status = int((await ask(door, head))[9:12])
        assert status in (400, 403, 405, 431, 501, 505)
        if status == 403:
            assert (await proxy.denials())[0]["rule"] == "host_mismatch"
