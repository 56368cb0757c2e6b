"""The file methods of the worker extension, as streams of bytes. The worker judges every path; nothing is checked here.

Of a file several pieces are under way at a time, so that sending, base64 and the disk overlap; of an archive one.

Raises of all functions: RpcError (its `kind` says why), SandboxGone, TimeoutError.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections import deque
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from toolserver.errors import SandboxGone
from toolserver.sandbox.stdio_client import StdioClient

CHUNK_BYTES = 256 << 10
FILE_PIECES, ARCHIVE_PIECES = 3, 1  # under way at a time
_TIMEOUT_S = 60.0  # a commit or an archive may have much to do
_QUICK_S = 20.0
T = TypeVar("T")


async def stat(client: StdioClient, path: str) -> dict[str, Any]:
    return await client.request("toolcrib/file.stat", {"path": path}, _QUICK_S)


async def listing(client: StdioClient, path: str, limit: int) -> dict[str, Any]:
    return await client.request("toolcrib/file.list", {"path": path, "limit": limit}, _QUICK_S)


async def delete(client: StdioClient, path: str) -> None:
    await client.request("toolcrib/file.delete", {"path": path}, _TIMEOUT_S)


@dataclass
class Handle:
    """An open file or archive in the worker. Whoever opened it closes it, whatever happens."""

    client: StdioClient
    number: int
    size: int
    pieces: int
    _written: deque[asyncio.Task[dict[str, Any]]] = field(default_factory=deque)

    async def read(self, start: int, length: int | None) -> AsyncGenerator[bytes, None]:
        """`length` bytes from `start`, all up to the end for None, in order; fewer when the file is shorter."""
        end = None if length is None else start + length
        asked, coming = start, deque[asyncio.Task[tuple[bytes, bool]]]()
        while True:
            while len(coming) < self.pieces and (end is None or asked < end):
                size = CHUNK_BYTES if end is None else min(CHUNK_BYTES, end - asked)
                coming.append(_under_way(self._read(asked, size)))
                asked += size
            if not coming:
                return
            data, last = await asyncio.shield(coming.popleft())
            if data:
                yield data
            if last:
                return

    async def _read(self, offset: int, length: int) -> tuple[bytes, bool]:
        """The bytes, and whether they are the last."""
        params = {"handle": self.number, "offset": offset, "length": length}
        answer = await self.client.request("toolcrib/file.read", params, _QUICK_S)
        try:
            data, last = base64.b64decode(answer["data"], validate=True), answer["eof"] is True
        except (KeyError, TypeError, ValueError, binascii.Error) as problem:
            raise SandboxGone("the worker's answer to a read can't be understood") from problem
        if len(data) > length or (len(data) < length and not last):
            raise SandboxGone("the worker's answer to a read has a wrong length")
        return data, last

    async def write(self, data: bytes) -> None:
        """Returns while the last pieces are under way: what they come to is raised by the next `write`, or by `arrived`."""
        for start in range(0, len(data), CHUNK_BYTES):
            if len(self._written) >= self.pieces:
                await asyncio.shield(self._written.popleft())
            piece = base64.b64encode(data[start : start + CHUNK_BYTES]).decode("ascii")
            params = {"handle": self.number, "data": piece}
            self._written.append(_under_way(self.client.request("toolcrib/file.write", params, _QUICK_S)))

    async def arrived(self) -> None:
        """Wait until all that was written has been taken. Before a commit."""
        while self._written:
            await asyncio.shield(self._written.popleft())

    async def close(self, *, commit: bool = False) -> dict[str, Any]:
        return await self.client.request("toolcrib/file.close", {"handle": self.number, "commit": commit}, _TIMEOUT_S)


def _under_way(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Sent now, in the order of the calls. It goes to its end, also when nobody waits for it any more."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return task


async def open_file(client: StdioClient, path: str, mode: Literal["r", "w"]) -> Handle:
    answer = await client.request("toolcrib/file.open", {"path": path, "mode": mode}, _QUICK_S)
    return _handle(client, answer, FILE_PIECES)


async def open_archive(client: StdioClient, mode: Literal["r", "w"]) -> Handle:
    answer = await client.request("toolcrib/archive.open", {"mode": mode}, _TIMEOUT_S)
    return _handle(client, answer, ARCHIVE_PIECES)


def _handle(client: StdioClient, answer: dict[str, Any], pieces: int) -> Handle:
    number, size = answer.get("handle"), answer.get("bytes", 0)
    if type(number) is not int or type(size) is not int:
        raise SandboxGone("the worker's answer to an open can't be understood")
    return Handle(client, number, size, pieces)
