"""What is left of workspaces on loop devices when a server was killed, or files went by hand: the next one removes it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.conftest import RUNTIMES, Bench, make_runtime, settings_of
from toolserver.runtime.base import SandboxRuntime
from toolserver.runtime.bubblewrap_runtime import BubblewrapRuntime
from toolserver.runtime.docker_runtime import DockerRuntime
from toolserver.runtime.loop_disk import LoopDisks, Unusable, devices
from toolserver.settings import RuntimeSettings

pytestmark = pytest.mark.bubblewrap


def disks_of(runtime: SandboxRuntime) -> LoopDisks:
    if isinstance(runtime, DockerRuntime):
        return runtime._volumes.disks
    assert isinstance(runtime, BubblewrapRuntime)
    return runtime._folders.disks


def held_below(folder: Path) -> list[str]:
    """Mounts and loop devices of a state folder, as the kernel has them."""
    found = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(folder) in line]
    for note in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            found += [note.read_text()] if str(folder) in note.read_text() else []
    return found


async def until_nothing_held(folder: Path) -> None:
    until = time.monotonic() + 20
    while left := held_below(folder):  # the kernel lets go of a device when its file system has come to rest
        assert time.monotonic() < until, left
        await asyncio.sleep(0.05)


@pytest.fixture(params=RUNTIMES[1:])
async def runtime(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SandboxRuntime]:
    made = make_runtime(request.param, f"test-{secrets.token_hex(6)}", tmp_path, settings_of(request))
    try:
        disks_of(made).check()
    except Unusable as why:
        pytest.skip(f"no loop devices here: {why}")
    yield made
    await made.sweep()
    await made.close()
    await until_nothing_held(tmp_path)


async def test_checks_side_by_side_find_the_same_and_leave_nothing(runtime: SandboxRuntime, tmp_path: Path) -> None:
    async def reconcile() -> None:
        for _ in range(20):
            with contextlib.suppress(FileNotFoundError):
                found = await runtime.inventory()
                await runtime.discard(found.sandboxes, found.workspaces)
            await asyncio.sleep(0.01)

    await asyncio.gather(*(runtime.check() for _ in range(4)), reconcile())
    assert runtime.isolation()["disk"] == "enforced"
    await until_nothing_held(tmp_path)


async def test_a_trial_that_was_killed_half_way_is_ended_by_the_next(runtime: SandboxRuntime, tmp_path: Path) -> None:
    disks = disks_of(runtime)
    dead = await asyncio.create_subprocess_exec("true")
    await dead.wait()
    place = disks.image("x").parent / f"trial-{dead.pid}-killed"
    (place / "mounted").mkdir(parents=True)
    trial = LoopDisks(place, 0)
    trial.create("trial", 1)
    trial.mount("trial", place / "mounted")
    assert held_below(tmp_path)
    disks.check()
    assert not place.exists()
    await until_nothing_held(tmp_path)


async def test_half_an_image_and_a_device_without_its_image_are_nobodys(
    runtime: SandboxRuntime, tmp_path: Path
) -> None:
    await runtime.check()
    await runtime.create_workspace("wsp_gone", 8)
    disks = disks_of(runtime)
    image = disks.image("wsp_gone" if isinstance(runtime, BubblewrapRuntime) else runtime._volume("wsp_gone"))  # type: ignore[attr-defined]
    assert devices(image)
    image.unlink()  # by hand, with all that was in the state folder
    half = image.with_name(image.name.replace("gone.ext4", "half.new"))
    half.write_bytes(b"killed while it was copied")
    found = await runtime.inventory()
    assert {"wsp_gone", "wsp_half"} <= found.workspaces
    await runtime.discard(found.sandboxes, found.workspaces)
    assert not half.exists()
    assert not (await runtime.inventory()).workspaces
    await until_nothing_held(tmp_path)


@pytest.mark.docker
async def test_a_volume_that_a_hand_removed_comes_back_with_its_files(tmp_path: Path) -> None:
    runtime = make_runtime("docker", f"test-{secrets.token_hex(6)}", tmp_path)
    assert isinstance(runtime, DockerRuntime)
    bench = Bench(runtime)
    await runtime.create_workspace("s1", 16)
    if not disks_of(runtime).image(runtime._volume("s1")).exists():
        pytest.skip("no loop devices here")
    await bench.output("open('mine', 'w').write('kept')")
    await runtime.engine.call(lambda client: client.remove_volume(runtime._volume("s1")))
    assert await runtime.has_workspace("s1")
    assert await bench.output("print(open('mine').read())") == b"kept\n"
    assert "s1" in (await runtime.inventory()).workspaces
    await runtime.sweep()
    assert not await runtime.has_workspace("s1")
    await runtime.close()
    await until_nothing_held(tmp_path)


@pytest.mark.docker
async def test_volumes_of_the_first_version_are_seen_by_their_name(tmp_path: Path) -> None:
    runtime = make_runtime("docker", server := f"test-{secrets.token_hex(6)}", tmp_path)
    assert isinstance(runtime, DockerRuntime)
    labels = {"toolcrib.server": server, "toolcrib.session": "ses_old"}
    await runtime.engine.call(lambda client: client.create_volume(f"toolcrib-{server}-ses_old", labels=labels))
    assert (await runtime.inventory()).workspaces == {"ses_old"}
    assert await runtime.sweep() == 1
    assert not (await runtime.inventory()).workspaces
    await runtime.close()


async def test_folders_of_the_first_version_go(tmp_path: Path) -> None:
    old = tmp_path / "bubblewrap" / "sessions" / "ses_old" / "workspace"
    old.mkdir(parents=True)
    (tmp_path / "bubblewrap" / "processes").mkdir()
    runtime = BubblewrapRuntime("server", tmp_path, RuntimeSettings())
    await runtime.check()
    assert not {"sessions", "processes"} & {folder.name for folder in (tmp_path / "bubblewrap").iterdir()}
    await runtime.close()


async def test_workspaces_made_before_the_first_check_is_over_are_held_to_their_size(
    runtime: SandboxRuntime,
) -> None:
    await asyncio.gather(runtime.check(), runtime.create_workspace("wsp_early", 8))
    name = "wsp_early" if isinstance(runtime, BubblewrapRuntime) else runtime._volume("wsp_early")  # type: ignore[attr-defined]
    assert disks_of(runtime).image(name).exists()


async def test_no_two_workspaces_have_one_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = LoopDisks.mount

    def slow_mount(self: Any, workspace_id: str, target: Path) -> None:
        mount(self, workspace_id, target)
        time.sleep(0.05)

    runtime = BubblewrapRuntime("server", tmp_path, RuntimeSettings())
    await runtime.check()
    if not runtime._root:
        pytest.skip("the server is not root")
    monkeypatch.setattr(LoopDisks, "mount", slow_mount)
    names = [f"wsp_{n}" for n in range(6)]
    try:
        await asyncio.gather(*(runtime.create_workspace(name, 8) for name in names))
        assert len({runtime._folders.uid(name) for name in names}) == len(names)
    finally:
        await runtime.sweep()
        await runtime.close()
    await until_nothing_held(tmp_path)
