"""An engine that is away, hangs, lies or comes back. A proxy stands between the runtime and the real one."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.conformance.conftest import REFERENCE
from tests.conformance.programs import ECHO
from toolserver.errors import RuntimeUnavailable
from toolserver.runtime.base import Limits, SandboxSpec
from toolserver.runtime.docker_engine import default_host
from toolserver.runtime.docker_runtime import DockerRuntime, engine_answers
from toolserver.settings import RuntimeSettings

SPEC = SandboxSpec("box", "s1", "workspace", REFERENCE, ("python3", "-I", "-S", "-c", ECHO), Limits(64, 1, 16, 8))

pytestmark = pytest.mark.docker


class EngineProxy:
    """A Unix socket that passes to the real engine, hangs, or answers rubbish or errors."""

    def __init__(self, path: Path) -> None:
        self.path, self.mode = path, "pass"
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self.path)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._serving):
            task.cancel()
        if self._serving:
            await asyncio.wait(self._serving)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            if self.mode == "hang":
                await asyncio.sleep(60)
            elif self.mode == "rubbish":
                await reader.read(4096)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{not json")
                await writer.drain()
            elif self.mode == "error":
                await reader.read(4096)
                writer.write(b'HTTP/1.1 500 Internal Server Error\r\nContent-Length: 20\r\n\r\n{"message": "broken"')
                await writer.drain()
            else:
                await self._pass(reader, writer)
        except (asyncio.CancelledError, OSError):
            pass
        finally:
            self._serving.discard(task)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_unix_connection(default_host().removeprefix("unix://"))
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_copy(reader, forth))
                both.create_task(_copy(back, writer))
        finally:
            forth.close()
            with contextlib.suppress(OSError):
                await forth.wait_closed()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


@pytest.fixture
async def proxy(tmp_path: Path) -> AsyncIterator[EngineProxy]:
    proxy = EngineProxy(tmp_path / "engine.sock")
    yield proxy
    await proxy.close()


@pytest.fixture
async def runtime(proxy: EngineProxy, tmp_path: Path) -> AsyncIterator[DockerRuntime]:
    server_id = f"test-{uuid.uuid4().hex[:12]}"
    runtime = DockerRuntime(server_id, tmp_path, RuntimeSettings(docker_host=f"unix://{proxy.path}", api_timeout_s=2))
    yield runtime
    await runtime.close()
    straight = DockerRuntime(server_id, tmp_path, RuntimeSettings())
    await straight.sweep()
    await straight.close()


async def test_an_absent_engine_is_reported_at_once_and_used_when_it_appears(
    proxy: EngineProxy, runtime: DockerRuntime
) -> None:
    begun = time.monotonic()
    await runtime.open()
    with pytest.raises(RuntimeUnavailable, match="does not answer"):
        await runtime.start(SPEC)
    assert time.monotonic() - begun < 5
    await proxy.open()
    await runtime.check()
    await runtime.create_workspace("s1", 16)
    sandbox = await runtime.start(SPEC)
    await sandbox.send(b"hello\n")
    assert await sandbox.receive() == b"hello\n"
    await sandbox.remove()


async def test_a_hanging_engine_never_blocks_the_loop(proxy: EngineProxy, runtime: DockerRuntime) -> None:
    await proxy.open()
    proxy.mode = "hang"
    longest = 0.0

    async def beat() -> None:
        nonlocal longest
        while True:
            begun = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - begun)

    beating = asyncio.create_task(beat())
    begun = time.monotonic()
    said = await asyncio.gather(*(runtime.check() for _ in range(20)), return_exceptions=True)
    beating.cancel()
    assert all(isinstance(problem, RuntimeUnavailable) for problem in said)
    assert time.monotonic() - begun < 10
    assert longest < 1.5
    assert not await engine_answers(RuntimeSettings(docker_host=f"unix://{proxy.path}"), 1.0)


async def test_rubbish_is_no_answer(proxy: EngineProxy, runtime: DockerRuntime) -> None:
    await proxy.open()
    proxy.mode = "rubbish"
    with pytest.raises(RuntimeUnavailable) as told:
        await runtime.check()
    assert str(proxy.path) not in str(told.value)


async def test_a_sandbox_of_an_engine_that_went_away_is_lost_and_removed_later(
    proxy: EngineProxy, runtime: DockerRuntime
) -> None:
    await proxy.open()
    await runtime.check()
    await runtime.create_workspace("s1", 16)
    sandbox = await runtime.start(SPEC)
    proxy.mode = "hang"
    await proxy.close()
    await proxy.open()
    assert await sandbox.receive() == b""
    assert (await sandbox.remove()).cause == "runtime_lost"
    proxy.mode = "pass"
    await proxy.close()
    await proxy.open()
    await runtime.delete_workspace("s1")
    assert await runtime.sweep() == 0
