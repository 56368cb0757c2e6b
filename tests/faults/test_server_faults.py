"""The server killed, ended, restarted; the engine away. What clients see, and what is left."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.server_process import ServerProcess

RUNTIMES = [pytest.param("docker", marks=pytest.mark.docker), pytest.param("bubblewrap", marks=pytest.mark.bubblewrap)]


@pytest.fixture(params=RUNTIMES)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(request.param, tmp_path).start()
    yield process
    process.end()


def open_session(client: httpx.Client) -> str:
    answer = client.post("/v1/sessions", json={"ttl_s": 600})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def python(client: httpx.Client, session: str, code: str, key: str | None = None, **times: float) -> httpx.Response:
    head = {"Idempotency-Key": key} if key else {}
    return client.post(
        f"/v1/sessions/{session}/tools/python_execute", json={"arguments": {"code": code}, **times}, headers=head
    )


def test_sessions_outlive_a_killed_server_and_foreign_containers_are_let_be(server: ServerProcess) -> None:
    foreign = ""
    if server.runtime == "docker":
        image = f"toolcrib/workspace:{version('toolcrib')}"
        command = ["docker", "run", "-d", "--rm", "--network", "none", "--label", "toolcrib.server=another"]
        command += ["--entrypoint", "sleep", image, "120"]
        foreign = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    try:
        with server.client() as client:
            sessions = [open_session(client) for _ in range(2)]
            for session in sessions:
                assert python(client, session, "x = 41; open('f', 'w').write('x')").status_code == 200
        server.kill()
        server.start()
        with server.client() as client:
            for session in sessions:
                answer = python(client, session, "print(x + 1, open('f').read())")
                assert "42 x" in answer.text
                assert "sandbox_reset" not in answer.json()
                assert client.delete(f"/v1/sessions/{session}").status_code == 204
        for session in sessions:
            server.wait_no_leftovers(session, 20)
        if foreign:
            command = ["docker", "inspect", "-f", "{{.State.Running}}", foreign]
            assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "true"
    finally:
        if foreign:
            subprocess.run(["docker", "rm", "-f", foreign], capture_output=True, check=False)


def test_a_stored_outcome_is_given_again_after_a_restart(server: ServerProcess) -> None:
    key, code = str(uuid.uuid4()), "print('first-1')"
    with server.client() as client:
        session = open_session(client)
        first = python(client, session, code, key)
        assert first.status_code == 200
    server.kill()
    server.start()
    with server.client() as client:
        asked = client.get(f"/v1/calls/{key}")
        assert asked.status_code == 200
        assert asked.json() == first.json()
        again = python(client, session, code, key)
        assert again.status_code == 200
        assert again.json() == first.json()
        assert python(client, session, "print('other')", key).status_code == 409


def test_a_call_that_ran_on_over_the_servers_death_has_its_outcome_and_ran_once(server: ServerProcess) -> None:
    key, code = str(uuid.uuid4()), "import time; open('ran', 'a').write('x'); time.sleep(3); print('slept')"
    with server.client() as client:
        session = open_session(client)
        assert python(client, session, code, key, wait_s=1).status_code == 450
    server.kill()
    server.start()
    with server.client() as client:
        answer = client.get(f"/v1/calls/{key}?wait_s=30")
        assert answer.status_code == 200, answer.text
        assert "slept" in answer.text
        assert python(client, session, code, key).json() == answer.json()
        assert python(client, session, "open('ran').read()").json()["structured"]["result"] == "'x'"


def test_a_call_whose_sandbox_ended_with_the_server_is_unknown_and_never_runs_again(server: ServerProcess) -> None:
    key, code = str(uuid.uuid4()), "import time; time.sleep(60)"
    with server.client() as client:
        session = open_session(client)
        assert python(client, session, code, key, wait_s=0.5).status_code == 450
    server.kill()
    server.kill_sandboxes(session)
    server.start()
    with server.client() as client:
        for answer in (client.get(f"/v1/calls/{key}?wait_s=30"), python(client, session, code, key)):
            assert answer.status_code == 500
            detail = answer.json()["detail"]
            assert (detail["code"], detail["effects"], detail["retryable"]) == ("outcome_unknown", "possible", False)
        assert "was replaced" in python(client, session, "1").text


def test_sigterm_with_calls_running_ends_soon_and_leaves_nothing(server: ServerProcess) -> None:
    answers: list[httpx.Response | str] = []

    def call(session: str) -> None:
        with server.client() as client:
            try:
                answers.append(python(client, session, "import time; time.sleep(60)", wait_s=50))
            except httpx.HTTPError as error:
                answers.append(type(error).__name__)

    with server.client() as client:
        sessions = [open_session(client) for _ in range(3)]
    threads = [threading.Thread(target=call, args=(session,)) for session in sessions]
    for thread in threads:
        thread.start()
    time.sleep(2)
    begun = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - begun < 20
    for thread in threads:
        thread.join(10)
    for answer in answers:
        assert isinstance(answer, httpx.Response), answer
        assert answer.status_code in (410, 450, 500, 503)
    for session in sessions:
        server.wait_no_leftovers(session)


def test_a_second_server_on_the_same_state_is_refused(server: ServerProcess) -> None:
    second = ServerProcess(server.runtime, server.folder / "second")
    second.folder.mkdir()
    (second.folder / "state").symlink_to(server.folder / "state")
    with pytest.raises(AssertionError, match="did not become ready"):
        second.start(20)
    assert second.process is not None
    assert second.process.wait(10) == 2
    assert "in use" in second.log()
    with server.client() as client:
        assert client.get("/readyz").status_code == 200


def test_deleting_and_hanging_up_at_once_still_deletes(server: ServerProcess) -> None:
    with server.client() as client:
        session = open_session(client)
        parts = urlsplit(server.url)
        with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=10) as wire:
            wire.sendall(
                f"DELETE /v1/sessions/{session} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.key}\r\n\r\n".encode()
            )
        until = time.monotonic() + 10
        while client.get(f"/v1/sessions/{session}").status_code != 410:
            assert time.monotonic() < until
            time.sleep(0.2)
        server.wait_no_leftovers(session)


@pytest.mark.docker
def test_an_engine_that_is_away_at_start_is_503_and_found_when_it_comes(tmp_path: Path) -> None:
    socket_path = tmp_path / "engine.sock"
    server = ServerProcess("docker", tmp_path / "server", {"TOOLSERVER_RUNTIME__DOCKER_HOST": f"unix://{socket_path}"})
    try:
        server.start()
        with server.client() as client:
            begun = time.monotonic()
            answer = client.post("/v1/sessions", json={})
            assert (answer.status_code, answer.json()["detail"]["code"]) == (503, "runtime_unavailable")
            assert int(answer.headers["Retry-After"]) >= 1
            assert time.monotonic() - begun < 5
            assert client.get("/healthz").status_code == 200
            assert client.get("/readyz").status_code == 503
            socket_path.symlink_to("/var/run/docker.sock")
            until = time.monotonic() + 20
            while client.get("/readyz").status_code != 200:
                assert time.monotonic() < until
                time.sleep(0.3)
            assert python(client, open_session(client), "6 * 7").status_code == 200
    finally:
        server.end()


@pytest.mark.docker
def test_a_container_removed_by_hand_in_mid_call_is_named_and_replaced(tmp_path: Path) -> None:
    server = ServerProcess("docker", tmp_path).start()
    try:
        with server.client() as client:
            session = open_session(client)
            assert python(client, session, "x = 41; open('kept', 'w').write('kept')").status_code == 200
            box: list[httpx.Response] = []
            runner = threading.Thread(
                target=lambda: box.append(python(client, session, "import time; time.sleep(50)", wait_s=50))
            )
            runner.start()
            time.sleep(1.5)
            begun = time.monotonic()
            subprocess.run(["docker", "rm", "-f", *server.containers(session)], capture_output=True, check=True)
            runner.join(15)
            assert time.monotonic() - begun < 10
            assert box[0].status_code == 500
            assert box[0].json()["detail"]["code"] in ("tool_crashed", "outcome_unknown")
            after = python(client, session, "print(open('kept').read(), 'x' in globals())")
            assert after.status_code == 200, after.text
            assert "kept False" in after.text
    finally:
        server.end()
