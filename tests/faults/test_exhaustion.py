"""Open files used up, and what many calls and sessions leave in the server."""

from __future__ import annotations

import gc
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.server_process import ServerProcess

FEW = 160


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess("fake", tmp_path).start()
    yield process
    assert process.stop() == 0


def descriptors(server: ServerProcess) -> int:
    return len(list(Path(f"/proc/{server.pid}/fd").iterdir()))


def threads(server: ServerProcess) -> int:
    return len(list(Path(f"/proc/{server.pid}/task").iterdir()))


def test_a_server_out_of_open_files_recovers_when_connections_go(fake: ServerProcess) -> None:
    hard = resource.prlimit(fake.pid, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(fake.pid, resource.RLIMIT_NOFILE, (FEW, hard))
    parts = urlsplit(fake.url)
    place = (parts.hostname or "", parts.port or 0)
    with ExitStack() as open_ones:
        for _ in range(FEW + 60):
            wire = socket.create_connection(place, timeout=10)
            open_ones.callback(wire.close)
            wire.sendall(b"GET /healthz HTTP/1.1\r\n")  # and never the rest
        time.sleep(1.5)
        assert fake.process is not None
        assert fake.process.poll() is None
    gc.collect()
    until = time.monotonic() + 20
    while True:
        try:
            with fake.client(timeout=2) as client:
                if client.post("/v1/sessions", json={}).status_code == 201:
                    return
        except httpx.TransportError:
            pass
        assert time.monotonic() < until
        time.sleep(0.2)


def work(client: httpx.Client, sessions: int, calls: int, tool: str, arguments: dict[str, str]) -> None:
    for _ in range(sessions):
        session = str(client.post("/v1/sessions", json={"images": ["workspace"]}).raise_for_status().json()["id"])
        for _ in range(calls):
            client.post(f"/v1/sessions/{session}/tools/{tool}", json={"arguments": arguments}).raise_for_status()
        assert client.delete(f"/v1/sessions/{session}").status_code == 204


@pytest.mark.parametrize(
    "runtime",
    [
        pytest.param("bubblewrap", marks=pytest.mark.bubblewrap),
        pytest.param("docker", marks=pytest.mark.docker),
    ],
)
def test_sessions_and_calls_leave_no_file_thread_or_memory_in_the_server(runtime: str, tmp_path: Path) -> None:
    server = ServerProcess(runtime, tmp_path, {"TOOLSERVER_POOL__ENABLED": "false"}).start()
    try:
        with server.client() as client:
            work(client, 4, 20, "python_execute", {"code": "40 + 2"})
            time.sleep(1)
            files, running, memory = descriptors(server), threads(server), server.resident_mib()
            work(client, 12, 20, "python_execute", {"code": "40 + 2"})
            until = time.monotonic() + 20
            while descriptors(server) > files + 3:
                assert time.monotonic() < until, (files, descriptors(server))
                time.sleep(0.2)
            assert threads(server) <= running + 8  # pools fill up to their bounds
            assert server.resident_mib() < memory + 16
    finally:
        assert server.stop() == 0
