"""`toolserver serve` as a process of its own, with real sandboxes of bubblewrap."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server_process import ServerProcess

pytestmark = pytest.mark.bubblewrap


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess("bubblewrap", tmp_path_factory.mktemp("server")).start()
    yield process
    process.end()


@pytest.fixture
def session(server: ServerProcess) -> Iterator[str]:
    with server.client() as client:
        session_id = client.post("/v1/sessions", json={"images": ["workspace"]}).json()["id"]
        yield session_id
        client.delete(f"/v1/sessions/{session_id}")


def call(
    server: ServerProcess, session: str, tool: str, arguments: dict[str, object], **more: object
) -> httpx.Response:
    with server.client() as client:
        return client.post(f"/v1/sessions/{session}/tools/{tool}", json={"arguments": arguments, **more})


def test_state_is_kept_from_call_to_call(server: ServerProcess, session: str) -> None:
    call(server, session, "python_execute", {"code": "x = 41"})
    answer = call(server, session, "python_execute", {"code": "x + 1"}).json()
    assert "42" in json.dumps(answer["content"])


def test_the_workers_deadline_leaves_the_session_usable(server: ServerProcess, session: str) -> None:
    told = call(
        server, session, "python_execute", {"code": "print('so far', flush=True)\nwhile True: pass"}, deadline_s=1
    )
    detail = told.json()["detail"]
    assert (told.status_code, detail["code"], detail["type"]) == (450, "deadline_exceeded", "timeout")
    assert "so far" in json.dumps(detail["content"])
    assert detail["state"] in ("kept", "lost")
    assert call(server, session, "python_execute", {"code": "1"}).status_code == 200


def test_files_of_the_api_are_the_files_of_the_tools(server: ServerProcess, session: str) -> None:
    data = os.urandom(3_000_000)
    with server.client() as client:
        assert client.put(f"/v1/sessions/{session}/files/d/big.bin", content=data).status_code == 201
        code = "import hashlib; d = open('d/big.bin', 'rb').read(); open('copy', 'wb').write(d[::-1]); len(d)"
        assert "3000000" in call(server, session, "python_execute", {"code": code}).text
        part = client.get(f"/v1/sessions/{session}/files/copy", headers={"Range": "bytes=0-9"})
        assert (part.status_code, part.content) == (206, data[::-1][:10])
        assert client.get(f"/v1/sessions/{session}/files/copy").content == data[::-1]


def test_the_command_line_lists_and_removes_sessions_of_a_running_server(server: ServerProcess) -> None:
    with server.client() as client:
        session_id = client.post("/v1/sessions", json={"images": ["workspace"]}).json()["id"]
    environment = {**os.environ, "TOOLSERVER_API_KEY": server.key, "TOOLSERVER_URL": server.url}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "toolserver", "sessions", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)

    assert session_id in {s["id"] for s in json.loads(run("list", "--json").stdout)["sessions"]}
    assert run("remove", session_id).returncode == 0
    assert session_id not in run("list").stdout
    assert run("remove", "ses_unknown").returncode == 2


def test_the_first_start_makes_a_key_and_says_where_once(tmp_path: Path) -> None:
    process = ServerProcess("fake", tmp_path, key="")
    try:
        process.start()
        path = tmp_path / "state" / "admin.key"
        assert str(path) in process.log()
        assert path.stat().st_mode & 0o077 == 0
        text = path.read_text().strip()
        assert text not in process.log()
        with process.client(key=text) as client:
            assert client.get("/v1/tools").status_code == 200
        assert process.stop() == 0
        before = process.log()
        process.start()
        assert "admin API key" not in process.log()[len(before) :]
        with process.client(key=text) as client:
            assert client.get("/v1/tools").status_code == 200
    finally:
        process.end()


def test_the_end_of_stdin_ends_an_embedded_server(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    command = [
        sys.executable,
        "-m",
        "toolserver",
        "serve",
        "--port",
        "0",
        "--runtime",
        "bubblewrap",
        "--exit-with-parent",
    ]
    command += ["--state-dir", str(tmp_path / "state"), "--ready-file", str(ready)]
    environment = {**os.environ, "TOOLSERVER_API_KEY": "embedded-key"}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stdin is not None
    assert process.stderr is not None
    try:
        until = time.monotonic() + 40
        while not ready.exists():
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        told = json.loads(ready.read_text())
        assert told["pid"] == process.pid
        head = {"Authorization": "Bearer embedded-key"}
        with httpx.Client(base_url=told["url"], headers=head, trust_env=False, timeout=60) as client:
            assert client.get("/readyz").status_code == 200
            assert client.post("/v1/sessions", json={"images": ["workspace"]}).status_code == 201
        process.stdin.close()
        assert process.wait(20) == 0
        assert not ready.exists()
        assert not list((tmp_path / "state").rglob("ses_*"))
    finally:
        process.kill()
        process.wait(10)
        process.stderr.close()


def test_a_running_call_is_waited_for_and_new_ones_are_refused_while_draining(tmp_path: Path) -> None:
    process = ServerProcess("bubblewrap", tmp_path).start()
    try:
        with process.client() as client:
            session = client.post("/v1/sessions", json={"images": ["workspace"]}).json()["id"]
            path = f"/v1/sessions/{session}/tools/python_execute"
            slow = {"arguments": {"code": "import time; time.sleep(2.5); 'slept'"}, "wait_s": 0}
            told = client.post(path, json=slow).json()["detail"]
            assert told["code"] == "still_running"
            os.kill(process.pid, signal.SIGTERM)
            time.sleep(0.5)
            refused = client.post(path, json={"arguments": {"code": "1"}})
            assert (refused.status_code, refused.json()["detail"]["code"]) == (503, "draining")
            assert refused.headers["retry-after"]
            waited = client.get(f"/v1/calls/{told['call_id']}?wait_s=10")
            assert waited.status_code == 200
            assert "slept" in waited.text
        assert process.process is not None
        assert process.process.wait(20) == 0
        assert not list((tmp_path / "state").rglob("ses_*"))
    finally:
        process.end()
