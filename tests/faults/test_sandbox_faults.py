"""Sandboxes stopped and killed from outside, between calls and in the middle of one."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.server_process import ServerProcess

RUNTIMES = [pytest.param("docker", marks=pytest.mark.docker), pytest.param("bubblewrap", marks=pytest.mark.bubblewrap)]
SLOW = "import time; print('so-far', flush=True); time.sleep(30)"


@pytest.fixture(scope="module", params=RUNTIMES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    settings = {"TOOLSERVER_CALL__KILL_GRACE_S": "2"}
    process = ServerProcess(request.param, tmp_path_factory.mktemp(f"sandbox-{request.param}"), settings).start()
    yield process
    process.end()


@pytest.fixture
def session(server: ServerProcess) -> Iterator[str]:
    with server.client() as client:
        session = str(client.post("/v1/sessions", json={"ttl_s": 300}).json()["id"])
        python(client, session, "x = 41; open('kept', 'w').write('kept')").raise_for_status()
        yield session
        client.delete(f"/v1/sessions/{session}")
    server.wait_no_leftovers(session)


def python(client: httpx.Client, session: str, code: str, **times: float) -> httpx.Response:
    return client.post(f"/v1/sessions/{session}/tools/python_execute", json={"arguments": {"code": code}, **times})


def children(pid: int) -> list[int]:
    return [int(part) for part in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def monitor(server: ServerProcess, session: str) -> int:
    """bwrap itself, which names the session's workspace in its arguments."""
    workspace = server.workspace_id(session).encode()
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if line.split(b"\0", 1)[0].endswith(b"bwrap") and workspace in line:
            return int(entry.name)
    raise AssertionError("no sandbox")


def act(server: ServerProcess, session: str, what: str) -> None:
    """`kill` ends the sandbox's first process, `monitor` what holds it on the host, `pause` stops all that runs in it."""
    if server.runtime == "docker":
        command = {"kill": "kill", "pause": "pause", "monitor": "kill"}[what]
        subprocess.run(["docker", command, *server.containers(session)], capture_output=True, check=True)
    elif what == "monitor":
        os.kill(monitor(server, session), signal.SIGKILL)
    else:
        for pid in children(monitor(server, session)):
            os.kill(pid, signal.SIGKILL if what == "kill" else signal.SIGSTOP)


@pytest.mark.parametrize("what", ["kill", "monitor"])
def test_a_sandbox_killed_between_calls_is_replaced_and_the_next_call_says_so(
    server: ServerProcess, session: str, what: str
) -> None:
    act(server, session, what)
    time.sleep(0.5)
    with server.client() as client:
        answer = python(client, session, "print(open('kept').read(), 'x' in globals())")
        assert answer.status_code == 200, answer.text
        assert "kept False" in answer.text
        assert "was replaced" in answer.text


@pytest.mark.parametrize("what", ["kill", "monitor"])
def test_a_sandbox_killed_in_mid_call_is_noticed_at_once(server: ServerProcess, session: str, what: str) -> None:
    with server.client() as client, ThreadPoolExecutor(1) as pool:
        running = pool.submit(python, client, session, SLOW, wait_s=60)
        time.sleep(1)
        begun = time.monotonic()
        act(server, session, what)
        answer = running.result()
        assert time.monotonic() - begun < 5
        detail = answer.json()["detail"]
        assert (answer.status_code, detail["effects"], detail["state"]) == (500, "possible", "lost")
        assert detail["code"] in ("outcome_unknown", "tool_crashed")
        assert python(client, session, "open('kept').read()").status_code == 200


def test_a_stopped_sandbox_holds_a_call_no_longer_than_its_deadline_and_the_grace(
    server: ServerProcess, session: str
) -> None:
    act(server, session, "pause")
    with server.client() as client:
        begun = time.monotonic()
        answer = python(client, session, "open('ran', 'w')", deadline_s=1, wait_s=30)
        assert time.monotonic() - begun < 12
        assert (answer.status_code, answer.json()["detail"]["code"]) == (450, "deadline_exceeded"), answer.text
        assert answer.json()["detail"]["state"] == "lost"
        after = python(client, session, "import os; open('kept').read(), os.path.exists('ran')")
        assert after.json()["structured"]["result"] == "('kept', False)"


def test_a_session_whose_sandbox_is_stopped_is_deleted_at_once(server: ServerProcess, session: str) -> None:
    with server.client() as client, ThreadPoolExecutor(1) as pool:
        running = pool.submit(python, client, session, SLOW, wait_s=60)
        time.sleep(0.5)
        act(server, session, "pause")
        begun = time.monotonic()
        assert client.delete(f"/v1/sessions/{session}").status_code == 204
        assert running.result().json()["detail"]["code"] == "session_gone"
        assert time.monotonic() - begun < 6
    server.wait_no_leftovers(session)
