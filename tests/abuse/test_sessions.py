"""Sessions of others, ended ones, too many."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.abuse.arena import Arena, code_of
from tests.server_process import ServerProcess


def keys(server: ServerProcess, *arguments: str) -> Any:
    command = [
        sys.executable,
        "-m",
        "toolserver",
        "keys",
        *arguments,
        "--state-dir",
        str(server.folder / "state"),
        "--json",
    ]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def new_key(server: ServerProcess, *options: str) -> str:
    return str(keys(server, "create", "for a test", *options)["key"])


def test_another_tenants_things_are_404_to_the_byte(arena: Arena) -> None:
    arena.request("PUT", f"{arena.path}/files/secret.txt", content=b"secret").raise_for_status()
    call = str(uuid.uuid4())
    assert arena.call("python_execute", {"code": "1"}, key=call).status_code == 200
    with arena.server.client(new_key(arena.server, "--tenant", f"stranger-{uuid.uuid4().hex[:6]}")) as stranger:
        for method, path in (
            ("GET", ""),
            ("DELETE", ""),
            ("GET", "/files/secret.txt"),
            ("GET", "/files?path="),
            ("GET", "/archive"),
            ("GET", "/tools"),
        ):
            foreign = stranger.request(method, arena.path + path)
            unknown = stranger.request(method, "/v1/sessions/ses_unknown" + path)
            assert foreign.status_code == unknown.status_code == 404
            one, other = (dict(a.json()["detail"], trace_id="") for a in (foreign, unknown))
            assert one == other
        answer = stranger.post(f"{arena.path}/tools/python_execute", json={"arguments": {"code": "1"}})
        assert (answer.status_code, code_of(answer)) == (404, "session_not_found")
        assert stranger.get(f"/v1/calls/{call}").status_code == 404
        assert stranger.delete(f"/v1/calls/{call}").status_code == 404
        assert arena.id not in stranger.get("/v1/sessions").text
    assert arena.request("GET", f"{arena.path}/files/secret.txt").content == b"secret"


def test_a_key_without_the_scope_is_403_and_runs_nothing(arena: Arena) -> None:
    with arena.server.client(new_key(arena.server, "--tenant", "reader", "--scope", "read")) as reader:
        assert reader.get("/v1/tools").status_code == 200
        answer = reader.post("/v1/sessions", json={})
        assert (answer.status_code, code_of(answer)) == (403, "forbidden")


def test_a_revoked_key_is_401(arena: Arena) -> None:
    made = keys(arena.server, "create", "for a leaver")
    with arena.server.client(made["key"]) as client:
        assert client.get("/v1/tools").status_code == 200
        keys(arena.server, "revoke", made["key_id"])
        until = time.monotonic() + 10
        while client.get("/v1/tools").status_code != 401:
            assert time.monotonic() < until
            time.sleep(0.2)


def test_a_deleted_session_is_410_everywhere_and_says_why(arena: Arena) -> None:
    with arena.server.client() as client:
        session = client.post("/v1/sessions", json={"ttl_s": 60}).json()["id"]
        assert client.delete(f"/v1/sessions/{session}").status_code == 204
        for method, path in (("GET", ""), ("GET", "/files/a"), ("GET", "/tools"), ("GET", "/archive")):
            answer = client.request(method, f"/v1/sessions/{session}{path}")
            assert (answer.status_code, code_of(answer)) == (410, "session_gone")
            assert answer.json()["detail"]["cause"] == "deleted"


@pytest.mark.parametrize(("field", "cause"), [("ttl_s", "expired"), ("idle_s", "idle")])
def test_a_session_ends_by_itself_and_leaves_nothing(arena: Arena, field: str, cause: str) -> None:
    with arena.server.client() as client:
        session = client.post("/v1/sessions", json={"ttl_s": 60, field: 2}).json()["id"]
        time.sleep(5)
        answer = client.get(f"/v1/sessions/{session}")
        assert (answer.status_code, answer.json()["detail"].get("cause")) == (410, cause)
        arena.server.wait_no_leftovers(session)


def test_a_running_call_keeps_its_session_from_being_idle(arena: Arena) -> None:
    with arena.server.client() as client:
        session = client.post("/v1/sessions", json={"ttl_s": 60, "idle_s": 2}).json()["id"]
        answer = client.post(
            f"/v1/sessions/{session}/tools/shell_execute", json={"arguments": {"command": "sleep 6; echo done-1"}}
        )
        assert answer.status_code == 200, answer.text
        client.delete(f"/v1/sessions/{session}")


def test_twelve_sessions_at_once_all_open_or_are_honestly_refused(arena: Arena) -> None:
    with arena.server.client(timeout=90) as client, ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: client.post("/v1/sessions", json={"ttl_s": 120}), range(12)))
        opened = [answer.json()["id"] for answer in answers if answer.status_code == 201]
        assert all(answer.status_code in (201, 429, 503) for answer in answers)
        assert len(opened) >= 8
        works = list(
            pool.map(
                lambda s: (
                    client.post(
                        f"/v1/sessions/{s}/tools/python_execute", json={"arguments": {"code": "6*7"}}
                    ).status_code
                ),
                opened,
            )
        )
        assert works == [200] * len(opened)
        list(pool.map(lambda s: client.delete(f"/v1/sessions/{s}"), opened))
    for session in opened:
        arena.server.wait_no_leftovers(session)


@pytest.mark.bubblewrap
def test_a_tenants_quota_is_429_and_older_sessions_live_on(tmp_path: Path) -> None:
    server = ServerProcess(
        "bubblewrap",
        tmp_path,
        {"TOOLSERVER_SESSION__MAX_SESSIONS_PER_TENANT": "3", "TOOLSERVER_SESSION__MAX_SESSIONS": "5"},
    ).start()
    try:
        with server.client() as client, server.client(new_key(server, "--tenant", "other")) as other:
            mine = [client.post("/v1/sessions", json={}) for _ in range(4)]
            assert [answer.status_code for answer in mine] == [201, 201, 201, 429]
            assert code_of(mine[3]) == "quota_exceeded"
            assert int(mine[3].headers["Retry-After"]) >= 1
            theirs = [other.post("/v1/sessions", json={}) for _ in range(3)]
            assert [answer.status_code for answer in theirs] == [201, 201, 503]
            assert code_of(theirs[2]) == "no_capacity"
            assert client.get(f"/v1/sessions/{mine[0].json()['id']}").status_code == 200
            assert client.delete(f"/v1/sessions/{mine[0].json()['id']}").status_code == 204
            assert client.post("/v1/sessions", json={}).status_code == 201
    finally:
        server.end()
