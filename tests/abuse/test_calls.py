"""Calls that wait, overlap, are cancelled many times, and race with the end of their session."""

from __future__ import annotations

import json
import socket
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import pytest

from tests.abuse.arena import Arena, code_of


def key() -> str:
    return uuid.uuid4().hex


def python(arena: Arena, code: str, name: str, **times: float) -> httpx.Response:
    return arena.call("python_execute", {"code": code}, key=name, **times)


def test_a_call_behind_another_keeps_its_own_deadline_and_can_be_cancelled(arena: Arena) -> None:
    long, late, unwanted = key(), key(), key()
    with ThreadPoolExecutor(3) as pool:
        running = pool.submit(python, arena, "import time; time.sleep(4); 'long-1'", long)
        time.sleep(0.4)
        begun = time.monotonic()
        waiting = pool.submit(python, arena, "open('ran-late', 'w')", late, deadline_s=1.5)
        queued = pool.submit(python, arena, "open('ran-unwanted', 'w')", unwanted)
        time.sleep(0.4)
        cancelled = arena.request("DELETE", f"/v1/calls/{unwanted}")
        assert cancelled.status_code == 200
        assert cancelled.json()["cancelled"] is True
        assert code_of(queued.result()) == "cancelled"
        assert code_of(waiting.result()) == "deadline_exceeded"
        assert time.monotonic() - begun < 3.4, "it waited for the call before it"
        assert "long-1" in running.result().text
    assert (
        arena.python("import os; [n for n in os.listdir() if n.startswith('ran')]").json()["structured"]["result"]
        == "[]"
    )


def test_a_call_is_cancelled_once_however_many_ask_for_it(arena: Arena) -> None:
    name = key()
    with ThreadPoolExecutor(9) as pool:
        running = pool.submit(python, arena, "import time; time.sleep(30)", name)
        time.sleep(0.5)
        by_tool = pool.submit(arena.call, "call_cancel", {"call_id": name})
        asked = [pool.submit(arena.request, "DELETE", f"/v1/calls/{name}") for _ in range(7)]
        answers = [answer.result() for answer in (*asked, by_tool)]
        assert {(answer.status_code, answer.json()["cancelled"]) for answer in answers} == {(200, True)}
        assert code_of(running.result()) == "cancelled"


def test_one_key_with_two_bodies_at_once_runs_one_of_them_once(arena: Arena) -> None:
    name = key()
    with ThreadPoolExecutor(12) as pool:
        code = "open('marks', 'a').write('x'); {}"
        answers = list(pool.map(lambda n: python(arena, code.format(n % 2), name), range(12)))
    assert Counter(answer.status_code for answer in answers) == {200: 6, 409: 6}
    assert arena.request("GET", f"{arena.path}/files/marks").content == b"x"


def test_more_calls_than_a_session_may_have_are_429_and_the_others_end(arena: Arena) -> None:
    names = [key() for _ in range(36)]
    with ThreadPoolExecutor(36) as pool:
        body = {"command": "sleep 2; echo done-1"}
        answers = list(pool.map(lambda name: arena.call("shell_execute", body, key=name, wait_s=0.05), names))
    refused = [name for name, answer in zip(names, answers, strict=True) if answer.status_code == 429]
    assert len(refused) == 4
    for name in names:
        answer = arena.call("call_wait", {"call_id": name, "wait_s": 20})
        assert answer.status_code == (404 if name in refused else 200), answer.text


def test_what_races_with_the_end_of_its_session_is_done_or_gone_and_nothing_else(arena: Arena) -> None:
    seen: Counter[tuple[int, str]] = Counter()
    for pause_s in (0, 0.03, 0.06, 0.1):
        with arena.server.client() as client, ThreadPoolExecutor(12) as pool:
            path = f"/v1/sessions/{client.post('/v1/sessions', json={'ttl_s': 60}).json()['id']}"
            body = {"arguments": {"code": "import time; time.sleep(0.05)"}}
            asked = [pool.submit(client.post, f"{path}/tools/python_execute", json=body) for _ in range(4)]
            asked += [pool.submit(client.put, f"{path}/files/{n}", content=b"x" * 300_000) for n in range(4)]
            asked += [pool.submit(client.get, f"{path}/files?path=") for _ in range(2)]
            time.sleep(pause_s)
            asked += [pool.submit(client.delete, path) for _ in range(2)]
            for answer in asked:
                seen[answer.result().status_code, code_of(answer.result())] += 1
            assert client.get(path).status_code == 410
        arena.server.wait_no_leftovers(path.rsplit("/", 1)[1])
    assert set(seen) <= {(200, ""), (201, ""), (204, ""), (410, "session_gone")}, seen


def wire(arena: Arena, *parts: bytes, pause_s: float = 0) -> bytes:
    """What the server sends before it closes the connection."""
    at = urlsplit(arena.server.url)
    said = b""
    with socket.create_connection((at.hostname or "", at.port or 0), timeout=30) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(pause_s)
        while data := connection.recv(65_536):
            said += data
    return said


def call_bytes(arena: Arena, code: str, name: str) -> bytes:
    body = json.dumps({"arguments": {"code": code}}).encode()
    head = (
        f"POST {arena.path}/tools/python_execute HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {arena.server.key}\r\n"
        f"Idempotency-Key: {name}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@pytest.mark.parametrize(
    "after",
    [
        b"NO HTTP AT ALL\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"y" * 70_000,
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
    ids=["garbage", "huge header", "both lengths"],
)
def test_what_follows_a_call_on_its_connection_is_never_answered_in_its_place(arena: Arena, after: bytes) -> None:
    name = key()
    said = wire(arena, call_bytes(arena, "import time; time.sleep(0.8); 'ran-1'", name), after, pause_s=0.2)
    assert said == b"", "an answer that says that nothing was run"
    answer = arena.call("call_wait", {"call_id": name, "wait_s": 10})
    assert answer.status_code == 200, answer.text
    assert "ran-1" in answer.text


def test_calls_in_a_pipeline_are_answered_in_order(arena: Arena) -> None:
    codes = ["import time; time.sleep(0.4); 'one-1'", "1 / 0", "'three-3'"]
    last = f"GET /healthz HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {arena.server.key}\r\nConnection: close\r\n\r\n"
    said = wire(arena, b"".join(call_bytes(arena, code, key()) for code in codes) + last.encode())
    places = [said.find(word) for word in (b"one-1", b"ZeroDivisionError", b"three-3")]
    assert -1 not in places
    assert places == sorted(places)
    assert said.count(b"HTTP/1.1 ") == 4
