"""HTTP to a ToolServer: deadlines, bounds, and the one place that knows the HTTP library's errors.

A request ends in an answer, a ToolServerAnswer or a NoAnswer, in bounded time and memory.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from agent.errors import UsageProblem
from agent.toolserver_client import wire
from agent.toolserver_client.errors import NoAnswer, NoAnswerKind

MAX_BODY_BYTES = 16 << 20  # of a JSON answer; files are streamed
CHUNK_BYTES = 1 << 16
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True)
class Answer:
    """A whole 2xx answer."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Download:
    """A 2xx answer whose body is being read. `bytes_total` is what the server announced, None when it did not."""

    bytes_total: int | None
    chunks: AsyncIterator[bytes]


class Transport:
    """One connection pool for the life of the agent. `connect_s` and `chunk_s` bound each connect and each read or write."""

    def __init__(self, url: str, api_key: str | None, *, connect_s: float, chunk_s: float, trace_id: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not _has_port(url):
            raise UsageProblem(f"{url!r} is no address of a ToolServer; set AGENT_TOOLSERVER__URL to http://HOST:PORT.")
        self.url, self._trace_id = url.rstrip("/"), trace_id
        headers = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "toolcrib-agent"}
        if api_key:
            if not (api_key.isascii() and api_key.isprintable() and " " not in api_key):
                raise UsageProblem(
                    "The ToolServer's key may only hold visible ASCII; look at AGENT_TOOLSERVER__API_KEY."
                )
            headers["Authorization"] = f"Bearer {api_key}"
        local = parts.hostname in _LOOPBACK
        try:
            self._http = httpx.AsyncClient(
                base_url=self.url,
                headers=headers,
                timeout=httpx.Timeout(chunk_s, connect=connect_s),
                limits=httpx.Limits(max_connections=64, max_keepalive_connections=16, keepalive_expiry=4.0),
                trust_env=not local,  # no proxy may come between us and loopback
                verify=not (
                    local and parts.scheme == "http"
                ),  # reading certificates takes 20 ms that nobody needs here
                follow_redirects=False,
            )
        except httpx.InvalidURL as problem:
            raise UsageProblem(f"{url!r} is no address: {problem}; look at AGENT_TOOLSERVER__URL.") from problem

    async def close(self) -> None:
        await self._http.aclose()

    async def request(
        self,
        method: str,
        path: str,
        *,
        within_s: float,
        json: Any = None,
        content: AsyncIterator[bytes] | None = None,
        params: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        """The whole answer, if it is 2xx and comes within `within_s`. Raises ToolServerAnswer, NoAnswer."""
        with _mapped(self.url):
            async with (
                asyncio.timeout(within_s),
                self._http.stream(
                    method,
                    path,
                    json=json,
                    content=content,
                    params=params,
                    headers=self._headers(headers),
                    timeout=self._waiting(within_s),
                ) as response,
            ):
                return await _whole(response)

    @asynccontextmanager
    async def download(self, path: str, *, within_s: float, accept: str) -> AsyncIterator[Download]:
        """Open a body for reading in pieces. Raises ToolServerAnswer, NoAnswer, also while reading: a cut body is no body."""
        with _mapped(self.url):
            async with (
                asyncio.timeout(within_s),
                self._http.stream("GET", path, headers=self._headers({"Accept": accept})) as response,
            ):
                if not response.is_success:
                    await _whole(response)
                _refuse_encoded(response)
                announced = response.headers.get("content-length", "")
                yield Download(int(announced) if announced.isdigit() else None, response.aiter_raw(CHUNK_BYTES))

    def _headers(self, more: dict[str, str] | None) -> dict[str, str]:
        trace = {
            "traceparent": f"00-{self._trace_id}-{secrets.token_hex(8)}-01",
            "X-Request-Id": secrets.token_hex(12),
        }
        return trace | (more or {})

    def _waiting(self, within_s: float) -> httpx.Timeout:
        """While the server waits for a tool no byte comes, so a read may last as long as the answer may."""
        usual = self._http.timeout
        return httpx.Timeout(connect=usual.connect, pool=usual.pool, write=usual.write, read=within_s)


def _has_port(url: str) -> bool:
    """Whether the port, if one is named, can be one."""
    try:
        return urlsplit(url).port != 0
    except ValueError:
        return False


async def _whole(response: httpx.Response) -> Answer:
    _refuse_encoded(response)
    parts: list[bytes] = []
    size = 0
    async for chunk in response.aiter_raw(CHUNK_BYTES):
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            what = f"its answer of status {response.status_code} is longer than {MAX_BODY_BYTES >> 20} MiB"
            raise NoAnswer(NoAnswerKind.BAD_ANSWER, what, response.status_code)
        parts.append(chunk)
    body, headers = b"".join(parts), dict(response.headers)
    if response.is_success:
        return Answer(response.status_code, headers, body)
    raise wire.refusal(response.status_code, headers, body)


def _refuse_encoded(response: httpx.Response) -> None:
    """We ask for plain bytes; unpacking what was packed all the same would have no bound."""
    encoding = response.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        what = f"it sent a body in the encoding {encoding[:20]!r}, which was not asked for"
        raise NoAnswer(NoAnswerKind.BAD_ANSWER, what, response.status_code)


@contextmanager
def _mapped(url: str) -> Iterator[None]:
    try:
        yield
    except TimeoutError as problem:
        raise NoAnswer(NoAnswerKind.TIMEOUT, f"The ToolServer at {url} did not answer in time.") from problem
    except httpx.HTTPError as problem:
        kind, what = _kind(problem)
        raise NoAnswer(kind, f"The ToolServer at {url} can't be reached: {what}.") from problem


def _kind(problem: httpx.HTTPError) -> tuple[NoAnswerKind, str]:
    if isinstance(problem, httpx.ConnectTimeout | httpx.PoolTimeout):
        return NoAnswerKind.CONNECT_TIMEOUT, "no connection was made in time"
    if isinstance(problem, httpx.ProxyError | httpx.ConnectError):
        causes = list(_causes(problem))
        if any(isinstance(cause, socket.gaierror) for cause in causes):
            return NoAnswerKind.DNS, "its name is not known"
        if any(isinstance(cause, ConnectionRefusedError) for cause in causes):
            return NoAnswerKind.REFUSED, "connection refused; is it running?"
        tls = any(isinstance(cause, ssl.SSLError) for cause in causes)
        return NoAnswerKind.CONNECT_FAILED, f"{'TLS failed' if tls else 'no connection'} ({str(problem)[:120]})"
    if isinstance(problem, httpx.LocalProtocolError):  # its text may quote a header
        return NoAnswerKind.CONNECT_FAILED, "the request could not be written"
    if isinstance(problem, httpx.TimeoutException):
        return NoAnswerKind.TIMEOUT, "no answer came in time"
    return NoAnswerKind.LOST, f"the connection was lost ({str(problem)[:120] or type(problem).__name__})"


def _causes(problem: BaseException) -> Iterator[BaseException]:
    """The exception and all that led to it, each once."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [problem]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
