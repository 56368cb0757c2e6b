"""Every runtime behind one fixture; each test gets a runtime of its own, and must leave nothing."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.programs import scripted
from tests.own_engine import WITH_GVISOR, engine_with_gvisor
from toolserver.runtime.base import Limits, Sandbox, SandboxRuntime, SandboxSpec
from toolserver.runtime.bubblewrap_runtime import BubblewrapRuntime
from toolserver.runtime.docker_runtime import DockerRuntime
from toolserver.runtime.fake_runtime import FakeRuntime
from toolserver.settings import RuntimeSettings

LIMITS = Limits(memory_mb=128, cpus=1, pids=32, disk_mb=16)
REFERENCE = f"toolcrib/base:{version('toolcrib')}"


def make_runtime(name: str, server_id: str, state_dir: Path, settings: RuntimeSettings | None = None) -> SandboxRuntime:
    settings = settings or RuntimeSettings()
    if name == "fake":
        return FakeRuntime(server_id, state_dir, settings, server=scripted)
    kinds: dict[str, Callable[..., SandboxRuntime]] = {
        "docker": DockerRuntime,
        "gvisor": DockerRuntime,
        "bubblewrap": BubblewrapRuntime,
    }
    return kinds[name](server_id, state_dir, settings)


class Bench:
    """A runtime under test with a workspace "s1", and the sandboxes that a test started."""

    def __init__(self, runtime: SandboxRuntime) -> None:
        self.runtime = runtime
        self._numbers = itertools.count(1)

    @property
    def on_gvisor(self) -> bool:
        return bool(self.runtime.isolation().get("kernel") == "gvisor")

    def spec(self, program: str, **changes: Any) -> SandboxSpec:
        command = ("python3", "-I", "-S", "-u", "-c", program)
        name = f"box{next(self._numbers)}"
        spec = SandboxSpec(name, "s1", "workspace", REFERENCE, command, LIMITS)
        return replace(spec, **changes)

    async def start(self, program: str, **changes: Any) -> Sandbox:
        return await self.runtime.start(self.spec(program, **changes))

    async def output(self, program: str, **changes: Any) -> bytes:
        """All that a program which ends says."""
        sandbox = await self.start(program, **changes)
        try:
            return await read_all(sandbox)
        finally:
            await sandbox.remove()


async def read_all(sandbox: Sandbox) -> bytes:
    pieces = []
    while data := await sandbox.receive():
        pieces.append(data)
    return b"".join(pieces)


RUNTIMES = [
    "fake",
    pytest.param("bubblewrap", marks=pytest.mark.bubblewrap),
    pytest.param("docker", marks=pytest.mark.docker),
    *WITH_GVISOR,
]


@pytest.fixture(scope="session")
def gvisor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RuntimeSettings]:
    with engine_with_gvisor(tmp_path_factory.mktemp("engine"), REFERENCE) as engine:
        yield RuntimeSettings(docker_host=engine.host, isolation="require-gvisor")


def settings_of(request: pytest.FixtureRequest) -> RuntimeSettings:
    on_gvisor = request.param == "gvisor"
    settings: RuntimeSettings = request.getfixturevalue("gvisor") if on_gvisor else RuntimeSettings()
    return settings


@pytest.fixture(params=RUNTIMES)
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    runtime = make_runtime(request.param, f"test-{uuid.uuid4().hex[:12]}", tmp_path, settings_of(request))
    await runtime.open()
    await runtime.check()
    await runtime.create_workspace("s1", 16)
    yield Bench(runtime)
    for _ in range(50):
        if not (left := await runtime.sweep()):
            break
        await asyncio.sleep(0.2)  # hundreds of processes that were killed need a moment to be gone
    await runtime.close()
    assert left == 0


@pytest.fixture
async def real_bench(bench: Bench) -> Bench:
    """For what only real processes show."""
    return bench


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # a fake has no processes to look at from inside
    for item in [i for i in items if "real_bench" in getattr(i, "fixturenames", ()) and "fake" in i.name]:
        items.remove(item)
