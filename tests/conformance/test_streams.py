from __future__ import annotations

import asyncio
import time

import pytest

from tests.conformance.conftest import Bench, read_all
from tests.conformance.programs import DEAF, ECHO, EVERY_BYTE, FLOOD, STDERR_FLOOD
from toolserver.errors import SandboxGone


async def test_every_byte_arrives_as_it_was(bench: Bench) -> None:
    assert await bench.output(EVERY_BYTE) == bytes(range(256)) * 4096


async def test_pieces_are_bounded(bench: Bench) -> None:
    sandbox = await bench.start(FLOOD)
    for _ in range(50):
        assert 0 < len(await sandbox.receive()) <= 1 << 18
    await sandbox.remove()


async def test_many_messages_at_once_are_not_mixed(bench: Bench) -> None:
    sandbox = await bench.start(ECHO)
    lines = [bytes([65 + n]) * 20_000 + b"\n" for n in range(26)]

    async def collect() -> bytes:
        got = b""
        while len(got) < sum(map(len, lines)):
            got += await sandbox.receive()
        return got

    collecting = asyncio.create_task(collect())
    await asyncio.gather(*(sandbox.send(line) for line in lines))
    got = await collecting
    assert sorted(got.splitlines(keepends=True)) == lines
    await sandbox.remove()


async def test_sender_waits_for_a_sandbox_that_does_not_read_and_wakes_when_it_ends(bench: Bench) -> None:
    sandbox = await bench.start(DEAF)

    async def pour() -> int:
        for count in range(10_000):
            try:
                await sandbox.send(b"z" * 65_536)
            except SandboxGone:
                return count
        return 10_000

    pouring = asyncio.create_task(pour())
    await asyncio.sleep(0.5)
    assert not pouring.done()
    await sandbox.kill()
    async with asyncio.timeout(5):
        assert await pouring < 1_000
    await sandbox.remove()


async def test_a_flooding_sandbox_nobody_reads_is_killed_at_once(bench: Bench) -> None:
    sandbox = await bench.start(FLOOD)
    await asyncio.sleep(0.5)
    begun = time.monotonic()
    await sandbox.kill()
    await sandbox.remove()
    assert time.monotonic() - begun < 5


async def test_stderr_is_drained_and_kept_as_a_bounded_tail(bench: Bench) -> None:
    sandbox = await bench.start(STDERR_FLOOD)
    async with asyncio.timeout(30):
        assert await read_all(sandbox) == b"done"
    assert len((await sandbox.remove()).log_tail) <= 16_384


async def test_waiting_for_output_can_be_cancelled(bench: Bench) -> None:
    sandbox = await bench.start(ECHO)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await sandbox.receive()
    await sandbox.send(b"after\n")
    assert await sandbox.receive() == b"after\n"
    await sandbox.remove()
