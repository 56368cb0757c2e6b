"""The snapshot methods of the worker extension.

Raises of all functions: RpcError (its `kind` says why), SandboxGone, TimeoutError.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toolserver.errors import SandboxGone
from toolserver.sandbox.stdio_client import StdioClient

PAGE_BYTES = 1 << 20  # of a message
_LONG_S = 900.0  # a scan reads, and a restore writes, as much as the workspace holds
_QUICK_S = 60.0


@dataclass(frozen=True)
class Scanned:
    """A state of the tree that the worker keeps until `close`. `left_out`: [{"path", "kind"}], FIFOs, sockets, devices."""

    client: StdioClient
    handle: int
    files: int
    file_bytes: int
    read_bytes: int
    manifest_bytes: int
    left_out: list[dict[str, str]]
    left_out_more: bool

    async def manifest(self) -> bytes:
        parts, line = [], 0
        size = 0
        while True:
            page = await self.client.request(
                "toolcrib/snapshot.manifest", {"handle": self.handle, "line": line}, _QUICK_S
            )
            parts.append(_decode(page.get("data")))
            size += len(parts[-1])
            following = page.get("next")
            if type(following) is not int or size > self.manifest_bytes or (following <= line and not page.get("eof")):
                raise SandboxGone("the worker's manifest can't be understood")
            line = following
            if page.get("eof") is True:
                return b"".join(parts)

    async def read(self, want: Sequence[tuple[int, int]]) -> list[bytes | None]:
        """Pieces by (line of the manifest, number in the file), PAGE_BYTES in all; None for one that has changed since."""
        params = {"handle": self.handle, "want": [list(place) for place in want]}
        blobs = (await self.client.request("toolcrib/snapshot.read", params, _QUICK_S)).get("blobs")
        if not isinstance(blobs, list) or len(blobs) != len(want):
            raise SandboxGone("the worker's pieces can't be understood")
        return [None if blob is None else _decode(blob) for blob in blobs]

    async def close(self) -> None:
        await self.client.request("toolcrib/snapshot.close", {"handle": self.handle}, _QUICK_S)


async def scan(client: StdioClient, max_bytes: int, *, full: bool) -> Scanned:
    """Look at the whole tree. `max_bytes`: of data, more is too_large; `full`: trust no time of a file, read all."""
    told = await client.request("toolcrib/snapshot.scan", {"max_bytes": max_bytes, "full": full}, _LONG_S)
    numbers = [told.get(name) for name in ("handle", "files", "file_bytes", "read_bytes", "bytes")]
    left_out = told.get("left_out")
    if not all(type(number) is int for number in numbers) or not isinstance(left_out, list):
        raise SandboxGone("the worker's answer to a scan can't be understood")
    handle, files, file_bytes, read_bytes, manifest_bytes = (int(number or 0) for number in numbers)
    paths = [{"path": str(one["path"]), "kind": str(one["kind"])} for one in left_out if isinstance(one, dict)]
    return Scanned(
        client, handle, files, file_bytes, read_bytes, manifest_bytes, paths, told.get("left_out_more") is True
    )


@dataclass
class Restoring:
    """A restore under way in the worker. Until `commit` nothing changes; whoever began it commits or closes it."""

    client: StdioClient
    handle: int

    async def manifest(self, data: bytes) -> None:
        for start in range(0, len(data), PAGE_BYTES):
            page = base64.b64encode(data[start : start + PAGE_BYTES]).decode("ascii")
            await self.client.request("toolcrib/restore.manifest", {"handle": self.handle, "data": page}, _QUICK_S)

    async def step(self, blobs: Sequence[bytes]) -> list[bytes]:
        """Give the pieces that the last step lacked, in its order; the names of those that lack now."""
        given = [base64.b64encode(blob).decode("ascii") for blob in blobs]
        answer = await self.client.request("toolcrib/restore.step", {"handle": self.handle, "blobs": given}, _LONG_S)
        try:
            return [bytes.fromhex(name) for name in answer["lack"]]
        except (KeyError, TypeError, ValueError) as problem:
            raise SandboxGone("the worker's answer to a restore can't be understood") from problem

    async def commit(self) -> dict[str, Any]:
        """{"exact", "differs", "written", "removed"}"""
        return await self.client.request("toolcrib/restore.commit", {"handle": self.handle}, _LONG_S)

    async def close(self) -> None:
        await self.client.request("toolcrib/restore.close", {"handle": self.handle}, _LONG_S)


async def begin_restore(client: StdioClient, *, full: bool) -> Restoring:
    handle = (await client.request("toolcrib/restore.begin", {"full": full}, _LONG_S)).get("handle")
    if type(handle) is not int:
        raise SandboxGone("the worker's answer to a restore can't be understood")
    return Restoring(client, handle)


def _decode(data: Any) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (TypeError, ValueError, binascii.Error) as problem:
        raise SandboxGone("the worker's data can't be understood") from problem
