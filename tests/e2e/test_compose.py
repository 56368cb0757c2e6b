"""The ToolServer as its compose file runs it: a container with the engine's socket, and an agent outside that uses it."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.e2e.agent_process import clean_environment

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]


@dataclass
class Composed:
    """A project of its own, so that nothing of the machine's is touched."""

    project: str
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def run(self, *arguments: str) -> str:
        environment = {**os.environ, "TOOLCRIB_PORT": str(self.port), "TOOLSERVER_API_KEY": ""}
        command = [str(ROOT / ".ci" / "compose.sh"), "-p", self.project, *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout.strip()

    def wait_ready(self, limit_s: float = 60) -> None:
        until = time.monotonic() + limit_s
        while True:
            try:
                if httpx.get(f"{self.url}/readyz", trust_env=False, headers=self.auth()).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            assert time.monotonic() < until, self.run("logs")[-3000:]
            time.sleep(0.3)

    def key(self) -> str:
        return self.run("exec", "-T", "toolserver", "cat", "/state/admin.key")

    def auth(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key()}"}


@pytest.fixture(scope="module")
def composed() -> Iterator[Composed]:
    assert shutil.which("docker-compose") or shutil.which("docker"), "make test installs docker-compose"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    it = Composed(f"toolcrib-test-{secrets.token_hex(4)}", port)
    try:
        it.run("up", "-d", "--build")
        it.wait_ready()
        yield it
    finally:
        it.run("down", "-v", "-t", "20")


def test_the_container_is_healthy_on_loopback_with_a_key_of_its_own(composed: Composed) -> None:
    container = composed.run("ps", "-q", "toolserver")
    until = time.monotonic() + 40
    while True:
        state = json.loads(subprocess.run(["docker", "inspect", container], capture_output=True, check=True).stdout)[0]
        if state["State"]["Health"]["Status"] == "healthy":
            break
        assert time.monotonic() < until, state["State"]["Health"]
        time.sleep(0.5)
    assert {binding["HostIp"] for ports in state["HostConfig"]["PortBindings"].values() for binding in ports} == {
        "127.0.0.1"
    }
    assert len(composed.key()) > 30
    assert httpx.get(f"{composed.url}/v1/tools", trust_env=False).status_code == 401
    assert composed.key() not in composed.run("logs")


def test_an_agent_outside_completes_the_demo_against_it(composed: Composed, tmp_path: Path) -> None:
    environment = clean_environment() | {
        "AGENT_TOOLSERVER__URL": composed.url,
        "AGENT_TOOLSERVER__API_KEY": composed.key(),
    }
    command = [sys.executable, str(ROOT / "examples" / "weather" / "demo.py"), "--json"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["state"] == "done"
    assert (Path(result["folder"]) / "workspace" / "climate.png").read_bytes().startswith(b"\x89PNG")


def test_a_session_reaches_out_through_the_proxy_and_nothing_of_it_stays(composed: Composed) -> None:
    """The server knows no path of the engine's host: doors are in a volume that the engine names."""
    code = """
import urllib.error, urllib.request
print(urllib.request.urlopen("http://egress.toolcrib/ready", timeout=30).status)
try:
    urllib.request.urlopen("http://169.254.169.254/", timeout=30)
except urllib.error.HTTPError as refused:
    print(refused.code, refused.headers["X-Toolcrib-Denied"])
"""
    with httpx.Client(base_url=composed.url, headers=composed.auth(), timeout=120, trust_env=False) as client:
        made = client.post("/v1/sessions", json={"images": ["workspace"], "egress": {"mode": "open"}})
        assert made.status_code == 201, made.text
        path = f"/v1/sessions/{made.json()['id']}/tools/python_execute"
        answer = client.post(path, json={"arguments": {"code": code}, "wait_s": 60})
        assert answer.status_code == 200, answer.text
        assert answer.json()["structured"]["stdout"] == "204\n403 private_address\n"
        assert client.delete(f"/v1/sessions/{made.json()['id']}").status_code == 204


def _containers(sandbox: str) -> str:
    listed = ["docker", "ps", "-aq", "--filter", f"label=toolcrib.sandbox={sandbox}"]
    return subprocess.run(listed, capture_output=True, text=True, check=True).stdout


def test_a_restart_keeps_key_and_stored_outcomes_and_leaves_nothing(composed: Composed) -> None:
    key = composed.key()
    with httpx.Client(base_url=composed.url, headers=composed.auth(), timeout=60, trust_env=False) as client:
        made = client.post("/v1/sessions", json={}).json()
        session, sandbox = made["id"], made["sandboxes"][0]["sandbox_id"]
        assert _containers(sandbox)
        call = f"compose-{secrets.token_hex(4)}"
        path, body = f"/v1/sessions/{session}/tools/python_execute", {"arguments": {"code": "6 * 7"}}
        first = client.post(path, json=body, headers={"Idempotency-Key": call})
        assert first.status_code == 200, first.text
        composed.run("restart", "-t", "20", "toolserver")
        composed.wait_ready()
        assert composed.key() == key
        assert client.get(f"/v1/calls/{call}").json() == first.json()
        assert client.get(f"/v1/sessions/{session}").status_code == 410
    assert not _containers(sandbox)
