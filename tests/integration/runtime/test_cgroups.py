"""Control groups of bubblewrap's sandboxes: for real where this host allows it, and on drawn trees of both versions."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.conformance.conftest import read_all
from toolserver.runtime.base import Limits, SandboxSpec
from toolserver.runtime.bubblewrap_runtime import BubblewrapRuntime
from toolserver.runtime.cgroups import Cgroups
from toolserver.settings import RuntimeSettings

LIMITS = Limits(memory_mb=96, cpus=0.25, pids=16, disk_mb=16)


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[BubblewrapRuntime]:
    runtime = BubblewrapRuntime("server", tmp_path, RuntimeSettings())
    if runtime._cgroups.problem is not None:
        pytest.skip(runtime._cgroups.problem)
    await runtime.check()
    await runtime.create_workspace("s1", 16)
    yield runtime
    await runtime.sweep()
    await runtime.close()
    assert not [home for _, home in runtime._cgroups._homes.values() if home.exists()]


def spec(program: str) -> SandboxSpec:
    return SandboxSpec("box", "s1", "workspace", "toolcrib/x:1", ("python3", "-I", "-S", "-u", "-c", program), LIMITS)


@pytest.mark.bubblewrap
async def test_processes_share_one_memory_limit_and_the_end_is_told_as_such(runtime: BubblewrapRuntime) -> None:
    program = """
import os, time
for _ in range(6):  # each far below the limit
    if os.fork() == 0:
        kept = bytearray(40 << 20)
        time.sleep(60)
died = os.wait()[1]
print(died, open('/sys/fs/cgroup/memory/memory.oom_control').read().split()[-2:], flush=True)
kept = [bytearray(8 << 20) for _ in range(60)]
"""
    sandbox = await runtime.start(spec(program))
    said = (await read_all(sandbox)).decode()
    assert said.startswith("9 ['oom_kill', "), said
    assert not said.endswith("'0']\n")
    end = await sandbox.remove()
    assert end.cause in ("oom", "exited")  # the last allocation ends in MemoryError, or the kernel is there first


@pytest.mark.bubblewrap
async def test_a_first_process_that_memory_costs_is_an_oom(runtime: BubblewrapRuntime) -> None:
    program = "import os\nfor n in range(9):\n    with open(f'/dev/shm/{n}', 'wb') as f: f.write(b'x' * (1 << 20))\nkept = []\nwhile True: kept.append(bytearray(os.urandom(1 << 20)))"
    roomy = Limits(memory_mb=96, cpus=1, pids=16, disk_mb=16)
    sandbox = await runtime.start(SandboxSpec("box", "s1", "w", "toolcrib/x:1", spec(program).command, roomy))
    assert await read_all(sandbox) == b""
    assert (await sandbox.remove()).cause in ("oom", "exited")


@pytest.mark.bubblewrap
async def test_processor_time_is_shared_out(runtime: BubblewrapRuntime) -> None:
    program = "import time\nend = time.monotonic() + 2\nwhile time.monotonic() < end: pass\nprint(time.process_time(), flush=True)"
    sandbox = await runtime.start(spec(program))
    used = float(await read_all(sandbox))
    await sandbox.remove()
    assert used < 1.0  # a quarter of 2 s, and what the kernel rounds


@pytest.mark.bubblewrap
async def test_the_process_limit_is_exact(runtime: BubblewrapRuntime) -> None:
    program = "import os, time\nmade = 1\ntry:\n    while os.fork(): made += 1\n    time.sleep(60)\nexcept OSError: print(made, flush=True)"
    sandbox = await runtime.start(spec(program))
    assert int((await sandbox.receive()).decode()) == LIMITS.pids
    await sandbox.kill()
    await sandbox.remove()


CRASHING_SERVER = """
import asyncio, os, sys
from pathlib import Path
from toolserver.runtime.base import Limits, SandboxSpec
from toolserver.runtime.bubblewrap_runtime import BubblewrapRuntime
from toolserver.settings import RuntimeSettings

async def main():
    runtime = BubblewrapRuntime("server", Path(sys.argv[1]), RuntimeSettings())
    await runtime.create_workspace("s1", 8)
    command = ("python3", "-I", "-S", "-u", "-c", "print('up'); import time; time.sleep(600)")
    sandbox = await runtime.start(SandboxSpec("box", "s1", "workspace", "toolcrib/x:1", command, Limits(256, 1, 16, 8)))
    await sandbox.receive()
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""


@pytest.mark.bubblewrap
async def test_groups_of_a_killed_server_go_in_the_next_sweep(runtime: BubblewrapRuntime, tmp_path: Path) -> None:
    place = tmp_path / "killed"
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", CRASHING_SERVER, str(place))
    assert await server.wait() == -9
    after = BubblewrapRuntime("server", place, RuntimeSettings())
    homes = [home for _, home in after._cgroups._homes.values()]
    assert all((home / "box").is_dir() for home in homes)
    until = time.monotonic() + 10
    while any((home / "box").exists() for home in homes):
        assert time.monotonic() < until
        await after.sweep()
    await after.close()
    assert not any(home.exists() for home in homes)


# -- drawn trees


def draw(system: Path, member: str, mounts: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": member, "proc/self/mountinfo": mounts, **files}.items():
        (system / name).parent.mkdir(parents=True, exist_ok=True)
        (system / name).write_text(text)
    return system


UNIFIED = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
SERVICE = "sys/fs/cgroup/system.slice/toolserver.service"


def unified(system: Path, *, procs: str, enabled: str = "") -> Path:
    files = {
        f"{SERVICE}/cgroup.controllers": "cpuset cpu io memory pids\n",
        f"{SERVICE}/cgroup.subtree_control": enabled,
        f"{SERVICE}/cgroup.procs": procs,
        f"{SERVICE}/cgroup.type": "domain\n",
    }
    return draw(system, "0::/system.slice/toolserver.service\n", UNIFIED, files)


def test_a_service_of_its_own_may_delegate_in_version_2(tmp_path: Path) -> None:
    groups = Cgroups("one", unified(tmp_path, procs=f"{os.getpid()}\n"))
    assert groups.problem is None
    home = tmp_path / SERVICE / "toolcrib-one"
    for name in ("box", ""):  # the kernel would draw these
        (home / name).mkdir(parents=True, exist_ok=True)
    (home / "cgroup.subtree_control").write_text("")
    for name in ("memory.max", "memory.swap.max", "cpu.max", "pids.max", "cgroup.procs"):
        (home / "box" / name).write_text("")
    groups.create("box", Limits(memory_mb=64, cpus=0.5, pids=16, disk_mb=1))
    said = {path.name: path.read_text() for path in (home / "box").iterdir()}
    assert (said["memory.max"], said["memory.swap.max"]) == (str(64 << 20), "0")
    assert (said["cpu.max"], said["pids.max"]) == ("50000 100000", "16")
    for control in (tmp_path / SERVICE, home):
        assert set((control / "cgroup.subtree_control").read_text().split()) == {"+cpu", "+memory", "+pids"}
    (home / "box" / "memory.events").write_text("low 0\noom 2\noom_kill 3\noom_group_kill 0\n")
    assert groups.oom_kills("box") == 3
    assert groups.counters("box") == [(home / "box", "/sys/fs/cgroup")]
    groups.join("box", 4711)
    assert (home / "box" / "cgroup.procs").read_text() == "4711"
    assert groups.sandbox_ids() == {"box"}


def test_a_group_shared_with_others_can_not_be_divided_in_version_2(tmp_path: Path) -> None:
    groups = Cgroups("one", unified(tmp_path, procs=f"1\n{os.getpid()}\n"))
    assert groups.problem is not None
    assert "Delegate=yes" in groups.problem
    assert Cgroups("one", unified(tmp_path / "b", procs="1\n", enabled="cpu memory pids")).problem is None


def test_controllers_that_are_missing_are_named(tmp_path: Path) -> None:
    mounts = (
        "31 30 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "32 30 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    )
    for folder in ("memory/mine", "cpu,cpuacct"):
        (tmp_path / "sys/fs/cgroup" / folder).mkdir(parents=True)
    system = draw(tmp_path, "3:memory:/mine\n2:cpu,cpuacct:/\n1:name=systemd:/\n", mounts, {})
    assert Cgroups("one", system).problem == "the server may not make control groups for pids here"
    assert Cgroups("one", tmp_path / "nothing").problem == "the control groups of this host can't be read"


async def test_without_groups_isolation_says_what_is_weaker(tmp_path: Path) -> None:
    runtime = BubblewrapRuntime("server", tmp_path, RuntimeSettings())
    runtime._cgroups = Cgroups("one", tmp_path / "nothing")
    told = runtime.isolation()
    assert told["memory"].startswith("not enforced: of each process alone")
    assert told["cpus"].startswith("not enforced")
