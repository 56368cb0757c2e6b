"""CONNECT: bytes both ways, once it is plain that they go to the host that was asked for.

Under a list of allowed hosts the first bytes of the client are looked at: TLS must name the same host in its ClientHello,
and on port 443 it must be TLS. Else a tunnel to an allowed host could be used for another site of the same server.
"""

from __future__ import annotations

import asyncio
import ssl
import time

from sandbox_images.egress import client_hello
from sandbox_images.egress.answers import ESTABLISHED
from sandbox_images.egress.dialling import dial
from sandbox_images.egress.door import Connection
from sandbox_images.egress.problems import ConnectionCut, Refused
from sandbox_images.egress.streams import PlainStream, Stream, TlsStream
from sandbox_images.egress.target import Target
from sandbox_images.egress.vetting import Vetting

TLS_PORT = 443


class Tunnel:
    """Raises Refused and Unanswered before the 200; ConnectionCut and OSError after it, when the denial was told to the server."""

    def __init__(self, connection: Connection, target: Target, vetting: Vetting) -> None:
        self._connection, self._target, self._vetting = connection, target, vetting

    async def carry(self, first: bytes) -> None:
        """`first` came right behind the CONNECT."""
        connection, started = self._connection, time.monotonic()
        connection.secret = False
        connection.inspected = connection.door.grant.policy.mode == "allow"
        before = connection.up - len(first), connection.down
        upstream = await dial(connection, self._target, self._vetting, None)
        connection.inspected |= connection.door.grant.policy.mode == "allow"
        try:
            await connection.stream.write(ESTABLISHED)
            await self._both_ways(upstream, first)
        except Refused as refusal:
            connection.door.denied(refusal)
            raise ConnectionCut from refusal
        finally:
            connection.abort()
            up, down = connection.up - before[0], connection.down - before[1]
            connection.door.note_use(self._target, up, down, time.monotonic() - started, 200)

    async def _both_ways(self, upstream: PlainStream, first: bytes) -> None:
        up = asyncio.ensure_future(self._up(upstream, first))
        down = asyncio.ensure_future(self._down(upstream))
        try:
            done, _ = await asyncio.wait((up, down), return_when=asyncio.FIRST_EXCEPTION)
            for ended in done:
                ended.result()
        finally:
            up.cancel()
            down.cancel()
            await asyncio.wait((up, down))
            for ended in (up, down):
                if not ended.cancelled():
                    ended.exception()  # looked at: the first one was raised

    async def _up(self, upstream: PlainStream, data: bytes) -> None:
        connection = self._connection
        if connection.inspected:
            data = await self._inspected(data)
        else:
            data = data or await connection.read_client(connection.stream)
        while data:
            await upstream.write(data)
            data = await connection.read_client(connection.stream)
        await upstream.end()

    async def _down(self, upstream: PlainStream) -> None:
        connection = self._connection
        while data := await connection.read_upstream(upstream):
            await connection.stream.write(data)
        await connection.stream.end()

    async def _inspected(self, data: bytes) -> bytes:
        """The client's first bytes, when they may go on. Raises Refused, and ConnectionCut once a denial was told."""
        connection, target = self._connection, self._target
        within_s = connection.door.grant.limits.head_s if target.port == TLS_PORT else None
        try:
            async with asyncio.timeout(within_s):
                data = data or await connection.read_client(connection.stream)
            if not data or (target.port != TLS_PORT and not client_hello.begins_tls(data)):
                return data
            async with asyncio.timeout(connection.door.grant.limits.head_s):
                name = client_hello.server_name(data)
                while name is False:
                    more = await connection.read_client(connection.stream)
                    if not more:
                        raise ConnectionCut
                    data += more
                    name = client_hello.server_name(data)
        except client_hello.NotTlsError:
            raise self._refused("no_tls", "what is sent through it is not TLS") from None
        except TimeoutError as late:
            raise ConnectionCut from late
        expected = None if target.is_address else target.host
        if name != expected:
            said = f"names {ascii(str(name)[:80])[1:-1]}" if name else "names no host"
            refusal = self._refused("tls_name", f"the TLS within it {said}")
            connection.door.denied(refusal)  # before the client knows
            await connection.stream.write(client_hello.ALERT)
            raise ConnectionCut from refusal
        return data

    def _refused(self, rule: str, why: str) -> Refused:
        reason = f"The tunnel to {self._target} is refused: {why}."
        return Refused(rule, self._target.host, self._target.port, reason)


async def secret_stream(connection: Connection, first: bytes, context: ssl.SSLContext, target: Target) -> Stream:
    """The client's TLS ends here, at a certificate for `target`. Raises ConnectionCut, when the denial was told to the server."""
    await connection.stream.write(ESTABLISHED)
    try:
        async with asyncio.timeout(connection.door.grant.limits.head_s):
            first = first or await connection.read_client(connection.stream)
            if not client_hello.begins_tls(first):
                reason = f"The tunnel to {target} is refused: what is sent through it is not TLS."
                connection.door.denied(Refused("no_tls", target.host, target.port, reason))
                raise ConnectionCut
            stream = TlsStream(connection.stream, context, first)
            await stream.handshake()
            return stream
    except TimeoutError as late:
        raise ConnectionCut from late
