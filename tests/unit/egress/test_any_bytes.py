"""Any bytes at all, from both sides: the proxy never fails of itself, dials only what was vetted, and both ends see the same messages."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import h11
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from sandbox_images.egress import client_hello
from sandbox_images.egress.door import Grant
from sandbox_images.egress.limits import Limits
from sandbox_images.egress.rules import Policy
from tests.unit.egress.own_network import PUBLIC, Network, open_door

ALLOWED = "a.example"
NAMES = {ALLOWED: [PUBLIC], "b.example": ["93.184.216.35"], "in.example": ["127.0.0.1"], "two.example": [PUBLIC, "::1"]}
GRANT = Grant(
    Policy("allow", frozenset({f"{ALLOWED}:80", "in.example:80", "two.example:80"})), (), Limits(idle_s=5, head_s=2)
)
OPEN = Grant(Policy("open"), (), Limits(idle_s=5, head_s=2))
FUZZ = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="door") as made:
        yield Path(made)


def mostly(usual: list[bytes], odd: list[bytes]) -> st.SearchStrategy[bytes]:
    return st.integers(0, 4).flatmap(lambda number: st.sampled_from(odd if number == 0 else usual))


LINE_END = st.just(b"\r\n")
ODD_LINE_END = st.sampled_from([b"\r\n"] * 8 + [b"\n", b"\r", b"\r\r\n", b"\r\n ", b"\x00\r\n"])
TARGETS = mostly(
    [b"http://a.example/"],
    [
        b"http://a.example:80/x?y#z", b"HTTP://A.EXAMPLE", b"http://b.example/", b"http://in.example/", b"http://two.example/",
        b"http://a.example@127.0.0.1/", b"http://127.0.0.1/", b"/", b"*", b"a.example:80", b"a.example:443", b"http://a.example/\xff",
        b"http://a.example/ HTTP/1.1\r\nHost: b.example\r\n\r\nGET http://a.example/", b"http://a.example\\@b.example/",
        b"http://a.example:80:80/", b"http://[::ffff:127.0.0.1]/", b"http://a.example%00.b.example/", b"https://a.example/",
    ],
)  # fmt: skip
FIELDS = mostly(
    [b"Content-Length: 5", b"Transfer-Encoding: chunked", b"X-A: b", b"Connection: keep-alive, X-A", b"Expect: 100-continue"],
    [
        b"Content-Length: 05", b"Content-Length: 7",
        b"Content-Length: 5, 5", b"Content-Length: -1", b"Content-Length: 0x5", b"Content-Length : 5", b"Content-Length: 5\x0b",
        b"Transfer-Encoding: chunked, identity", b"Transfer-Encoding: xchunked", b"Transfer-Encoding : chunked", b"Transfer-Encoding: \x0bchunked",
        b"Transfer-Encoding:\tchunked", b"transfer-encoding: CHUNKED", b"Connection: close", b"Connection: Content-Length", b"Connection: keep-alive, X-A",
        b"Connection: transfer-encoding", b"X-A: b", b"X-A: \xff\xfe", b" folded", b"Expect: 100-continue", b"Host: b.example", b"Host: a.example:80",
        b"Upgrade: websocket", b"Connection: upgrade", b"Proxy-Authorization: Basic eDp5", b"X-Toolcrib-Denied: x", b": x", b"X", b"X-L: " + b"l" * 9000,
    ],
)  # fmt: skip
BODIES = mostly(
    [b"", b"12345", b"5\r\n12345\r\n0\r\n\r\n"],
    [
        b"0\r\n\r\n", b'5;ext="a"\r\n12345\r\n0\r\nX-T: t\r\n\r\n', b"5\n12345\n0\n\n", b"+5\r\n12345\r\n0\r\n\r\n",
        b"0x5\r\n12345\r\n0\r\n\r\n", b"5\r\n1234567\r\n0\r\n\r\n", b"fffffffffffffffff\r\n", b"5\r\n123", b"-1\r\n\r\n", b"5 \r\n12345\r\n0\r\n\r\n",
        b"00000000000000000005\r\n12345\r\n0\r\n\r\n", b"0\r\nHost: b.example\r\n\r\n", b"5;\n\r\n12345\r\n0\r\n\r\n", b"g\r\n",
    ],
)  # fmt: skip
METHODS = mostly([b"GET", b"POST", b"HEAD", b"PUT"], [b"CONNECT", b"OPTIONS", b"TRACE", b"get", b"G T", b"", b"PRI"])
VERSIONS = mostly([b"HTTP/1.1"], [b"HTTP/1.0", b"HTTP/1.2", b"HTTP/0.9", b"HTTP/2.0", b"", b"HTTP/1.1 ", b"http/1.1"])


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    line = draw(METHODS) + b" " + draw(TARGETS) + b" " + draw(VERSIONS)
    fields = draw(st.permutations([*draw(st.lists(FIELDS, max_size=3)), b"Host: a.example"]))
    end = ODD_LINE_END if draw(st.integers(0, 4)) == 0 else LINE_END
    return b"".join(part + draw(end) for part in (line, *fields)) + draw(end) + draw(BODIES)


@st.composite
def cut(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> list[bytes]:
    """As it may come in packets."""
    data = draw(whole)
    places = sorted(draw(st.lists(st.integers(0, len(data)), max_size=4)))
    return [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]


STREAMS = cut(st.one_of(st.lists(requests(), min_size=1, max_size=3).map(b"".join), st.binary(max_size=300)))


class Recorder:
    """Another server that is strict, and keeps what each connection sent."""

    def __init__(self) -> None:
        self.streams: list[bytearray] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = bytearray()
        self.streams.append(stream)
        answered = 0
        while data := await reader.read(65_536):
            stream += data
            with contextlib.suppress(h11.RemoteProtocolError):
                whole = len(_messages(bytes(stream)))
                for _ in range(answered, whole):
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                answered = max(answered, whole)


def _messages(stream: bytes) -> list[tuple[h11.Request, bytes]]:
    """Whole requests, as h11 reads them. Raises h11.RemoteProtocolError."""
    found: list[tuple[h11.Request, bytes]] = []
    while stream:
        http = h11.Connection(h11.SERVER)
        http.receive_data(stream)
        request, body = http.next_event(), b""
        if not isinstance(request, h11.Request):
            return found
        while isinstance(event := http.next_event(), h11.Data):
            body += bytes(event.data)
        if not isinstance(event, h11.EndOfMessage):
            return found
        found.append((request, body))
        stream = bytes(http.trailing_data[0])
    return found


def _loosely(stream: bytes, *, length_first: bool) -> list[bytes]:
    """Request lines, as a server would read that takes bare line feeds, odd names and either framing."""
    found = []
    while match := re.search(rb"\r?\n\r?\n", stream):
        head, stream = stream[: match.start()], stream[match.end() :]
        lines = re.split(rb"\r?\n", head)
        found.append(lines[0])
        fields = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])
        }
        length, chunked = fields.get(b"content-length"), b"chunked" in fields.get(b"transfer-encoding", b"").lower()
        if length is not None and (length_first or not chunked):
            stream = stream[int(length) :]
        elif chunked:
            while size := re.match(rb"\s*([0-9a-fA-F]+)[^\n]*\n", stream):
                number = int(size[1], 16)
                stream = stream[size.end() + number :]
                if number == 0:
                    break
                stream = re.sub(rb"^\r?\n", b"", stream, count=1)
            stream = re.sub(rb"^\r?\n", b"", stream, count=1)
    return found


@FUZZ
@given(pieces=STREAMS)
def test_whatever_a_client_says_the_other_server_gets_clean_requests_to_itself_or_nothing(pieces: list[bytes]) -> None:
    async def play() -> None:
        recorder = Recorder()
        network = Network(NAMES, recorder.serve)
        with tempfile.TemporaryDirectory(prefix="door") as made:
            async with open_door(Path(made), network, GRANT) as door:
                await door.say(*pieces)
            await network.done()
        assert door.faults == []
        assert set(network.dialled) <= {(PUBLIC, 80)}
        tunnel = any(piece.startswith(b"CONNECT") or b"CONNECT" in piece for piece in pieces)
        if tunnel:
            return  # whatever comes behind a CONNECT is the other server's to read
        event(
            f"{len(recorder.streams)} connections, {sum(len(_messages(bytes(one))) for one in recorder.streams)} requests"
        )
        for stream in recorder.streams:
            messages = _messages(bytes(stream))
            asked = [request.method + b" " + request.target + b" HTTP/1.1" for request, _ in messages]
            for request, _ in messages:
                assert [value for name, value in request.headers if name == b"host"] == [ALLOWED.encode()]
                assert request.target.startswith((b"/", b"?", b"*"))
            # what is not whole at the end is cut short, never read as another request
            for length_first in (True, False):
                assert _loosely(bytes(stream), length_first=length_first)[: len(asked)] == asked
                assert len(_loosely(bytes(stream), length_first=length_first)) <= len(asked) + 1

    asyncio.run(play())


STATUS = mostly([b"HTTP/1.1 200 OK"], [b"HTTP/1.0 200 OK", b"HTTP/1.1 204 No", b"HTTP/1.1 304 No", b"HTTP/1.1 100 Go", b"HTTP/1.1 101 Sw",
    b"HTTP/1.1 199 x", b"HTTP/1.1 999 x", b"HTTP/1.1 20 x", b"HTTP/1.1 403 x", b"HTTP/1.1 502 x", b"HTTP/2 200", b"200 OK", b"HTTP/1.1 200 \xff\x00", b"ICY 200 OK", b""])  # fmt: skip
ANSWER_FIELDS = mostly(
    [b"Content-Length: 5", b"Transfer-Encoding: chunked", b"X-Toolcrib-Denied: forged", b"x-toolcrib-error: forged", b"Connection: X-B"],
    [
        b"Content-Length: 7", b"Content-Length: x", b"Content-Length: 5, 5", b"Content-Length: 5, 6", b"Transfer-Encoding: gzip", b"Connection: close", b"X-B: c", b"Set-Cookie: a=b",
        b"X-Toolcrib-Denied : forged", b" forged", b"X: \x00", b"Upgrade: h2c", b"Trailer: X-T",
        b"Location: http://127.0.0.1/", b"Content-Encoding: gzip", b"Proxy-Authenticate: Basic", b"Keep-Alive: 5", b"X-L: " + b"l" * 70_000,
    ],
)  # fmt: skip


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    lines = [draw(STATUS), *draw(st.lists(ANSWER_FIELDS, max_size=4))]
    end = ODD_LINE_END if draw(st.integers(0, 4)) == 0 else LINE_END
    return b"".join(line + draw(end) for line in lines) + draw(end) + draw(BODIES)


@FUZZ
@given(pieces=cut(st.one_of(st.lists(answers(), min_size=1, max_size=3).map(b"".join), st.binary(max_size=300))))
def test_whatever_another_server_answers_the_client_gets_a_clean_answer_or_a_cut_one(pieces: list[bytes]) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        writer.write_eof()

    async def play() -> bytes:
        network = Network(NAMES, serve)
        with tempfile.TemporaryDirectory(prefix="door") as made:
            async with open_door(Path(made), network, OPEN) as door:
                got = await door.say(b"GET http://a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n")
            await network.done()
        assert door.faults == []
        return got

    got = asyncio.run(play())
    client = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    client.send(h11.Request(method=b"GET", target=b"/", headers=[("Host", "a.example")]))
    client.send(h11.EndOfMessage())
    client.receive_data(got)
    answer = client.next_event()
    assert isinstance(answer, h11.Response), got[:300]
    event(f"status {answer.status_code}")
    names = {name for name, _ in answer.headers}
    assert b"forged" not in b" ".join(value for name, value in answer.headers if name.startswith(b"x-toolcrib"))
    assert b"x-toolcrib-denied" not in names
    assert not names & {b"proxy-authenticate", b"keep-alive", b"upgrade"}
    with contextlib.suppress(h11.RemoteProtocolError):  # cut short
        client.receive_data(b"")
        while not isinstance(client.next_event(), h11.EndOfMessage | h11.ConnectionClosed):
            pass
    assert client.trailing_data[0] == b""


def _hello(name: str | None) -> bytes:
    """What Python's client says first."""
    context = ssl.create_default_context()
    context.check_hostname = False
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


HELLO = _hello("a.example")


@given(sizes=st.lists(st.integers(1, 400), min_size=1, max_size=40))
def test_a_name_is_found_however_tls_is_split_into_records(sizes: list[int]) -> None:
    message, records, place = HELLO[5:], b"", 0
    while message:
        part, message = message[: sizes[place % len(sizes)]], message[sizes[place % len(sizes)] :]
        records += bytes((22, 3, 1)) + len(part).to_bytes(2, "big") + part
        place += 1
    assert client_hello.server_name(records) == "a.example"
    for size in {0, 1, 4, 5, 6, len(records) // 2, len(records) - 1}:
        assert client_hello.server_name(records[:size]) is False


@FUZZ
@given(data=st.data())
def test_a_damaged_first_tls_message_gives_no_other_fault(data: st.DataObject) -> None:
    damaged = bytearray(HELLO)
    for _ in range(data.draw(st.integers(1, 6))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(client_hello.NotTlsError):
        found = client_hello.server_name(bytes(damaged))
        assert found is None or found is False or isinstance(found, str)
