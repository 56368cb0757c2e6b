"""What the egress proxy says no to, as the end of a call."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from urllib.parse import urlsplit

from sandbox_images.base.door import PROXY
from sandbox_images.base.outcome import Ended, denied

DENIED_HEADER, ERROR_HEADER = "x-toolcrib-denied", "x-toolcrib-error"
NO_WAY_OUT = (
    "This session has no way out to the network. Create one with an egress that allows what is wanted, for example "
    '{"egress": {"mode": "open"}}.'
)
_TIMEOUT_S, _MAX_BYTES = 20.0, 65_536


def refusal(host: str, port: int, rule: str) -> Ended:
    """`rule`: the proxy's word for it."""
    message = (
        f"{host}:{port} is refused by the egress policy (rule: {rule}). Nothing was connected to. The session's egress, or the "
        "operator's settings, would have to allow it."
    )
    return denied(message, {"host": host, "port": port, "rule": rule})


async def ask_why(url: str) -> Ended | str | None:
    """Why the proxy opens no tunnel for an https address: a refusal, its own words for another problem, or nothing to say."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 443
    named = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    with suppress(OSError, TimeoutError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        async with asyncio.timeout(_TIMEOUT_S):
            place = urlsplit(PROXY)
            reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=_MAX_BYTES)
            try:
                writer.write(f"CONNECT {named} HTTP/1.1\r\nHost: {named}\r\n\r\n".encode("ascii"))
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                headers = {
                    name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])
                }
                if DENIED_HEADER in headers:
                    return refusal(host, port, headers[DENIED_HEADER])
                if ERROR_HEADER in headers:
                    length = min(int(headers.get("content-length", "0")), _MAX_BYTES)
                    return (await reader.readexactly(length)).decode("utf-8", "replace").strip()
            finally:
                writer.close()
    return None
