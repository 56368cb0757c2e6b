"""What a client says on one stream: plain requests, one after the other, or one CONNECT."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable

import h11

from sandbox_images.egress import head
from sandbox_images.egress.answers import READY, answer_to, status_of
from sandbox_images.egress.authority import Authority
from sandbox_images.egress.door import Connection
from sandbox_images.egress.exchange import Exchanges
from sandbox_images.egress.problems import BadRequest, ConnectionCut, Refused, Unanswered
from sandbox_images.egress.streams import Stream
from sandbox_images.egress.target import Target, read_absolute, read_authority
from sandbox_images.egress.tunnel import Tunnel, secret_stream
from sandbox_images.egress.vetting import Vetting

READY_HOST, READY_PATH = "egress.toolcrib", "/ready"
_ECHOING = (b"TRACE", b"TRACK")  # their answers would show a secret header
_LINGER_S, _LINGER_BYTES = 1.0, 1 << 20


class Conversation:
    """`hold` carries it to its end and raises nothing but what is a fault of the proxy itself."""

    def __init__(
        self,
        connection: Connection,
        vetting: Vetting,
        authority: Callable[[], Authority],
        upstream_tls: Callable[[], ssl.SSLContext],
    ) -> None:
        self._connection, self._vetting = connection, vetting
        self._authority, self._upstream_tls = authority, upstream_tls

    async def hold(self) -> None:
        try:
            await self._requests(self._connection.stream, b"", None)
        except (ConnectionCut, OSError, TimeoutError):
            pass
        except Refused as refusal:  # too late to be told to the client
            self._connection.door.denied(refusal)

    async def _requests(self, stream: Stream, rest: bytes, secured: Target | None) -> None:
        """`secured`: within a tunnel whose TLS ends here, the only target that may be asked for."""
        connection = self._connection
        exchanges = Exchanges(connection, stream, self._vetting, self._upstream_tls if secured else None)
        try:
            while True:
                whole_head, rest = await self._read_head(stream, rest, exchanges)
                if not whole_head:
                    return
                rest = await self._request(stream, whole_head, rest, exchanges, secured)
        finally:
            await exchanges.let_go()
            await stream.close()

    async def _request(
        self, stream: Stream, whole_head: bytes, rest: bytes, exchanges: Exchanges, secured: Target | None
    ) -> bytes:
        """What came behind the request. Raises ConnectionCut once the client may not ask again."""
        connection, started = self._connection, time.monotonic()
        with_body, target = True, None
        try:
            http, request = _parsed(whole_head, rest, connection.door.grant.limits.head_bytes)
            with_body = request.method != b"HEAD"
            if request.method == b"CONNECT":
                if secured is not None:
                    raise BadRequest("There is no CONNECT within a tunnel whose TLS ends at the proxy.")
                target = _connect_target(request)
                await self._tunnel(rest, target)
                raise ConnectionCut
            target, path = _plain_target(request, secured)
            if target.host == READY_HOST and secured is None:
                await self._ready(stream, http, request, path)
                raise ConnectionCut
            if not await exchanges.carry(http, request, target, path):
                raise ConnectionCut
            return bytes(http.trailing_data[0])
        except (Refused, Unanswered, BadRequest) as problem:
            if isinstance(problem, Refused):
                connection.door.denied(problem)
            elif isinstance(problem, Unanswered) and target is not None:
                connection.door.note_use(target, 0, 0, time.monotonic() - started, status_of(problem))
            if exchanges.answered:
                raise ConnectionCut from problem
            await exchanges.let_go()
            await stream.write(answer_to(problem, body=with_body))
            await self._linger(stream)
            raise ConnectionCut from problem

    async def _read_head(self, stream: Stream, rest: bytes, exchanges: Exchanges) -> tuple[bytes, bytes]:
        """A request's head, checked, and what came behind it; nothing at the end. Raises ConnectionCut once a bad head is answered."""
        limits = self._connection.door.grant.limits
        data = bytearray(rest)
        try:
            if not data:
                data += await self._connection.read_client(stream)
            if not data:
                return b"", b""
            async with asyncio.timeout(limits.head_s):
                while (found := data.find(head.END)) < 0 and len(data) <= limits.head_bytes:
                    more = await self._connection.read_client(stream)
                    if not more:
                        raise ConnectionCut
                    data += more
            size = found + len(head.END)
            if found < 0 or size > limits.head_bytes:
                raise BadRequest(f"The request's head is longer than {limits.head_bytes} bytes.", 431)
            head.check_head(bytes(data[:size]))
        except (BadRequest, TimeoutError, Refused) as problem:
            if isinstance(problem, Refused):
                self._connection.door.denied(problem)
            late = BadRequest("The request's head came too slowly.", 408)
            bad = late if isinstance(problem, TimeoutError) else problem
            await exchanges.let_go()
            await stream.write(answer_to(bad))
            await self._linger(stream)
            raise ConnectionCut from problem
        return bytes(data[:size]), bytes(data[size:])

    async def _ready(self, stream: Stream, http: h11.Connection, request: h11.Request, path: str) -> None:
        if path != READY_PATH or request.method != b"GET" or type(http.next_event()) is not h11.EndOfMessage:
            raise BadRequest(f"The proxy itself answers GET http://{READY_HOST}{READY_PATH} and nothing else.", 404)
        await stream.write(READY)

    async def _tunnel(self, rest: bytes, target: Target) -> None:
        connection = self._connection
        if connection.door.grant.secrets_for(target):
            connection.door.grant.policy.check(target)
            self._vetting.check_name(target)
            connection.check_allowance()
            connection.target, connection.secret = target, True
            inner = await secret_stream(connection, rest, self._authority().context(target.host), target)
            await self._requests(inner, b"", target)
        else:
            await Tunnel(connection, target, self._vetting).carry(rest)

    async def _linger(self, stream: Stream) -> None:
        """Let the client read the answer: what it still sends would make the kernel drop it."""
        await stream.end()
        left = _LINGER_BYTES
        try:
            async with asyncio.timeout(_LINGER_S):
                while left > 0 and (data := await stream.read()):
                    left -= len(data)
        except TimeoutError:
            pass


def _parsed(whole_head: bytes, rest: bytes, head_bytes: int) -> tuple[h11.Connection, h11.Request]:
    http = h11.Connection(h11.SERVER, max_incomplete_event_size=head_bytes)
    try:
        http.receive_data(whole_head + rest)
        request = http.next_event()
    except h11.RemoteProtocolError as problem:
        raise BadRequest(f"The request can't be read: {problem}.") from problem
    if not isinstance(request, h11.Request):
        raise BadRequest("The request can't be read.")
    if request.method in _ECHOING:
        raise BadRequest("The method is not forwarded.", 405)
    return http, request


def _host_field(request: h11.Request) -> str | None:
    return next((value.decode("latin-1") for name, value in request.headers if name == b"host"), None)


def _connect_target(request: h11.Request) -> Target:
    if any(name in (b"content-length", b"transfer-encoding") for name, _ in request.headers):
        raise BadRequest("A CONNECT has no body.")
    text = request.target.decode("ascii")
    target = read_authority(text, None)
    _agree(target, _host_field(request), target.port)
    return target


def _plain_target(request: h11.Request, secured: Target | None) -> tuple[Target, str]:
    text = request.target.decode("ascii")
    if secured is None:
        target, path = read_absolute(text)
        _agree(target, _host_field(request), 80)
        return target, path
    if not text.startswith("/"):
        raise BadRequest("Within a tunnel a request names a path alone.")
    _agree(secured, _host_field(request), 443)
    return secured, text


def _agree(target: Target, field: str | None, default_port: int) -> None:
    """The Host field must name what the request names: two readers would else see two hosts."""
    if field is None:
        return
    try:
        named = read_authority(field, default_port)
    except (BadRequest, Refused):
        named = None
    if named != target:
        shown = ascii(field[:80])[1:-1]
        reason = f"{target} is refused: the Host header says {shown}, and both must name the same host and port."
        raise Refused("host_mismatch", target.host, target.port, reason)
