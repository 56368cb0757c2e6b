"""The engine's frames, cut anywhere, over a real socket pair."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolserver.errors import SandboxGone
from toolserver.runtime.docker_stream import AttachedStream
from toolserver.runtime.log_tail import LogTail


def _frame(stream: int, data: bytes) -> bytes:
    return bytes([stream, 0, 0, 0]) + len(data).to_bytes(4, "big") + data


@pytest.fixture
async def pair() -> AsyncIterator[tuple[AttachedStream, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    stream = await AttachedStream.over(ours)
    yield stream, theirs
    theirs.close()
    await stream.close()


async def _all(stream: AttachedStream) -> bytes:
    got = b""
    while data := await stream.receive():
        got += data
    return got


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    frames=st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=300)), max_size=12), cut=st.integers(1, 40)
)
def test_frames_cut_anywhere_give_stdout_exactly(frames: list[tuple[int, bytes]], cut: int) -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        stream = await AttachedStream.over(ours)
        reading = asyncio.create_task(_all(stream))
        wire = b"".join(_frame(kind, data) for kind, data in frames)
        for start in range(0, len(wire), cut):
            await asyncio.get_running_loop().sock_sendall(theirs, wire[start : start + cut])
        theirs.close()
        assert await reading == b"".join(data for kind, data in frames if kind == 1)
        told = b"".join(data for kind, data in frames if kind == 2)
        assert stream.log.text() == told.decode("utf-8", "replace")
        await stream.close()

    asyncio.run(run())


async def test_a_cut_frame_ends_the_stream_with_what_came(pair: tuple[AttachedStream, socket.socket]) -> None:
    stream, theirs = pair
    await asyncio.get_running_loop().sock_sendall(theirs, _frame(1, b"whole") + _frame(1, b"half of this")[:12])
    theirs.close()
    assert await _all(stream) == b"wholehalf"
    with pytest.raises(SandboxGone):
        await stream.send(b"x")


async def test_an_engine_that_sends_without_end_waits_for_the_reader(
    pair: tuple[AttachedStream, socket.socket],
) -> None:
    stream, theirs = pair
    sent = 0

    async def pour() -> None:
        nonlocal sent
        piece = _frame(1, b"y" * 65_536)
        while True:
            await asyncio.get_running_loop().sock_sendall(theirs, piece)
            sent += len(piece)

    pouring = asyncio.create_task(pour())
    await asyncio.sleep(0.3)
    assert sent < 4 << 20
    first = sent
    for _ in range(30):
        await stream.receive()
    await asyncio.sleep(0.1)
    assert sent > first
    pouring.cancel()
    await asyncio.wait([pouring])


def test_the_log_keeps_its_last_bytes() -> None:
    tail = LogTail(10)
    for piece in (b"abc", b"", b"defghij", b"klm"):
        tail.feed(piece)
    assert tail.text() == "defghijklm"
    tail.feed(b"0123456789ABCDEF")
    assert tail.text() == "6789ABCDEF"
