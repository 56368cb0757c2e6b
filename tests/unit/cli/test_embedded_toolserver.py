"""The child process, with small programs in place of the ToolServer."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
from pathlib import Path

import pytest

from agent.bootstrap.embedded_toolserver import EmbeddedToolServer
from agent.errors import Unreachable

# writes the ready file as `serve --ready-file` does, and its key beside it; ends when its standard input closes
PEER = """
import json, os, sys, pathlib
ready = pathlib.Path(sys.argv[sys.argv.index("--ready-file") + 1])
ready.with_name("seen").write_text(os.environ["TOOLSERVER_API_KEY"] + " " + os.environ["TOOLSERVER_RUNTIME__NAME"])
ready.with_name("names").write_text(" ".join(os.environ))
ready.write_text(json.dumps({"url": "http://127.0.0.1:1", "pid": os.getpid()}))
sys.stdin.read()
"""
STUBBORN = PEER.replace("sys.stdin.read()", "import time, signal; signal.signal(15, signal.SIG_IGN); time.sleep(60)")


def server(folder: Path, program: str, start_s: float = 20.0) -> EmbeddedToolServer:
    return EmbeddedToolServer(folder, runtime="fake", start_s=start_s, command=(sys.executable, "-c", program))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def pid_in(folder: Path) -> int:
    return int(json.loads((folder / "ready.json").read_text())["pid"])


async def test_it_starts_with_a_key_of_its_own_and_is_gone_afterwards(tmp_path: Path) -> None:
    async with server(tmp_path, PEER) as child:
        address = await child.start()
        assert address.url == "http://127.0.0.1:1"
        assert (tmp_path / "seen").read_text() == f"{address.api_key} fake"
        assert alive(pid_in(tmp_path))
    assert not alive(pid_in(tmp_path))


async def test_it_does_not_get_the_keys_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_LLM__API_KEY", "secret")
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    async with server(tmp_path, PEER) as child:
        await child.start()
    names = (tmp_path / "names").read_text().split()
    assert "TOOLSERVER_API_KEY" in names
    assert not {"AGENT_LLM__API_KEY", "OPENAI_API_KEY"} & set(names)


async def test_the_key_stays_the_same_for_the_run_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    keys = []
    for _ in range(2):
        async with server(tmp_path, PEER) as child:
            keys.append((await child.start()).api_key)
    assert keys[0] == keys[1]
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    async with server(tmp_path / "other", PEER) as child:
        assert (await child.start()).api_key != keys[0]


async def test_a_child_that_ends_at_once_is_explained_with_its_log(tmp_path: Path) -> None:
    child = server(tmp_path, "print('no engine here', flush=True); raise SystemExit(3)")
    with pytest.raises(Unreachable) as caught:
        await child.start()
    assert "exit code 3" in caught.value.message
    assert "no engine here" in caught.value.message
    assert "toolserver doctor" in caught.value.message


async def test_a_child_that_is_never_ready_is_ended(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    program = f"import os, sys, pathlib; pathlib.Path({str(note)!r}).write_text(str(os.getpid())); sys.stdin.read()"
    with pytest.raises(Unreachable, match="not ready within 2 s"):
        await server(tmp_path, program, start_s=2.0).start()
    assert not alive(int(note.read_text()))


async def test_a_start_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    program = f"import os, sys, pathlib; pathlib.Path({str(note)!r}).write_text(str(os.getpid())); sys.stdin.read()"
    starting = asyncio.create_task(server(tmp_path, program).start())
    while not note.exists() or not note.read_text():  # noqa: ASYNC110 - waits for another process
        await asyncio.sleep(0.02)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not alive(int(note.read_text()))


async def test_a_child_that_does_not_listen_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.bootstrap.embedded_toolserver._STOP_S", 0.3)
    monkeypatch.setattr("agent.bootstrap.embedded_toolserver._KILL_S", 0.3)
    async with server(tmp_path, STUBBORN) as child:
        await child.start()
        pid = pid_in(tmp_path)
    assert not alive(pid)


async def test_it_waits_for_the_server_of_a_process_that_was_killed(tmp_path: Path) -> None:
    slow = PEER + "import time; time.sleep(1); ready.with_name('ended').write_text('')"
    first = server(tmp_path, slow)
    await first.start()
    process = first._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()  # as the kernel does when the agent is killed
    check = "import pathlib, sys; assert pathlib.Path(sys.argv[sys.argv.index('--ready-file') + 1]).with_name('ended').exists()\n"
    async with server(tmp_path, check + PEER) as second:
        assert (await second.start()).url
    assert await process.wait() == 0


async def test_a_process_id_that_now_belongs_to_another_program_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "pid").write_text(f"{os.getpid()} 1")
    async with server(tmp_path, PEER) as child:
        await child.start()
    assert alive(os.getpid())


async def test_ctrl_c_of_the_terminal_does_not_reach_the_child(tmp_path: Path) -> None:
    async with server(tmp_path, PEER) as child:
        await child.start()
        assert os.getpgid(pid_in(tmp_path)) != os.getpgid(0)
