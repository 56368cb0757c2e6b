"""The file methods of the worker extension, as streams of bytes. The worker judges every path; nothing is checked here.

Raises of all functions: RpcError (its `kind` says why), SandboxGone, TimeoutError.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Any, Literal

from toolserver.errors import SandboxGone
from toolserver.sandbox.stdio_client import StdioClient

CHUNK_BYTES = 256 << 10
_TIMEOUT_S = 60.0  # a commit or an archive may have much to do
_QUICK_S = 20.0


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

    async def read(self, offset: int, length: int) -> tuple[bytes, bool]:
        """Bytes at `offset`, at most CHUNK_BYTES, and whether they are the last."""
        params = {"handle": self.number, "offset": offset, "length": min(length, CHUNK_BYTES)}
        answer = await self.client.request("toolcrib/file.read", params, _QUICK_S)
        try:
            return base64.b64decode(answer["data"], validate=True), answer["eof"] is True
        except (KeyError, TypeError, ValueError, binascii.Error) as problem:
            raise SandboxGone("the worker's answer to a read can't be understood") from problem

    async def write(self, data: bytes) -> None:
        for start in range(0, len(data), CHUNK_BYTES):
            piece = base64.b64encode(data[start : start + CHUNK_BYTES]).decode("ascii")
            await self.client.request("toolcrib/file.write", {"handle": self.number, "data": piece}, _QUICK_S)

    async def close(self, *, commit: bool = False) -> dict[str, Any]:
        return await self.client.request("toolcrib/file.close", {"handle": self.number, "commit": commit}, _TIMEOUT_S)


async def open_file(client: StdioClient, path: str, mode: Literal["r", "w"]) -> Handle:
    answer = await client.request("toolcrib/file.open", {"path": path, "mode": mode}, _QUICK_S)
    return _handle(client, answer)


async def open_archive(client: StdioClient, mode: Literal["r", "w"]) -> Handle:
    answer = await client.request("toolcrib/archive.open", {"mode": mode}, _TIMEOUT_S)
    return _handle(client, answer)


def _handle(client: StdioClient, answer: dict[str, Any]) -> Handle:
    number, size = answer.get("handle"), answer.get("bytes", 0)
    if type(number) is not int or type(size) is not int:
        raise SandboxGone("the worker's answer to an open can't be understood")
    return Handle(client, number, size)
