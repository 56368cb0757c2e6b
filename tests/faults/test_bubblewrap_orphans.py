"""What a server leaves that is killed in the middle of starting a sandbox, before it noted the process."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolserver.runtime.base import Limits, SandboxSpec
from toolserver.runtime.bubblewrap_host import find_bwrap
from toolserver.runtime.bubblewrap_runtime import BubblewrapRuntime
from toolserver.settings import RuntimeSettings

pytestmark = pytest.mark.bubblewrap


def stray(state: Path, name: str) -> subprocess.Popen[bytes]:
    """bwrap with a sandbox's name and a workspace's folder in its arguments, as the server starts it, noted nowhere."""
    workspace = state / "bubblewrap" / "workspaces" / f"wsp_{name}" / "workspace"
    workspace.mkdir(parents=True, exist_ok=True)
    command = [f"sbx_{name}/bwrap", "--unshare-pid", "--bind", str(workspace), "/mnt"]
    for folder in ("/usr", "/bin", "/lib", "/lib64"):  # not all of /: mounts of others come and go
        command += ["--ro-bind-try", folder, folder]
    return subprocess.Popen(
        [*command, "--proc", "/proc", "--", "sh", "-c", "echo up; sleep 60"],
        executable=find_bwrap(),
        stdout=subprocess.PIPE,
    )


async def test_the_sweep_ends_what_was_never_noted_and_nothing_of_others(tmp_path: Path) -> None:
    runtime = BubblewrapRuntime("server", tmp_path / "mine", RuntimeSettings())
    await runtime.check()
    await runtime.create_workspace("wsp_live", 16)
    strays = [
        stray(tmp_path / "mine", "orphan"),
        stray(tmp_path / "mine", "live"),
        stray(tmp_path / "other", "s"),
    ]
    try:
        for process in strays:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
        await runtime.sweep(frozenset({"sbx_live"}), frozenset({"wsp_live"}))
        assert strays[0].wait(5) != 0
        assert [process.poll() for process in strays[1:]] == [None, None]
        assert not (tmp_path / "mine" / "bubblewrap" / "workspaces" / "wsp_orphan").exists()
        await runtime.sweep()
        assert strays[1].wait(5) != 0
    finally:
        await BubblewrapRuntime("other", tmp_path / "other", RuntimeSettings()).sweep()
        for process in strays:
            process.kill()
            process.wait(10)
            assert process.stdout is not None
            process.stdout.close()
        await runtime.close()


@pytest.mark.parametrize("name", ["../../../../precious", "..", "sbx_of_nobody"])
async def test_what_runs_in_a_sandbox_is_never_taken_for_bwrap(tmp_path: Path, name: str) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    runtime = BubblewrapRuntime("server", tmp_path / "state", RuntimeSettings())
    await runtime.check()
    await runtime.create_workspace("wsp_1", 16)
    workspaces = tmp_path / "state" / "bubblewrap" / "workspaces"
    program = f"""
import os, subprocess, sys
subprocess.Popen([{name + "/bwrap"!r}, "-c", "sleep 60; :", {str(workspaces) + "/x"!r}], executable="/bin/sh")
print("disguised", flush=True)
sys.stdin.read()
"""
    limits = Limits(256, 1, 32, 16)
    command = ("python3", "-I", "-S", "-u", "-c", program)
    sandbox = await runtime.start(SandboxSpec("sbx_1", "wsp_1", "test", "toolcrib/test", command, limits))
    try:
        assert (await sandbox.receive()).startswith(b"disguised")
        await asyncio.sleep(0.3)
        assert f"{name}/bwrap".encode() in _command_lines()
        found = await runtime.inventory()
        assert [found.sandboxes, found.running] == [frozenset({"sbx_1"})] * 2
        await runtime.sweep(frozenset({"sbx_1"}), frozenset({"wsp_1"}))
        assert (precious / "file").read_text() == "kept"
        for foreign in ("../../../../precious", ".."):
            with pytest.raises(ValueError, match="not an identifier"):
                await runtime.discard(frozenset({foreign}), frozenset())
    finally:
        await sandbox.remove()
        await runtime.sweep()
        await runtime.close()


def _command_lines() -> Iterator[bytes]:
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield place.read_bytes().split(b"\0")[0]
