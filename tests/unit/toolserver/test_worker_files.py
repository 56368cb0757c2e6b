from __future__ import annotations

import asyncio
import base64
from collections.abc import Coroutine
from typing import Any

import pytest

from tests.unit.toolserver.test_stdio_client import Peer, talking
from toolserver.errors import SandboxGone
from toolserver.sandbox.stdio_client import RpcError
from toolserver.sandbox.worker_files import CHUNK_BYTES, FILE_PIECES, open_archive, open_file

DATA = bytes(range(256)) * (CHUNK_BYTES // 256) * 5 + b"the end"


class Disk:
    """Answers `file.*` out of `data`, each request once `gate` is open. `most`: requests for pieces that were open at a time."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)
        self.gate, self.asked, self.saying = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self.open, self.most = 0, 0
        self.refuse_from: int | None = None
        self.committed = False
        self.work: set[asyncio.Task[None]] = set()

    async def answer(self, peer: Peer, message: dict[str, Any]) -> None:
        method, params = message["method"].removeprefix("toolcrib/"), message["params"]
        if method in ("file.open", "archive.open"):
            await peer.say({"id": message["id"], "result": {"handle": 1, "bytes": len(self.data)}})
        elif method == "file.close":
            self.committed = params["commit"]
            await peer.say({"id": message["id"], "result": {}})
        else:
            self.open += 1
            self.most = max(self.most, self.open)
            self.asked.set()
            told = self._read(params) if method == "file.read" else self._write(params)
            self.work.add(asyncio.create_task(self._later(peer, {"id": message["id"], **told})))

    def _read(self, params: dict[str, Any]) -> dict[str, Any]:
        piece = bytes(self.data[params["offset"] : params["offset"] + params["length"]])
        return {"result": {"data": base64.b64encode(piece).decode(), "eof": len(piece) < params["length"]}}

    def _write(self, params: dict[str, Any]) -> dict[str, Any]:
        if self.refuse_from is not None and len(self.data) >= self.refuse_from:
            return {"error": {"code": -32000, "message": "no room", "data": {"kind": "disk_full"}}}
        self.data += base64.b64decode(params["data"])
        return {"result": {}}

    async def _later(self, peer: Peer, message: dict[str, Any]) -> None:
        await self.gate.wait()
        async with self.saying:  # one whole line after the other
            self.open -= 1
            await peer.say(message)


async def opened_after(disk: Disk, work: Coroutine[Any, Any, Any]) -> Any:
    """What `work` comes to, when all that can be under way was let pile up first."""
    task = asyncio.create_task(work)
    await disk.asked.wait()
    for _ in range(50):
        await asyncio.sleep(0)
    disk.gate.set()
    return await task


async def test_a_file_comes_in_order_with_several_pieces_under_way() -> None:
    disk = Disk(DATA)
    async with talking(disk.answer) as (client, _peer):
        handle = await open_file(client, "a", "r")

        async def read() -> bytes:
            return b"".join([piece async for piece in handle.read(3, len(DATA) - 3)])

        assert await opened_after(disk, read()) == DATA[3:]
    assert disk.most == FILE_PIECES


async def test_an_archive_of_unknown_size_comes_one_piece_at_a_time() -> None:
    disk = Disk(DATA)
    async with talking(disk.answer) as (client, _peer):
        handle = await open_archive(client, "r")

        async def read() -> bytes:
            return b"".join([piece async for piece in handle.read(0, None)])

        assert await opened_after(disk, read()) == DATA
    assert disk.most == 1


async def test_a_file_goes_up_in_order_and_all_of_it_has_arrived_before_the_commit() -> None:
    disk = Disk()
    async with talking(disk.answer) as (client, _peer):
        handle = await open_file(client, "a", "w")

        async def write() -> None:
            await handle.write(DATA)
            await handle.arrived()
            await handle.close(commit=True)

        await opened_after(disk, write())
    assert (bytes(disk.data), disk.committed, disk.most) == (DATA, True, FILE_PIECES)


async def test_a_piece_that_is_refused_later_is_still_told() -> None:
    disk = Disk()
    disk.refuse_from = 2 * CHUNK_BYTES
    disk.gate.set()
    async with talking(disk.answer) as (client, _peer):
        handle = await open_file(client, "a", "w")
        await handle.write(DATA[: 3 * CHUNK_BYTES])
        with pytest.raises(RpcError, match="no room"):
            await handle.arrived()


@pytest.mark.parametrize("piece", [b"short", b"x" * (CHUNK_BYTES + 1)], ids=["short", "long"])
async def test_a_piece_of_a_wrong_length_is_no_data(piece: bytes) -> None:
    async def lie(peer: Peer, message: dict[str, Any]) -> None:
        told = {"handle": 1, "bytes": len(DATA), "data": base64.b64encode(piece).decode(), "eof": False}
        await peer.say({"id": message["id"], "result": told})

    async with talking(lie) as (client, _peer):
        handle = await open_file(client, "a", "r")
        with pytest.raises(SandboxGone):
            await anext(handle.read(0, len(DATA)))
