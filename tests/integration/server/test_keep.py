"""`toolserver serve --keep-workspaces` with real sandboxes: what the shutdown leaves is the workspace as the calls left it."""

from __future__ import annotations

import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server_process import ServerProcess


@pytest.fixture(
    params=[
        pytest.param("bubblewrap", marks=pytest.mark.bubblewrap),
        pytest.param("docker", marks=pytest.mark.docker),
    ]
)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServerProcess]:
    keep = ("--keep-workspaces", str(tmp_path / "kept"))
    process = ServerProcess(request.param, tmp_path / "server", {"TOOLSERVER_HTTP__DRAIN_S": "1"}, keep).start()
    yield process
    process.end()


def new_session(server: ServerProcess) -> str:
    with server.client() as client:
        return str(client.post("/v1/sessions", json={"images": ["workspace"]}).json()["id"])


def shell(server: ServerProcess, session_id: str, command: str) -> int:
    with server.client() as client:
        path = f"/v1/sessions/{session_id}/tools/shell_execute"
        return client.post(path, json={"arguments": {"command": command}, "wait_s": 60}).status_code


def content(archive: Path) -> dict[str, bytes]:
    """The regular files of a tar."""
    found = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            stream = tar.extractfile(member) if member.isreg() else None
            if stream is not None:
                found[member.name.removeprefix("./")] = stream.read()
    return found


def test_what_calls_wrote_is_kept_and_nothing_else_is_left(server: ServerProcess, tmp_path: Path) -> None:
    written, deleted = new_session(server), new_session(server)
    assert shell(server, written, "mkdir a; seq 1 300000 > a/numbers; ln -s /etc/passwd link") == 200
    assert shell(server, deleted, "echo x > x") == 200
    with server.client() as client:
        client.delete(f"/v1/sessions/{deleted}")
    assert server.stop() == 0
    assert [place.name for place in (tmp_path / "kept").iterdir()] == [f"{written}.tar"]
    kept = content(tmp_path / "kept" / f"{written}.tar")
    assert kept == {"a/numbers": "".join(f"{n}\n" for n in range(1, 300_001)).encode()}
    server.wait_no_leftovers(written)


def test_a_call_that_the_shutdown_stops_has_its_files_kept(server: ServerProcess, tmp_path: Path) -> None:
    session_id = new_session(server)
    calling = threading.Thread(target=shell, args=(server, session_id, "echo one > counter; sync; sleep 60"))
    calling.start()
    with server.client() as client:
        until = time.monotonic() + 30
        while client.get(f"/v1/sessions/{session_id}/files/counter").status_code != 200:
            assert time.monotonic() < until
            time.sleep(0.1)
    assert server.stop() == 0
    calling.join()
    assert content(tmp_path / "kept" / f"{session_id}.tar") == {"counter": b"one\n"}
