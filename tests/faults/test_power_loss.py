"""A machine that stops while sessions are in use: sandboxes dead, the last commits not on the disk, another boot."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tests.server_process import ServerProcess

RUNTIMES = [pytest.param("docker", marks=pytest.mark.docker), pytest.param("bubblewrap", marks=pytest.mark.bubblewrap)]
COUNT = {"arguments": {"code": "print(open('ran', 'a').write('x') and open('ran').read())"}}


def count(client: httpx.Client, session: str, key: str) -> httpx.Response:
    return client.post(f"/v1/sessions/{session}/tools/python_execute", json=COUNT, headers={"Idempotency-Key": key})


def lose_power(server: ServerProcess, disk: Path, session: str) -> None:
    """`disk` has what of the database was written in time. The present boot can't be changed, so the noted one is."""
    server.kill()
    server.kill_sandboxes(session)
    state = server.folder / "state"
    (state / "toolserver.db-shm").unlink(missing_ok=True)
    for path in disk.iterdir():
        shutil.copyfile(path, state / path.name)
    with closing(sqlite3.connect(state / "toolserver.db")) as database, database:
        database.execute("UPDATE sessions SET used_in_boot = 'earlier' WHERE used_in_boot IS NOT NULL")
        database.execute("UPDATE meta SET value = 'earlier' WHERE name = 'boot'")


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_no_call_runs_twice_and_the_workspace_goes_on(runtime: str, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    server = ServerProcess(runtime, tmp_path / "server").start()
    try:
        with server.client() as client:
            session = str(client.post("/v1/sessions", json={"images": ["workspace"]}).json()["id"])
            assert count(client, session, "kept").status_code == 200
            for path in (server.folder / "state").glob("toolserver.db*"):
                if not path.name.endswith("-shm"):
                    shutil.copyfile(path, disk / path.name)
            assert count(client, session, "lost").status_code == 200
        lose_power(server, disk, session)
        server.start()
        with server.client() as client:
            told = count(client, session, "lost")
            assert (told.status_code, told.json()["detail"]["effects"]) == (410, "possible"), told.text
            assert count(client, session, "kept").status_code == 200
            following = told.json()["detail"]["successor"]
            assert client.get(f"/v1/sessions/{following}/files/ran").text == "xx"
            assert "xxx" in count(client, following, "next").text
            assert client.delete(f"/v1/sessions/{following}").status_code == 204
        server.wait_no_leftovers(following, 30)
    finally:
        server.end()
