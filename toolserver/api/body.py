"""Request bodies, read with a bound on size and on time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from toolserver.api import strict_json, wire
from toolserver.api.services import services
from toolserver.errors import Code, ToolServerError
from toolserver.sandbox.worker_files import CHUNK_BYTES

M = TypeVar("M", bound=wire.WireModel)
_SLOWEST_BYTES_PER_S = 16 << 10  # an upload slower than this on the whole is no upload


def _check_plain(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ToolServerError(
            Code.UNSUPPORTED_MEDIA_TYPE, "Compressed bodies are not taken. Send it without Content-Encoding."
        )


def _too_large(limit: int) -> ToolServerError:
    return ToolServerError(Code.TOO_LARGE, f"The body is larger than {limit} bytes, the most that is taken here.")


def _announced(request: Request) -> int:
    length = request.headers.get("content-length", "")
    return int(length) if length.isascii() and length.isdigit() and len(length) < 20 else 0


def _too_slow() -> ToolServerError:
    return ToolServerError(
        Code.REQUEST_TIMEOUT, "The body came too slowly, so the request was given up. Nothing was run."
    )


async def raw_body(request: Request) -> bytes:
    """The whole body. Raises too_large (without reading all of it), unsupported_media_type, request_timeout."""
    http = services(request).settings.http
    limit = http.max_body_mb << 20
    _check_plain(request)
    if _announced(request) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(http.body_timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
                parts.append(part)
    except TimeoutError as problem:
        raise _too_slow() from problem
    except ClientDisconnect as problem:
        raise ToolServerError(Code.BAD_REQUEST, "The connection ended within the body.") from problem
    return b"".join(parts)


async def json_body(request: Request, model: type[M]) -> M:
    """The JSON body as a model. Raises also invalid_arguments."""
    return wire.read(model, strict_json.read_object(await raw_body(request)))


class Upload:
    """A body as it streams in, in chunks of a good size. `check` is its bound, to be asked as it grows."""

    def __init__(self, request: Request) -> None:
        """Raises too_large, unsupported_media_type before anything is read."""
        http = services(request).settings.http
        self._request, self._pause_s = request, http.body_timeout_s
        self._limit = http.max_upload_mb << 20
        _check_plain(request)
        self.check(_announced(request))

    def check(self, size: int) -> None:
        if size > self._limit:
            raise _too_large(self._limit)

    async def chunks(self) -> AsyncIterator[bytes]:
        """Raises request_timeout, bad_request."""
        stream = self._request.stream().__aiter__()
        waiting: list[bytes] = []
        held = 0
        received = 0
        loop = asyncio.get_running_loop()
        begun, spent = loop.time(), 0.0
        while True:
            part = await self._next(stream, self._pause_s + received / _SLOWEST_BYTES_PER_S - spent)
            spent = loop.time() - begun
            if part is None:
                break
            received += len(part)
            held += len(part)
            waiting.append(part)
            if held >= CHUNK_BYTES:
                yield b"".join(waiting)
                waiting, held = [], 0
                begun += loop.time() - begun - spent  # what the sandbox took is not the client's slowness
        if held:
            yield b"".join(waiting)

    async def _next(self, stream: AsyncIterator[Any], left_s: float) -> bytes | None:
        try:
            async with asyncio.timeout(max(0.0, min(self._pause_s, left_s))):
                return bytes(await anext(stream))
        except StopAsyncIteration:
            return None
        except TimeoutError as problem:
            raise _too_slow() from problem
        except ClientDisconnect as problem:
            raise ToolServerError(Code.BAD_REQUEST, "The connection ended within the body.") from problem
