"""A workspace's size against writers that mean harm. Where no hard limit can be had, the worker counts: tests/abuse."""

from __future__ import annotations

import asyncio
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.conftest import LIMITS, RUNTIMES, Bench
from toolserver.errors import RequirementMissing
from toolserver.runtime.bubblewrap_runtime import BubblewrapRuntime
from toolserver.runtime.docker_runtime import DockerRuntime
from toolserver.runtime.loop_disk import LoopDisks, Unusable, devices, unmount
from toolserver.settings import RuntimeSettings

DISK_MB, FILES = 16, 4096  # of the fixture's workspace
SLACK_MB = 10
ROOMY = replace(LIMITS, disk_mb=64, memory_mb=512, pids=64)  # the file size limit is not the one to meet

WRITERS = {
    "many processes": """
for n in range(12):
    if os.fork() == 0:
        try:
            with open(f'w{n}', 'wb') as file:
                while True: file.write(b'x' * 65536)
        except OSError: pass
        os._exit(0)
try:
    while True: os.wait()
except ChildProcessError: pass
""",
    "many files": """
try:
    for n in range(10 ** 6):
        with open(f'f{n}', 'wb') as file: file.write(b'x' * 30000)
except OSError: pass
""",
    "fallocate": """
try:
    for n in range(100):
        fd = os.open(f'a{n}', os.O_CREAT | os.O_RDWR)
        os.posix_fallocate(fd, 0, 8 << 20)
except OSError: pass
""",
    "holes filled through memory": """
import mmap
fd = os.open('holes', os.O_CREAT | os.O_RDWR)
os.ftruncate(fd, 64 << 20)
for n in range(3):
    if os.fork() == 0:  # a page that finds no room ends its writer with SIGBUS
        other = os.open(f'holes{n}', os.O_CREAT | os.O_RDWR)
        os.ftruncate(other, 64 << 20)
        for at in (fd, other):
            with mmap.mmap(at, 64 << 20) as pages:
                for place in range(0, 64 << 20, 4096): pages[place] = 1
                pages.flush()
        os._exit(0)
try:
    while True: os.wait()
except ChildProcessError: pass
""",
    "hard links and deleted files": """
held = []
try:
    for n in range(100):
        file = open(f'h{n}', 'wb'); held.append(file)
        os.link(f'h{n}', f'l{n}'); os.unlink(f'h{n}'); os.unlink(f'l{n}')
        file.write(b'x' * (4 << 20)); file.flush()
except OSError: pass
""",
}
SAY = "\nimport json\nroom = os.statvfs('/workspace')\nprint(json.dumps({'used': (room.f_blocks - room.f_bfree) * room.f_frsize, 'files': room.f_files - room.f_ffree}), flush=True)\n"


@pytest.fixture
def hard_bench(real_bench: Bench) -> Bench:
    if real_bench.runtime.isolation()["disk"] != "enforced":
        pytest.skip(f"no hard disk limit here: {real_bench.runtime.isolation()['disk']}")
    return real_bench


def image(bench: Bench) -> Path:
    """Of the workspace "s1"."""
    runtime = bench.runtime
    if isinstance(runtime, DockerRuntime):
        return runtime._volumes.disks.image(runtime._volume("s1"))
    assert isinstance(runtime, BubblewrapRuntime)
    return runtime._folders.disks.image("s1")


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS.keys())
async def test_no_writer_gets_past_the_disk(hard_bench: Bench, writer: str) -> None:
    told = json.loads(await hard_bench.output("import os\n" + writer + SAY, limits=ROOMY))
    assert told["used"] > DISK_MB - 5 << 20
    assert told["used"] <= DISK_MB + SLACK_MB << 20
    assert image(hard_bench).stat().st_blocks * 512 <= DISK_MB + SLACK_MB << 20


async def test_empty_files_end_too_and_deleting_them_gives_room(hard_bench: Bench) -> None:
    program = """
import os
made = 0
try:
    for n in range(200_000):
        os.mknod(f'e{n}'); made += 1
except OSError as full: print(full.errno, end=' ')
for n in range(100): os.unlink(f'e{n}')
for n in range(100): os.mkdir(f'd{n}')
print(made, flush=True)
"""
    errno, made = (int(part) for part in (await hard_bench.output(program, limits=ROOMY)).split())
    assert errno == 28
    assert FILES <= made <= FILES + 64


async def test_the_host_gets_back_what_is_deleted(hard_bench: Bench) -> None:
    program = "import os\nwith open('f', 'wb') as file: file.write(os.urandom(12 << 20)); os.fsync(file.fileno())\n"
    await hard_bench.output(program, limits=ROOMY)
    assert image(hard_bench).stat().st_blocks * 512 > 12 << 20
    await hard_bench.output("import os\nos.unlink('f'); os.sync()", limits=ROOMY)
    assert image(hard_bench).stat().st_blocks * 512 < 4 << 20


async def test_a_workspace_is_found_again_though_its_device_now_holds_another(hard_bench: Bench) -> None:
    await hard_bench.output("open('mine', 'w').write('kept')")
    lost, runtime = devices(image(hard_bench))[0], hard_bench.runtime
    unmount(image(hard_bench).parents[1] / "workspaces" / "s1" / "workspace")  # as a reboot does
    await asyncio.to_thread(subprocess.run, ["losetup", "--detach", lost], check=True)
    await runtime.create_workspace("s2", 8)
    stranger = image(hard_bench).with_name("stranger.img")
    stranger.write_bytes(bytes(1 << 20))
    # unless the second workspace, or another program, has it already
    taken = await asyncio.to_thread(subprocess.run, ["losetup", lost, str(stranger)], check=False, capture_output=True)
    assert devices(image(hard_bench)) == []
    assert await hard_bench.output("print(open('mine').read())") == b"kept\n"
    assert await hard_bench.output("import os; print(os.listdir())", workspace_id="s2") == b"[]\n"
    if taken.returncode == 0:
        await asyncio.to_thread(subprocess.run, ["losetup", "--detach", lost], check=True)


@pytest.mark.parametrize("bench", RUNTIMES[1:], indirect=True)
async def test_a_disk_that_is_required_and_can_not_be_had_refuses(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_loop(self: Any) -> None:
        raise Unusable("there are no loop devices here")

    monkeypatch.setattr(LoopDisks, "check", no_loop)
    for disk, expected in (("loop", "there are no loop devices here"), ("quota", "quota")):
        runtime = type(bench.runtime)("other", tmp_path / disk, RuntimeSettings.model_validate({"disk": disk}))  # type: ignore[call-arg]
        with pytest.raises(RequirementMissing, match=expected):
            await runtime.open()
        await runtime.close()
    counted = type(bench.runtime)("other", tmp_path / "auto", RuntimeSettings())  # type: ignore[call-arg]
    await counted.open()
    await counted.check()
    assert counted.isolation()["disk"] == "accounted by the worker"
    await counted.close()
