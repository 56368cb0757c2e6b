"""Connects to what was vetted: the policy first, then the name's addresses, then one of these addresses and no other."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable

from sandbox_images.egress.door import Connection
from sandbox_images.egress.problems import ConnectionCut, Unanswered
from sandbox_images.egress.streams import PlainStream
from sandbox_images.egress.target import Target
from sandbox_images.egress.vetting import Streams, Vetting


async def dial(
    connection: Connection, target: Target, vetting: Vetting, upstream_tls: Callable[[], ssl.SSLContext] | None
) -> PlainStream:
    """Raises Refused, Unanswered. `upstream_tls`: speak TLS, and verify the other side as `target`."""
    door = connection.door
    connection.target = target
    door.grant.policy.check(target)
    connection.check_allowance()
    until = time.monotonic() + door.grant.limits.connect_s
    addresses = await vetting.addresses(target, door.resolving)
    context = upstream_tls() if upstream_tls is not None else None
    problem: Exception = Unanswered("connect", f"{target} has no address.")
    for place, address in enumerate(addresses):
        door.grant.policy.check(target)  # it may have changed while the name was resolved or another address tried
        vetting.check_address(target, address)
        connection.address = address
        share = (until - time.monotonic()) / (len(addresses) - place)
        try:
            streams = await _connect(vetting, address, target, context, share)
        except (OSError, TimeoutError, ValueError) as failed:
            problem = _told(target, failed)
            continue
        stream = PlainStream(*streams)
        connection.upstream, connection.touched = stream, time.monotonic()
        if connection not in door.connections:  # the door was closed meanwhile
            stream.abort()
            raise ConnectionCut
        try:
            door.grant.policy.check(target)
        except Exception:
            stream.abort()
            raise
        return stream
    raise problem


async def _connect(
    vetting: Vetting, address: str, target: Target, context: ssl.SSLContext | None, within_s: float
) -> Streams:
    async with asyncio.timeout(max(within_s, 0.1)):
        return await vetting.outside.connect(address, target.port, context, target.host if context else None)


def _told(target: Target, failed: Exception) -> Unanswered:
    """Without a word of the address or of this machine."""
    if isinstance(failed, TimeoutError):
        return Unanswered("timeout", f"{target} did not answer in time.")
    if isinstance(failed, ssl.SSLCertVerificationError):
        return Unanswered("tls", f"The certificate of {target} can't be verified: {failed.verify_message}.")
    if isinstance(failed, ssl.SSLError):
        return Unanswered("tls", f"{target} does not speak TLS as it should.")
    if isinstance(failed, ConnectionRefusedError):
        return Unanswered("connect", f"{target} refuses connections.")
    return Unanswered("connect", f"{target} can't be reached.")
