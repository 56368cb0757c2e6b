"""Hostile HTTP: bodies, keys, headers. Each case also goes through the arena's invariants."""

from __future__ import annotations

import gzip
import socket
import threading
import time
import uuid
from urllib.parse import urlsplit

import pytest

from tests.abuse.arena import Arena, code_of

JSON = {"Content-Type": "application/json"}


def test_a_misspelt_tool_is_404_with_the_near_name(arena: Arena) -> None:
    answer = arena.call("pyhton_execute", {})
    assert (answer.status_code, code_of(answer)) == (404, "tool_not_found")
    assert "python_execute" in answer.json()["detail"]["suggestions"]


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nothing", 404), ("PATCH", "/v1/tools", 405), ("POST", "/healthz", 405)]
)
def test_an_unknown_route_is_told_apart_from_an_unknown_tool(arena: Arena, method: str, path: str, status: int) -> None:
    answer = arena.request(method, path)
    assert answer.status_code == status
    assert code_of(answer) not in ("tool_not_found", "")


@pytest.mark.parametrize(
    "arguments",
    [{}, {"code": "1", "more": 1}, {"code": 5}, "{}", '{"code": "1"}', None, ["1"], {"code": None}],
    ids=["missing", "extra", "type", "text", "json text", "null", "list", "null code"],
)
def test_arguments_that_break_the_schema_are_422(arena: Arena, arguments: object) -> None:
    answer = arena.call("python_execute", arguments)
    assert (answer.status_code, code_of(answer)) == (422, "invalid_arguments")
    assert answer.json()["detail"]["errors"]


BODIES = {
    "nan": b'{"arguments": {"code": NaN}}',
    "infinity": b'{"arguments": {"code": "1"}, "wait_s": Infinity}',
    "overflowing number": b'{"arguments": {"code": "1"}, "wait_s": 1e999}',
    "lone surrogate": b'{"arguments": {"code": "\\ud800"}}',
    "lone surrogate as key": b'{"arguments": {"code": "1", "\\ud800": 1}}',
    "not UTF-8": b'{"arguments": {"code": "\xff\xfe"}}',
    "deep": b'{"arguments": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "long integer": b'{"arguments": {"code": "1"}, "wait_s": ' + b"9" * 5000 + b"}",
    "negative wait": b'{"arguments": {"code": "1"}, "wait_s": -1}',
    "endless deadline": b'{"arguments": {"code": "1"}, "deadline_s": 1e308}',
    "text as number": b'{"arguments": {"code": "1"}, "deadline_s": "5"}',
    "zero deadline": b'{"arguments": {"code": "1"}, "deadline_s": 0}',
    "cut": b'{"arguments": {"code": ',
    "empty": b"",
    "two values": b'{"arguments": {"code": "1"}} {}',
    "repeated key": b'{"arguments": {"code": "1"}, "arguments": {"code": "2"}}',
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_a_body_that_is_no_sound_json_is_422(arena: Arena, body: bytes) -> None:
    answer = arena.request("POST", f"{arena.path}/tools/python_execute", content=body, headers=JSON)
    assert (answer.status_code, code_of(answer)) == (422, "invalid_arguments")


def test_a_body_over_the_limit_is_refused_before_it_is_read(arena: Arena) -> None:
    begun = time.monotonic()
    body = b'{"arguments": {"code": "' + b"x" * (64 << 20) + b'"}}'
    answer = arena.request("POST", f"{arena.path}/tools/python_execute", content=body, headers=JSON)
    assert (answer.status_code, code_of(answer)) == (413, "too_large")
    assert time.monotonic() - begun < 5


def test_a_body_of_unknown_length_is_bounded_too(arena: Arena) -> None:
    chunks = (b"x" * 65_536 for _ in range(1024))
    answer = arena.request("POST", f"{arena.path}/tools/python_execute", content=chunks, headers=JSON)
    assert (answer.status_code, code_of(answer)) == (413, "too_large")


def test_a_compressed_body_is_never_inflated(arena: Arena) -> None:
    body = gzip.compress(b'{"arguments": {"code": "1"}}')
    answer = arena.request(
        "POST", f"{arena.path}/tools/python_execute", content=body, headers=JSON | {"Content-Encoding": "gzip"}
    )
    assert answer.status_code == 415


def test_slow_headers_are_cut_off_and_hold_up_nobody(arena: Arena) -> None:
    parts = urlsplit(arena.server.url)
    wires = [socket.create_connection((parts.hostname or "", parts.port or 0), timeout=30) for _ in range(100)]
    try:
        for wire in wires:
            wire.sendall(b"GET /v1/tools HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        begun = time.monotonic()
        assert arena.client.get("/healthz").status_code == 200
        assert time.monotonic() - begun < 2
        for wire in wires[:5]:
            wire.settimeout(25)
            while wire.recv(4096):
                pass
        assert time.monotonic() - begun < 25
    finally:
        for wire in wires:
            wire.close()


def test_the_same_key_gives_the_stored_answer_and_runs_once(arena: Arena) -> None:
    key = str(uuid.uuid4())
    code = "open('ran', 'a').write('x')\nprint('once')"
    first = arena.call("python_execute", {"code": code}, key=key)
    second = arena.call("python_execute", {"code": code}, key=key)
    assert first.status_code == second.status_code == 200
    assert first.json() == second.json()
    assert second.headers["Idempotent-Replay"] == "true"
    assert arena.request("GET", f"{arena.path}/files/ran").content == b"x"


def test_the_same_key_with_another_body_is_409(arena: Arena) -> None:
    key = str(uuid.uuid4())
    arena.call("python_execute", {"code": "1"}, key=key)
    answer = arena.call("python_execute", {"code": "open('other', 'w')"}, key=key)
    assert (answer.status_code, code_of(answer)) == (409, "idempotency_conflict")
    assert arena.request("GET", f"{arena.path}/files/other").status_code == 404


def test_a_client_that_hangs_up_does_not_lose_its_call(arena: Arena) -> None:
    key = str(uuid.uuid4())
    parts = urlsplit(arena.server.url)
    body = b'{"arguments": {"code": "import time; time.sleep(2); print(\'kept-1\')"}}'
    head = f"POST {arena.path}/tools/python_execute HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {arena.server.key}\r\nIdempotency-Key: {key}\r\n"
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=10) as wire:
        wire.sendall(
            head.encode() + f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        )
        time.sleep(0.8)
    answer = arena.request("GET", f"/v1/calls/{key}?wait_s=15")
    assert answer.status_code == 200
    assert "kept-1" in answer.text


@pytest.mark.parametrize("size", [70_000, 500_000])
def test_huge_headers_are_refused(arena: Arena, size: int) -> None:
    answer = arena.client.get("/v1/tools", headers={"X-Big": "x" * size})
    assert answer.status_code in (400, 431)


def test_both_content_length_and_chunked_is_no_way_in(arena: Arena) -> None:
    parts = urlsplit(arena.server.url)
    smuggled = b"0\r\n\r\nGET /v1/sessions HTTP/1.1\r\nHost: x\r\n\r\n"
    head = b"POST /v1/sessions HTTP/1.1\r\nHost: x\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=10) as wire:
        wire.sendall(head + smuggled)
        answer = wire.recv(65_536)
    assert answer.split(b" ")[1] in (b"400", b"401", b"422")
    assert b" 200 " not in answer


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer garbage", "Basic eDp5", "bearer"])
def test_a_wrong_key_is_401_whatever_it_looks_like(arena: Arena, value: str) -> None:
    answer = arena.request("GET", "/v1/tools", headers={"Authorization": value})
    assert (answer.status_code, code_of(answer)) == (401, "unauthorized")


def test_a_key_in_the_query_is_no_key(arena: Arena) -> None:
    answer = arena.request(
        "GET", f"/v1/tools?api_key={arena.server.key}&token={arena.server.key}", headers={"Authorization": ""}
    )
    assert answer.status_code == 401
    assert arena.server.key not in arena.server.log()


@pytest.mark.parametrize("odd", ["..%2f..%2fx", "%00", "a" * 5000, "%27%20OR%201=1"])
def test_an_odd_session_id_is_4xx(arena: Arena, odd: str) -> None:
    answer = arena.client.get(f"/v1/sessions/{odd}")
    assert 400 <= answer.status_code < 500


def test_ten_long_calls_do_not_freeze_health_checks(arena: Arena) -> None:
    threads = [threading.Thread(target=lambda: arena.shell("sleep 3")) for _ in range(10)]
    for thread in threads:
        thread.start()
    slowest = 0.0
    while any(thread.is_alive() for thread in threads):
        begun = time.monotonic()
        with arena.server.client() as client:
            assert client.get("/healthz").status_code == 200
        slowest = max(slowest, time.monotonic() - begun)
        time.sleep(0.3)
    assert slowest < 2
    assert all(answer.status_code == 200 for answer in arena.answers)
