"""Gets one web page in bounded time and size, hop by hop, each through the egress proxy, which decides what may be reached.

httpx is used for the protocol alone, below its client: no settings from the environment, no cookies, no redirects of
its own, one connection a hop.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import httpx

from sandbox_images.base import door
from sandbox_images.base.egress_refusal import DENIED_HEADER, ERROR_HEADER, NO_WAY_OUT, ask_why, refusal
from sandbox_images.base.outcome import Ended, denied, failed
from sandbox_images.base.progress import Progress
from sandbox_images.web.inflate import CannotInflate, Inflater
from sandbox_images.web.web_address import WebAddress, follow

MAX_HOPS = 8
CONNECT_TIMEOUT_S = 8.0
READ_TIMEOUT_S = 30.0  # silence; the total is bounded by whoever calls
_MAX_WORDS = 2_000
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_BINARY = ("image/", "audio/", "video/", "font/")
_HEADERS = {
    "User-Agent": "Mozilla/5.0 (compatible; Toolcrib)",
    "Accept": "text/html,application/xhtml+xml,text/markdown,text/plain,application/pdf,application/json;q=0.9,*/*;q=0.5",
    "Accept-Language": "en,*;q=0.5",
    "Accept-Encoding": "gzip, deflate",
    "Connection": "close",
}


@dataclass
class Page:
    """What a server answered. `cut`: the body is longer than what was kept; `declared_bytes` is the server's own word."""

    url: str
    status: int
    reason: str
    content_type: str
    charset: str | None
    body: bytes
    cut: bool
    declared_bytes: int | None
    redirects: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Bounds:
    """text_bytes: how much of an unpacked body is kept; pdf_bytes: the same for a PDF; hops: redirects that are followed."""

    text_bytes: int = 4 << 20
    pdf_bytes: int = 20 << 20
    hops: int = MAX_HOPS


async def fetch(
    start: WebAddress, progress: Progress, bounds: Bounds, headers: Mapping[str, str] | None = None
) -> Page:
    """The page at the end of the redirects. Raises Ended (`denied`, `failed`, `invalid`). Bound its time from outside."""
    address, trail = start, [str(start)]
    while True:
        progress.note = f"Connecting to {address}"
        hop = await _one_hop(address, progress, bounds, headers or {})
        if isinstance(hop, Page):
            hop.redirects = trail[:-1]
            return hop
        address = hop
        if str(address) in trail:
            raise failed(f"The server redirects in a loop: {address} leads back to itself. Nothing was read.")
        if len(trail) > bounds.hops:
            raise failed(f"The server redirected more than {bounds.hops} times, last to {address}. Nothing was read.")
        trail.append(str(address))


async def _one_hop(
    address: WebAddress, progress: Progress, bounds: Bounds, headers: Mapping[str, str]
) -> Page | WebAddress:
    proxy_said: list[dict[str, str]] = []
    try:
        return await _ask(address, progress, bounds, headers, proxy_said)
    except httpx.ProxyError as problem:
        raise await _no_tunnel(address, proxy_said, _cause(problem)) from problem
    except (httpx.ConnectError, httpx.ConnectTimeout) as problem:
        if not proxy_said:
            raise denied(NO_WAY_OUT) from problem
        raise failed(f"No connection to {address.host}:{address.port}: {_cause(problem)}.") from problem
    except httpx.TimeoutException as problem:
        raise failed(f"{address} sent nothing for {READ_TIMEOUT_S:.0f} s.") from problem
    except httpx.RemoteProtocolError as problem:
        raise failed(
            f"{address} broke the HTTP protocol or off: {_cause(problem)}. {progress.note}. Trying once more may help."
        ) from problem
    except httpx.TransportError as problem:
        raise failed(f"The connection to {address} broke: {_cause(problem)}. {progress.note}.") from problem


async def _no_tunnel(address: WebAddress, proxy_said: list[dict[str, str]], cause: str) -> Ended:
    said = proxy_said[0] if proxy_said else {}
    if DENIED_HEADER in said:
        return refusal(address.host, address.port, said[DENIED_HEADER])
    why = await ask_why(str(address)) if ERROR_HEADER in said else None
    return why if isinstance(why, Ended) else failed(f"{address} could not be reached. {why or cause}")


async def _ask(
    address: WebAddress,
    progress: Progress,
    bounds: Bounds,
    headers: Mapping[str, str],
    proxy_said: list[dict[str, str]],
) -> Page | WebAddress:
    async def trace(event: str, info: dict[str, Any]) -> None:
        """The proxy's answer to CONNECT is not told by httpx in any other way."""
        if event.endswith("receive_response_headers.complete"):
            told = info["return_value"][3]
            proxy_said.append({name.decode("latin-1").lower(): value.decode("latin-1") for name, value in told})

    request = httpx.Request(
        "GET",
        str(address),
        headers={**_HEADERS, **headers, "Host": address.host_header},
        extensions={
            "trace": trace,
            "timeout": {
                "connect": CONNECT_TIMEOUT_S,
                "read": READ_TIMEOUT_S,
                "write": READ_TIMEOUT_S,
                "pool": CONNECT_TIMEOUT_S,
            },
        },
    )
    transport = httpx.AsyncHTTPTransport(verify=_tls(), trust_env=False, retries=0, proxy=httpx.Proxy(door.PROXY))
    async with transport:
        response = await transport.handle_async_request(request)
        try:
            if address.scheme == "http":
                await _raise_refusal(address, response)
            location = response.headers.get("location")
            if response.status_code in _REDIRECTS and location:
                return follow(address, location)
            return await _read(address, response, progress, bounds)
        finally:
            await response.aclose()


async def _raise_refusal(address: WebAddress, response: httpx.Response) -> None:
    """What the proxy answers in the place of a server that it may not or can't ask."""
    rule = response.headers.get(DENIED_HEADER)
    if rule is not None:
        raise refusal(address.host, address.port, rule)
    if ERROR_HEADER in response.headers:
        words = bytearray()
        async for piece in response.aiter_raw():
            words += piece[: _MAX_WORDS - len(words)]
        raise failed(f"{address} could not be reached. {words.decode('utf-8', 'replace').strip()}")


async def _read(address: WebAddress, response: httpx.Response, progress: Progress, bounds: Bounds) -> Page:
    content_type, charset = media_type(response.headers.get("content-type", ""))
    declared = response.headers.get("content-length", "")
    page = Page(
        url=str(address),
        status=response.status_code,
        reason=response.reason_phrase[:60],
        content_type=content_type,
        charset=charset,
        body=b"",
        cut=False,
        declared_bytes=int(declared) if declared.isdecimal() and len(declared) < 19 else None,
    )
    if content_type.startswith(_BINARY):
        page.cut = True  # of no use as text: not downloaded
        return page
    try:
        async with aclosing(_pieces(response)) as pieces:
            await _collect(pieces, page, progress, bounds)
    except CannotInflate as problem:
        raise failed(f"{address} can't be read: {problem}.") from problem
    return page


async def _collect(pieces: AsyncIterator[bytes], page: Page, progress: Progress, bounds: Bounds) -> None:
    body = bytearray()
    limit = bounds.pdf_bytes if page.content_type == "application/pdf" else bounds.text_bytes
    async for piece in pieces:
        if not body and piece.startswith(b"%PDF-"):
            limit = bounds.pdf_bytes
        room = limit - len(body)
        body += piece[:room]
        progress.note = f"Received {len(body):,} bytes of {page.url}"
        if len(piece) > room:
            page.cut = True
            break
    page.body = bytes(body)


async def _pieces(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    inflater = Inflater(response.headers.get("content-encoding", ""))
    async for data in response.aiter_raw():
        for piece in inflater.feed(data):
            yield piece
    if not inflater.complete:
        raise CannotInflate("its compressed body ends in the middle")


def media_type(header: str) -> tuple[str, str | None]:
    """The type in lower case without parameters (empty when there is none), and the charset parameter."""
    kind, *parameters = header.split(";")
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset":
            return kind.strip().lower(), value.strip().strip("\"'") or None
    return kind.strip().lower(), None


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    return httpx.create_ssl_context(trust_env=False)


def _cause(problem: Exception) -> str:
    """A foreign error's own words, or those of what caused it, without its final full stop."""
    words = str(problem) or str(problem.__cause__ or "") or type(problem).__name__
    return words[:200].rstrip(".")
