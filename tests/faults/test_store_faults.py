"""The database locked by somebody else: nothing runs unrecorded, nobody waits for long, and it goes on by itself."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.server_process import ServerProcess


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess("bubblewrap", tmp_path_factory.mktemp("store")).start()
    yield process
    process.end()


pytestmark = pytest.mark.bubblewrap


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    with closing(sqlite3.connect(folder / "state" / "toolserver.db", isolation_level=None, timeout=10)) as database:
        database.execute("BEGIN EXCLUSIVE")
        try:
            yield
        finally:
            database.execute("ROLLBACK")


def timed(client: httpx.Client, method: str, path: str, body: object = None) -> tuple[float, httpx.Response]:
    begun = time.monotonic()
    answer = client.request(method, path, json=body)
    return time.monotonic() - begun, answer


def call_path(client: httpx.Client) -> str:
    answer = client.post("/v1/sessions", json={"ttl_s": 300})
    assert answer.status_code == 201, answer.text
    return f"/v1/sessions/{answer.json()['id']}/tools/python_execute"


def test_a_short_lock_only_delays(server: ServerProcess) -> None:
    with server.client() as client, ThreadPoolExecutor(4) as pool:
        path = call_path(client)
        with locked(server.folder):
            asked = [pool.submit(timed, client, "POST", path, {"arguments": {"code": str(n)}}) for n in range(4)]
            time.sleep(1)
        assert [answer.result()[1].status_code for answer in asked] == [200] * 4


def test_a_long_lock_is_503_for_all_in_bounded_time_while_reads_go_on(server: ServerProcess) -> None:
    with server.client() as client, ThreadPoolExecutor(10) as pool:
        path = call_path(client)
        marks = {"arguments": {"code": "open('marks', 'a').write('x')"}}
        with locked(server.folder):
            asked = [pool.submit(timed, client, "POST", path, marks) for _ in range(8)]
            asked.append(pool.submit(timed, client, "POST", "/v1/sessions", {}))
            time.sleep(2.5)  # past the time for which a key is believed
            for read, status in (("/v1/calls/unknown", 404), ("/readyz", 200), ("/v1/sessions", 200)):
                took, answer = timed(client, "GET", read)
                assert answer.status_code == status
                assert took < 2, "a read waited for the writers"
            answers = [answer.result() for answer in asked]
            took, ready = timed(client, "GET", "/readyz")
            assert (ready.status_code, ready.json()["detail"]["code"]) == (503, "runtime_unavailable")
            assert "database" in ready.json()["detail"]["message"]
            assert took < 2
        until = time.monotonic() + 15
        while client.get("/readyz").status_code != 200:  # the server's own writers go first
            assert time.monotonic() < until
            time.sleep(0.2)
        for took, answer in answers:
            assert answer.status_code == 503, answer.text
            assert answer.json()["detail"]["effects"] == "none"
            assert int(answer.headers["Retry-After"]) >= 1
            assert took < 25  # each of its writes waits 4 s for its turn; a session has several
        assert (
            client.post(path, json={"arguments": {"code": "import os; os.listdir()"}}).json()["structured"]["result"]
            == "[]"
        )


def test_an_outcome_that_can_not_be_written_is_given_and_written_later(server: ServerProcess) -> None:
    with server.client() as client, ThreadPoolExecutor(1) as pool:
        path = call_path(client)
        head = {"Idempotency-Key": "written-later"}
        body = {"arguments": {"code": "import time; time.sleep(1); 'late-1'"}}
        running = pool.submit(client.post, path, json=body, headers=head)
        time.sleep(0.4)
        with locked(server.folder):
            answer = running.result()
            assert answer.status_code == 200, answer.text
            assert "late-1" in client.get("/v1/calls/written-later").text
        assert client.post(path, json=body, headers=head).json() == answer.json()
        time.sleep(3)
        server.kill()
    server.start()
    with server.client() as client:
        assert client.get("/v1/calls/written-later").json() == answer.json()


@contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[Path]:
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("can't mount a small disk here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_state_disk_is_503_and_not_ready_until_there_is_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "server", 16) as folder:
        server = ServerProcess("bubblewrap", folder).start()
        try:
            with server.client() as client:
                path = call_path(client)
                body = {"arguments": {"code": "open('n', 'a').write('x')"}}
                assert client.post(path, json=body).status_code == 200
                assert client.get("/readyz").status_code == 200
                filler = folder / "filler"
                with contextlib.suppress(OSError), filler.open("wb") as file:
                    while True:
                        file.write(b"x" * 4096)
                        file.flush()
                statuses = [client.post(path, json=body).status_code for _ in range(8)]
                assert set(statuses) <= {200, 503}
                assert statuses[-1] == 503
                ready = client.get("/readyz")
                assert ready.status_code == 503
                assert "disk is full" in ready.json()["detail"]["message"]
                assert "toolserver_store_up 0" in client.get("/metrics").text
                filler.unlink()
                assert client.get("/readyz").status_code == 200
                assert client.post(path, json=body).status_code == 200
        finally:
            server.end()


@pytest.mark.docker
def test_a_snapshot_never_fills_the_disk_that_the_server_needs(tmp_path: Path) -> None:
    with small_disk(tmp_path / "server", 96) as folder:
        server = ServerProcess("docker", folder).start()
        try:
            with server.client() as client:
                path = call_path(client)
                session = path.partition("/tools/")[0]
                body = {"arguments": {"code": "import os\nopen('big', 'wb').write(os.urandom(120 << 20))\nNone"}}
                assert client.post(path, json=body).status_code == 200
                refused = client.post(f"{session}/snapshots", json={})
                assert refused.status_code == 503, refused.text
                assert "no room for more snapshots" in refused.json()["detail"]["message"]
                assert client.get("/readyz").status_code == 200
                body = {"arguments": {"code": "os.remove('big')"}}
                assert client.post(path, json=body).status_code == 200, "others go on"
                until = time.monotonic() + 20
                while sum(file.stat().st_size for file in (folder / "state/snapshots").iterdir()) > 1 << 20:
                    assert time.monotonic() < until, "what was not kept stays on the disk"
                    time.sleep(0.1)
                assert client.post(f"{session}/snapshots", json={}).status_code == 201
        finally:
            server.end()


def test_a_damaged_database_is_refused_in_words_and_left_alone(tmp_path: Path) -> None:
    database = tmp_path / "state" / "toolserver.db"
    database.parent.mkdir()
    database.write_bytes(b"garbage!" * 4000)
    server = ServerProcess("fake", tmp_path)
    with pytest.raises(AssertionError, match="damaged or no database"):
        server.start(20)
    assert server.process is not None
    assert server.process.wait(10) == 2
    assert "Traceback" not in server.log()
    assert database.read_bytes() == b"garbage!" * 4000
