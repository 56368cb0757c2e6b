"""The server killed while sandboxes of added images live: they are found again, or their end is told, and nothing is left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.bridge_site import on_the_bridge
from tests.own_engine import WITH_GVISOR, engine_with_gvisor
from tests.real_servers.bench import left_of, state_with
from tests.real_servers.images import image
from tests.server_process import ServerProcess
from toolserver.app import server_id
from toolserver.images.definition import launcher_definition

ANN = {"name": "Ann", "entityType": "person", "observations": []}
FETCH = "python3 -m mcp_server_fetch --allow-private-ips"
pytestmark = pytest.mark.docker


class _Site(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", "8")
        self.end_headers()
        self.wfile.write(b"hot tea\n")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name it has in the base class
        """Said to nobody."""


@pytest.fixture
def site() -> Iterator[str]:
    with on_the_bridge(_Site) as address:
        yield address


@pytest.fixture
def server(tmp_path: Path, site: str) -> Iterator[ServerProcess]:
    memory = ("--env", "MEMORY_FILE_PATH=/tmp/memory.jsonl")
    state = state_with(
        tmp_path / "state",
        memory=memory,
        common=("memory", *memory, "--scope", "shared"),
        fetch=("--egress", site, "--command", FETCH),
        hostile=(),
        line=(
            "hostile",
            "--command",
            "sh",
            "--cli",
            "-c {script}",
            "--description",
            "Runs a script.",
            "--workspace",
            "rw",
        ),
    )
    settings = {
        "TOOLSERVER_POOL__ENABLED": "false",
        "TOOLSERVER_LIMITS__DISK_MB": "64",
        "TOOLSERVER_EGRESS__ALLOW_PRIVATE": f'["{site}"]',
    }
    server = ServerProcess("docker", tmp_path, settings).start()
    yield server
    server.end()
    assert left_of(server_id(state)) == []


def call(client: httpx.Client, session: str, tool: str, arguments: Any = None, **more: Any) -> httpx.Response:
    head = {"Idempotency-Key": more.pop("key")} if "key" in more else {}
    body = {"arguments": arguments or {}, "wait_s": 60, **more}
    return client.post(f"/v1/sessions/{session}/tools/{tool}", json=body, headers=head)


def test_a_killed_servers_added_images_go_on_or_are_told_of(server: ServerProcess, site: str) -> None:
    with server.client() as client:
        images = ["workspace", "memory", "common", "fetch", "hostile", "line"]
        session = client.post("/v1/sessions", json={"images": images, "egress": {"allow": [site]}}).json()["id"]
        for tool in ("create_entities", "common.create_entities"):
            assert call(client, session, tool, {"entities": [ANN]}).status_code == 200
        page = {"url": f"http://{site}/tea"}
        assert "hot tea" in call(client, session, "fetch", page).text
        for tool, arguments in {
            "do": {"what": "silence"},
            "line": {"script": "echo begun > ran; sleep 300"},
        }.items():
            assert call(client, session, tool, arguments, key=f"left-{tool}", wait_s=2).status_code == 450
        assert call(client, session, "common.open_nodes", {"names": ["Ann"]}, key="done").status_code == 200
    server.kill()
    server.start()
    with server.client() as client:
        until = time.monotonic() + 60
        while (graph := call(client, session, "read_graph")).status_code == 503:
            assert time.monotonic() < until, graph.text
            time.sleep(0.2)
        assert graph.json()["structured"]["entities"] == [ANN], "its own sandbox was found again, with all in it"
        assert call(client, session, "common.read_graph").json()["structured"]["entities"] == [], (
            "the shared one is a fresh one"
        )
        assert "hot tea" in call(client, session, "fetch", page).text
        for tool in ("do", "line"):
            told = client.get(f"/v1/calls/left-{tool}", params={"wait_s": 60}).json()["detail"]
            assert told["code"] == "outcome_unknown", told
        assert client.get("/v1/calls/done").json()["structured"]["entities"] == [ANN]
        assert call(client, session, "ok").json()["content"][-1]["text"] == "ok"
        again = call(client, session, "line", {"script": "cat ran; ls"}).json()["content"][0]["text"]
        assert again.startswith("begun\n"), "its files are kept"
        assert client.delete(f"/v1/sessions/{session}").status_code in (200, 204)
        server.wait_no_leftovers(session, 30)


@pytest.mark.skipif(not WITH_GVISOR, reason="`make gvisor` asks for it")
def test_added_images_run_on_gvisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLSERVER_RUNTIME__START_TIMEOUT_S", "120")
    needed = [launcher_definition().tagged, image("everything"), image("modern")]
    with engine_with_gvisor(tmp_path / "engine", *needed) as engine:
        for name, value in engine.on_gvisor.items():
            monkeypatch.setenv(name, value)
        state_with(tmp_path / "server" / "state", everything=(), modern=())
        server = ServerProcess("docker", tmp_path / "server", engine.on_gvisor).start()
        try:
            with server.client(timeout=120) as client:
                session = client.post("/v1/sessions", json={"images": ["everything", "modern"]}).json()["id"]
                echo = call(client, session, "echo", {"message": "from gVisor"}, wait_s=100)
                assert echo.json()["content"][0]["text"] == "Echo: from gVisor"
                assert call(client, session, "add", {"a": 1, "b": 2}, wait_s=100).json()["structured"] == {"total": 3}
                asked = call(client, session, "ask", key="a", wait_s=60).json()["detail"]
                assert asked["type"] == "input_required"
                answer = {"call_id": "a", "action": "decline"}
                assert call(client, session, "call_answer", answer).json()["content"][0]["text"] == "decline"
        finally:
            server.end()
