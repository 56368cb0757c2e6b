"""Limits at their edges, odd environments and labels, ranges, and edits that could mean two things."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.abuse.arena import Arena, check_body, code_of
from tests.server_process import ServerProcess


@pytest.mark.parametrize("arena", [{"memory_mb": 64, "pids": 16, "disk_mb": 1, "cpus": 0.1}], indirect=True)
def test_the_smallest_limits_are_usable(arena: Arena) -> None:
    assert arena.call("file_write", {"path": "a", "content": "hello"}).status_code == 200
    assert "hello" in arena.shell("cat a | cat", deadline_s=40).text


def test_a_disk_of_one_mebibyte_is_kept(arena: Arena) -> None:
    session = arena.client.post("/v1/sessions", json={"ttl_s": 60, "limits": {"disk_mb": 1}}).json()["id"]
    path = f"/v1/sessions/{session}/files/b"
    assert arena.client.put(path, content=b"x" * 1000).status_code == 201
    answer = arena.client.put(path, content=b"x" * 1_200_000)
    assert (answer.status_code, code_of(answer)) == (413, "too_large")
    assert arena.client.get(path).content == b"x" * 1000
    arena.client.delete(f"/v1/sessions/{session}")


@pytest.mark.parametrize(
    "body",
    [
        {"limits": {"cpus": 0.001}},
        {"limits": {"cpus": 0}},
        {"limits": {"cpus": 1e300}},
        {"limits": {"memory_mb": 63}},
        {"limits": {"memory_mb": 512.5}},
        {"limits": {"memory_mb": True}},
        {"limits": {"pids": 15}},
        {"limits": {"disk_mb": 0}},
        {"env": {"A=B": "x"}},
        {"env": {"": "x"}},
        {"env": {"A": "x\0y"}},
        {"env": {"A": "x" * 100_000}},
        {"env": {"A": "\ud800"}},
        {"env": {f"V{n}": "x" for n in range(5000)}},
        {"labels": {"a": "x" * 1_000_000}},
        {"labels": {f"l{n}": "x" for n in range(10_000)}},
        {"images": ["workspace", "workspace"]},
        {"images": ["../workspace"]},
        {"ttl_s": -1},
    ],
    ids=lambda body: json.dumps(body)[:40],
)
def test_what_can_not_be_granted_is_422_and_makes_nothing(server: ServerProcess, body: dict[str, Any]) -> None:
    with server.client() as client:
        before = len(client.get("/v1/sessions").json()["sessions"])
        answer = client.post("/v1/sessions", content=json.dumps(body))
        assert (answer.status_code, code_of(answer)) == (422, "invalid_arguments")
        assert ".. " not in answer.json()["detail"]["message"]
        assert len(client.get("/v1/sessions").json()["sessions"]) == before
    check_body(answer, server)


def test_an_environment_that_misleads_programs_does_not_reach_the_worker(arena: Arena) -> None:
    env = {"LD_PRELOAD": "/nope.so", "PYTHONHOME": "/nope", "PYTHONPATH": "/nope", "PATH": "", "HOME": "/nope"}
    env |= {"PYTHONSTARTUP": "/x", "BASH_ENV": "/x", "PYTHONINSPECT": "1", "TMPDIR": "/nope", "LANG": "xx", "IFS": "x"}
    answer = arena.client.post("/v1/sessions", json={"ttl_s": 60, "env": env})
    assert answer.status_code == 201, answer.text
    path = f"/v1/sessions/{answer.json()['id']}"
    body = {"arguments": {"code": "import os; print('fine', os.environ['HOME'])"}}
    assert "fine /nope" in arena.client.post(f"{path}/tools/python_execute", json=body).text
    arena.client.delete(path)


RANGES = (
    ("bytes=0-1,3-4", 200, b"0123456789"),
    ("bytes=0-99999999999999999999", 200, b"0123456789"),
    ("bytes=5-2", 200, b"0123456789"),
    ("items=0-1", 200, b"0123456789"),
    ("bytes=8-99", 206, b"89"),
    ("bytes=-99", 206, b"0123456789"),
    ("bytes=10-", 416, b""),
    ("bytes=-0", 416, b""),
)


def test_a_range_is_served_ignored_or_refused_as_http_says(arena: Arena) -> None:
    path = f"{arena.path}/files/digits"
    assert arena.request("PUT", path, content=b"0123456789").status_code == 201
    for asked, status, given in RANGES:
        answer = arena.client.get(path, headers={"Range": asked})
        assert answer.status_code == status, asked
        if status == 416:
            assert answer.headers["content-range"] == "bytes */10"
        else:
            assert answer.content == given, asked
    assert arena.request("PUT", path, content=b"").status_code == 200
    assert arena.client.get(path).content == b""
    assert arena.client.get(path, headers={"Range": "bytes=0-0"}).status_code == 416


EDITS = (
    (b"aaa", "aa", "b", None),  # two places that overlap
    (b"aaaa", "aa", "b", None),
    (b"a\r\nb\r\n", "b\n", "c\n", None),  # never across another kind of line end
    (b"a\r\nb\r\n", "a\r\nb", "c", b"c\r\n"),
    (b"\xef\xbb\xbfhello", "hello", "bye", b"\xef\xbb\xbfbye"),
    (b"caf\xe9 x\x00", "x", "y", b"caf\xe9 y\x00"),
    ("e\u0301".encode(), "\u00e9", "e", None),
)


def test_an_edit_is_exact_to_the_byte_or_not_done(arena: Arena) -> None:
    path = f"{arena.path}/files/f"
    for data, old, new, result in EDITS:
        arena.request("PUT", path, content=data)
        answer = arena.call("file_edit", {"path": "f", "old_string": old, "new_string": new})
        assert code_of(answer) == ("tool_failed" if result is None else ""), (data, answer.text)
        assert arena.client.get(path).content == (data if result is None else result)


def test_arguments_that_only_the_tool_can_judge_are_told_like_those_of_the_schema(arena: Arena) -> None:
    for tool, arguments, name in (
        ("file_search", {"pattern": "a("}, "pattern"),
        ("file_read", {"path": "../a"}, "path"),
        ("shell_execute", {"command": "pwd", "cwd": "/etc"}, "cwd"),
        ("shell_execute", {"command": "pwd", "cwd": "a/../../b"}, "cwd"),
    ):
        answer = arena.call(tool, arguments)
        assert (answer.status_code, code_of(answer)) == (422, "invalid_arguments"), tool
        assert answer.json()["detail"]["errors"][0]["pointer"] == f"/arguments/{name}"
        assert ".. " not in answer.json()["detail"]["message"]
    assert code_of(arena.call("shell_execute", {"command": "pwd", "cwd": "missing"})) == "tool_failed"


def test_file_names_that_are_no_text_leave_every_answer_valid(arena: Arena) -> None:
    code = (
        "import os\nfor name in (b'\\xff\\xfe', b'new\\nline', b'\\x1b[31m', b'\"', b'\\xed\\xa0\\x80', b' ', b'-rf'):\n"
        "    open(b'odd' + name, 'w').write('needle')\nos.mkdir(b'dir\\xff'); open(b'dir\\xff/\\xfe', 'w').write('needle')"
    )
    assert arena.python(code).status_code == 200
    assert len(arena.request("GET", f"{arena.path}/files?path=").json()["entries"]) >= 8
    assert len(arena.call("file_search", {"pattern": "needle"}).json()["structured"]["matches"]) == 8
    assert arena.call("file_list", {"path": "."}).status_code == 200
    packed = arena.client.get(f"{arena.path}/archive")
    assert arena.request("PUT", f"{arena.path}/archive", content=packed.content).status_code == 200
