"""What a server leaves that is killed in the middle of starting a sandbox, before it noted the process."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from toolserver.runtime.bubblewrap_host import find_bwrap
from toolserver.runtime.bubblewrap_runtime import BubblewrapRuntime
from toolserver.settings import RuntimeSettings

pytestmark = pytest.mark.bubblewrap


def stray(state: Path, name: str) -> subprocess.Popen[bytes]:
    """bwrap with a sandbox's name and a workspace's folder in its arguments, as the server starts it, noted nowhere."""
    workspace = state / "bubblewrap" / "workspaces" / f"wsp_{name}" / "workspace"
    workspace.mkdir(parents=True, exist_ok=True)
    command = [f"sbx_{name}/bwrap", "--unshare-pid", "--ro-bind", "/", "/", "--bind", str(workspace), "/mnt"]
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
