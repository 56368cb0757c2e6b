"""The gate keeps doors open over the death of the proxy, and nothing is reachable meanwhile. With a real proxy process."""

from __future__ import annotations

import asyncio
import secrets
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.egress.proxy_process import PROGRAM, ask, connect
from toolserver.egress.policy import EgressPolicy
from toolserver.errors import RuntimeUnavailable, SandboxGone
from toolserver.runtime.base import Limits, Sandbox, SandboxEnd, SandboxSpec
from toolserver.sandbox.egress_gate import EgressGate, InjectedHeader

READY = b"GET http://egress.toolcrib/ready HTTP/1.1\r\nHost: egress.toolcrib\r\n\r\n"
LIMITS = Limits(memory_mb=64, cpus=1, pids=8, disk_mb=1)


class ProxyProcess(Sandbox):
    """A proxy as a runtime would give it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.spec = SandboxSpec("egress", "none", "egress", "egress", (), LIMITS)
        self.handle, self.process = "egress", process

    async def send(self, data: bytes) -> None:
        assert self.process.stdin
        try:
            self.process.stdin.write(data)
            await self.process.stdin.drain()
        except OSError as problem:
            raise SandboxGone("closed") from problem

    async def receive(self) -> bytes:
        assert self.process.stdout
        return await self.process.stdout.read(65_536)

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    async def remove(self) -> SandboxEnd:
        await self.kill()
        self.process._transport.close()  # type: ignore[attr-defined]
        return SandboxEnd("killed")

    async def release(self) -> None:
        """The proxy is never left to another server: it ends with its own."""
        raise AssertionError("the gate let go of the proxy")


class Starts:
    def __init__(self) -> None:
        self.started: list[ProxyProcess] = []
        self.away = False

    async def __call__(self) -> Sandbox:
        if self.away:
            raise RuntimeUnavailable("There is no engine.")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(PROGRAM), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        self.started.append(ProxyProcess(process))
        return self.started[-1]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="door") as made:
        yield Path(made)


async def answers(path: Path) -> bool:
    try:
        return (await ask(path, READY)).startswith(b"HTTP/1.1 204 ")
    except OSError:
        return False


async def until_it_answers(path: Path) -> None:
    async with asyncio.timeout(60):
        while not await answers(path):  # noqa: ASYNC110 - another process's door
            await asyncio.sleep(0.05)


async def test_doors_open_again_after_the_death_of_the_proxy(folder: Path) -> None:
    starts, denied = Starts(), list[dict[str, Any]]()
    gate = EgressGate(starts, {"folder": str(folder)}, denied.append)
    one, other = secrets.token_hex(16), secrets.token_hex(16)
    try:
        assert starts.started == []  # nothing runs before it is wanted
        await gate.open(one, EgressPolicy("allow", ("a.example:443",)))
        await gate.open(other, EgressPolicy())
        assert await answers(folder / one)
        assert len(starts.started) == 1
        assert (await ask(folder / other, connect("a.example:443"))).startswith(b"HTTP/1.1 403 ")
        await gate.settle()
        assert [(denial["door"], denial["host"], denial["rule"]) for denial in denied] == [(other, "a.example", "none")]
        await starts.started[0].kill()
        assert not await answers(folder / one)
        await until_it_answers(folder / one)
        await until_it_answers(folder / other)
        assert b"X-Toolcrib-Denied: not_allowed" in await ask(folder / one, connect("b.example:443"))
        assert len(starts.started) == 2
        await gate.close_door(one)
        assert not await answers(folder / one)
        assert await answers(folder / other)
    finally:
        await gate.close()
    assert starts.started[-1].process.returncode is not None


async def test_a_door_is_kept_while_the_proxy_is_away_and_forgotten_when_closed(folder: Path) -> None:
    starts = Starts()
    gate = EgressGate(starts, {"folder": str(folder)})
    kept, closed = secrets.token_hex(16), secrets.token_hex(16)
    starts.away = True
    try:
        for door in (kept, closed):
            with pytest.raises(RuntimeUnavailable):
                await gate.open(door, EgressPolicy("open"))
        await gate.settle()
        await gate.close_door(closed)
        starts.away = False
        await until_it_answers(folder / kept)
        assert not await answers(folder / closed)
    finally:
        await gate.close()


async def test_what_the_proxy_can_not_take_is_an_error_and_changes_nothing(folder: Path) -> None:
    starts = Starts()
    gate = EgressGate(starts, {"folder": str(folder)})
    door = secrets.token_hex(16)
    try:
        await gate.open(door, EgressPolicy("open"))
        with pytest.raises(ValueError, match="no header can have") as problem:
            await gate.open(door, EgressPolicy(), [InjectedHeader("a.example", "X-Key", "se\r\ncret")])
        assert "cret" not in str(problem.value)
        assert await answers(folder / door)
        with pytest.raises(ValueError, match="32 hexadecimal"):
            await gate.open("../x", EgressPolicy("open"))
    finally:
        await gate.close()
