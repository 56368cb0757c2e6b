"""One plain HTTP request to another server, and its response back. h11 reads and writes both; nothing is unpacked.

Each side is framed anew: what is forwarded is never the bytes that came, so that both ends agree where a message ends.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import h11

from sandbox_images.egress.dialling import dial
from sandbox_images.egress.door import Connection
from sandbox_images.egress.problems import BadRequest, ConnectionCut, Refused, Unanswered
from sandbox_images.egress.secret_headers import Redaction
from sandbox_images.egress.streams import PlainStream, Stream
from sandbox_images.egress.target import Target
from sandbox_images.egress.vetting import Vetting

HOP_BY_HOP = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
        b"trailer", b"transfer-encoding", b"upgrade", b"expect", b"host", b"http2-settings",
    }
)  # fmt: skip
_OURS = {b"x-toolcrib-denied", b"x-toolcrib-error"}  # another server must not pass for the proxy
_FRAMING = frozenset({b"content-length", b"transfer-encoding"})
_REPEATABLE = (b"GET", b"HEAD", b"OPTIONS")
_Headers = list[tuple[bytes, bytes]]


@dataclass(eq=False)
class Upstream:
    """A connection to another server, which a later request of the same client may use again."""

    stream: PlainStream
    target: Target
    http: h11.Connection
    fresh: bool = True

    async def send(self, event: h11.Event) -> None:
        data = self.http.send(event)
        if data:
            await self.stream.write(data)


class Exchanges:
    """Carries the requests of one client stream, one after the other. `tls`: the other servers are spoken to in TLS."""

    def __init__(
        self, connection: Connection, stream: Stream, vetting: Vetting, tls: Callable[[], ssl.SSLContext] | None
    ) -> None:
        self._connection, self._stream, self._vetting, self._tls = connection, stream, vetting, tls
        self._kept: Upstream | None = None
        self.answered = False  # the head of the present response is out

    async def carry(self, http: h11.Connection, request: h11.Request, target: Target, path: str) -> bool:
        """Whether the client may ask again. `http` has given its request and nothing more.

        Raises Refused, Unanswered, BadRequest, ConnectionCut, OSError: answer unless `answered`, then end the connection.
        """
        self.answered = False
        connection, started = self._connection, time.monotonic()
        before = connection.up, connection.down
        secrets = connection.door.grant.secrets_for(target)
        fields = _forwarded(request.headers, {header.name.lower().encode() for header in secrets})
        fields.insert(0, (b"Host", _host(target, secure=self._tls is not None)))
        fields += [(header.name.encode(), header.value.encode()) for header in secrets]
        if secrets:  # so that a secret that comes back can be found in it
            fields = [(name, value) for name, value in fields if name.lower() != b"accept-encoding"]
            fields.append((b"Accept-Encoding", b"identity"))
        asked = h11.Request(method=request.method, target=path, headers=fields)
        connection.inspected, connection.secret = True, bool(secrets)
        try:
            upstream, response, upload = await self._ask(http, asked, target)
        except BaseException:
            await self.let_go()
            raise
        whole = False
        try:
            await self._send_back(http, upstream, response, Redaction(secrets))
            whole = upload is None or (upload.done() and upload.exception() is None)
        finally:
            if upload is not None:
                upload.cancel()
                await asyncio.wait([upload])
            if not (whole and self._keep(upstream)):
                await self.let_go()
            up, down = connection.up - before[0], connection.down - before[1]
            connection.door.note_use(target, up, down, time.monotonic() - started, response.status_code)
        return whole and http.our_state is h11.DONE and http.their_state is h11.DONE

    async def let_go(self) -> None:
        kept, self._kept = self._kept, None
        self._connection.target = self._connection.upstream = self._connection.address = None
        if kept is not None:
            kept.stream.abort()

    def _keep(self, upstream: Upstream) -> bool:
        http = upstream.http
        if http.our_state is not h11.DONE or http.their_state is not h11.DONE or http.trailing_data[0]:
            return False
        http.start_next_cycle()
        upstream.fresh = False
        return True

    async def _ask(
        self, http: h11.Connection, asked: h11.Request, target: Target
    ) -> tuple[Upstream, h11.Response, asyncio.Task[None] | None]:
        bodiless = not any(name in _FRAMING for name, _ in asked.headers)
        if bodiless:
            http.next_event()  # its end
        upstream = await self._upstream(target, reuse=bodiless and asked.method in _REPEATABLE)
        while True:
            upload = None
            try:
                await upstream.send(asked)
                if bodiless:
                    await upstream.send(h11.EndOfMessage())
                else:
                    upload = asyncio.get_running_loop().create_task(self._upload(http, upstream))
                return upstream, await self._head(upstream, upload), upload
            except (Unanswered, OSError) as problem:
                if upload is not None:
                    upload.cancel()
                    await asyncio.wait([upload])
                    if not upload.cancelled() and (cause := upload.exception()) is not None:
                        raise cause from problem
                if upstream.fresh:
                    if isinstance(problem, Unanswered):
                        raise
                    raise Unanswered("reply", f"{target} ended the connection before it answered.") from problem
            await self.let_go()  # one kept from before, which the other side had closed meanwhile
            upstream = await self._upstream(target, reuse=False)

    async def _upstream(self, target: Target, *, reuse: bool) -> Upstream:
        kept = self._kept
        if kept is not None and reuse and kept.target == target and not kept.stream.ended:
            self._connection.door.grant.policy.check(target)
            self._connection.check_allowance()
            return kept
        await self.let_go()
        stream = await dial(self._connection, target, self._vetting, self._tls)
        size = self._connection.door.grant.limits.head_bytes
        self._kept = Upstream(stream, target, h11.Connection(h11.CLIENT, max_incomplete_event_size=size))
        return self._kept

    async def _upload(self, http: h11.Connection, upstream: Upstream) -> None:
        """The request's body. Ends the upstream connection when it can't be carried on: half a body is never a whole one."""
        try:
            while True:
                event = http.next_event()
                if event is h11.NEED_DATA:
                    if http.they_are_waiting_for_100_continue:
                        go_on = http.send(h11.InformationalResponse(status_code=100, headers=[]))
                        await self._stream.write(go_on or b"")
                    data = await self._connection.read_client(self._stream)
                    http.receive_data(data)
                elif isinstance(event, h11.Data):
                    await upstream.send(h11.Data(data=event.data))
                elif isinstance(event, h11.EndOfMessage):
                    await upstream.send(h11.EndOfMessage())
                    return
                else:
                    raise ConnectionCut
        except h11.RemoteProtocolError as problem:
            upstream.stream.abort()
            raise BadRequest("The request's body can't be read.") from problem
        except h11.LocalProtocolError as problem:  # answered already
            raise ConnectionCut from problem
        except Refused:
            upstream.stream.abort()
            raise

    async def _head(self, upstream: Upstream, upload: asyncio.Task[None] | None) -> h11.Response:
        """The response's head; the time runs from when the request was sent whole."""
        target = upstream.target
        try:
            if upload is not None:
                reading = asyncio.get_running_loop().create_task(self._next(upstream))
                try:
                    await asyncio.wait({reading, upload}, return_when=asyncio.FIRST_COMPLETED)
                    if (
                        upload.done()
                        and not upload.cancelled()
                        and isinstance(upload.exception(), Refused | BadRequest | ConnectionCut)
                    ):
                        upload.result()
                    async with asyncio.timeout(self._connection.door.grant.limits.idle_s):
                        event = await reading
                finally:
                    reading.cancel()
                    await asyncio.wait([reading])
            else:
                async with asyncio.timeout(self._connection.door.grant.limits.idle_s):
                    event = await self._next(upstream)
        except TimeoutError as late:
            raise Unanswered("timeout", f"{target} did not answer in time.") from late
        except h11.RemoteProtocolError as problem:
            raise Unanswered("reply", f"{target} did not answer in HTTP/1.1 as it should.") from problem
        if not isinstance(event, h11.Response):
            raise Unanswered("reply", f"{target} ended the connection before it answered.")
        return event

    async def _next(self, upstream: Upstream) -> h11.Event | type[h11.PAUSED]:
        """The next event that is not an informational response. Raises OSError, RemoteProtocolError, Refused."""
        while True:
            event = upstream.http.next_event()
            if event is h11.NEED_DATA:
                upstream.http.receive_data(await self._connection.read_upstream(upstream.stream))
            elif not isinstance(event, h11.InformationalResponse):
                return event  # type: ignore[return-value] # NEED_DATA is handled above

    async def _send_back(
        self, http: h11.Connection, upstream: Upstream, response: h11.Response, redaction: Redaction
    ) -> None:
        framed = any(name == b"transfer-encoding" for name, _ in response.headers)
        fields = [
            (name, redaction.whole(value))
            for name, value in _forwarded(response.headers, _OURS | ({b"content-length"} if framed else set()))
        ]
        reason = redaction.whole(response.reason)
        self.answered = True
        head = h11.Response(status_code=response.status_code, headers=fields, reason=reason)
        await self._send(http, head)
        while True:
            try:
                event = await self._next(upstream)
            except h11.RemoteProtocolError as problem:  # cut short: the client must not take it for whole
                raise ConnectionCut from problem
            if isinstance(event, h11.Data):
                await self._send(http, h11.Data(data=redaction.feed(bytes(event.data))))
            elif isinstance(event, h11.EndOfMessage):
                await self._send(http, h11.Data(data=redaction.rest()))
                await self._send(http, h11.EndOfMessage())
                return
            else:
                raise ConnectionCut

    async def _send(self, http: h11.Connection, event: h11.Event) -> None:
        data = http.send(event)
        if data:
            await self._stream.write(data)
            self._connection.touched = time.monotonic()


def _forwarded(headers: Any, left_out: set[bytes]) -> _Headers:
    """End-to-end fields alone, with their names as written."""
    named = {
        name.strip().lower() for field, value in headers if field == b"connection" for name in value.split(b",")
    } - _FRAMING
    dropped = HOP_BY_HOP | named | left_out
    forwarded = [(name, value) for name, value in headers.raw_items() if name.lower() not in dropped]
    if b"transfer-encoding" not in left_out and any(name == b"transfer-encoding" for name, _ in headers):
        forwarded.append((b"Transfer-Encoding", b"chunked"))
    return forwarded


def _host(target: Target, *, secure: bool) -> bytes:
    usual = 443 if secure else 80
    return (target.shown_host if target.port == usual else str(target)).encode("ascii")
