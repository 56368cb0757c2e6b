"""Snapshots and restores of a workspace whose own code works against them."""

from __future__ import annotations

import re
import shlex
import time
from typing import Any

import pytest

from tests.abuse.arena import Arena

SWAP = """
import os, ctypes
libc = ctypes.CDLL(None)
def swap(a, b):
    libc.renameat2(-100, a.encode(), -100, b.encode(), 2)
while True:
    swap('d', 'out'); swap('d', 'out')
    swap('f', 'link'); swap('f', 'link')
"""
GROW = """
import time
while True:
    open('log', 'a').write('a line of the log' * 100)
    time.sleep(0.001)
"""


def post(arena: Arena, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    answer = arena.request("POST", f"{arena.path}/{path}", json=body, timeout=120)
    return answer.status_code, answer.json()


def begin(arena: Arena, code: str) -> str:
    """A background job of the sandbox; its id."""
    answer = arena.call("shell_execute", {"command": f"exec python3 -c {shlex.quote(code)}", "background": True})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["structured"]["job_id"])


def stop(arena: Arena, job: str) -> None:
    answer = arena.call("shell_kill", {"job_id": job, "force": True})
    assert answer.status_code == 200, answer.text


def test_links_and_folders_that_are_swapped_lead_nowhere(arena: Arena) -> None:
    """What the links point to is neither read into a snapshot nor written to by a restore."""
    made = (
        "import os\nos.makedirs('d/sub', exist_ok=True)\nfor n in range(40):\n    open(f'd/sub/f{n}', 'w').write('inside')\n"
        "open('f', 'w').write('inside')\nos.symlink('/etc', 'out'); os.symlink('/etc/passwd', 'link')"
    )
    assert arena.python(made).status_code == 200
    status, calm = post(arena, "snapshots", {})
    assert status == 201
    job = begin(arena, SWAP)
    until = time.monotonic() + 6
    taken: list[str] = []
    while time.monotonic() < until:
        status, body = post(arena, "snapshots", {})
        assert status in (201, 503), body
        if status == 201:
            taken.append(body["snapshot_id"])
        status, body = post(arena, "restore", {"snapshot_id": calm["snapshot_id"]})
        assert status in (200, 503, 429), body
    stop(arena, job)
    for one in taken:
        told = arena.request("GET", f"{arena.path}/diff?from={calm['snapshot_id']}&to={one}").json()
        paths = [entry["path"] for kind in ("added", "removed", "changed") for entry in told[kind]]
        assert all(re.fullmatch(r"(d|out)(/sub(/f\d+)?)?|f|link", path) for path in paths), (
            f"something of /etc: {paths}"
        )
    status, body = post(arena, "restore", {"snapshot_id": calm["snapshot_id"]})
    assert (status, body.get("exact")) == (200, True), body


def test_a_file_that_grows_all_the_time_does_not_stop_a_snapshot(arena: Arena) -> None:
    job = begin(arena, GROW)
    until = time.monotonic() + 30
    while arena.client.get(f"{arena.path}/files/log").status_code != 200:
        assert time.monotonic() < until
        time.sleep(0.1)
    for _ in range(3):
        status, body = post(arena, "snapshots", {})
        assert status == 201, body
        assert body["files"] == 1
    status, restored = post(arena, "restore", {"snapshot_id": body["snapshot_id"]})
    assert status == 200
    assert (restored["exact"], restored["differs"]) in ((False, ["log"]), (True, []))
    stop(arena, job)
    assert post(arena, "restore", {"snapshot_id": body["snapshot_id"]})[1]["exact"]


@pytest.mark.parametrize("arena", [{"memory_mb": 512}], indirect=True, ids=["memory"])
def test_twenty_thousand_files(arena: Arena) -> None:
    code = "import os\nfor n in range(20000):\n    if n % 1000 == 0:\n        os.mkdir(f'd{n // 1000}')\n    open(f'd{n // 1000}/{n}', 'w').close()"
    assert arena.python(code, deadline_s=100, wait_s=110).status_code == 200
    status, body = post(arena, "snapshots", {})
    assert (status, body["files"]) == (201, 20_000)
    assert (
        arena.python(
            "import shutil\nfor n in range(10):\n    shutil.rmtree(f'd{n}')", deadline_s=60, wait_s=60
        ).status_code
        == 200
    )
    status, restored = post(arena, "restore", {"snapshot_id": body["snapshot_id"]})
    assert (status, restored["exact"], restored["removed"]) == (200, True, 0)


def test_a_workspace_that_breaks_our_own_folder_is_restored_all_the_same(arena: Arena) -> None:
    assert arena.python("open('f', 'w').write('x')").status_code == 200
    status, body = post(arena, "snapshots", {})
    assert status == 201
    for harm in (
        "os.symlink('/etc', '.toolcrib')",
        "open('.toolcrib', 'w').write('x')",
        "os.mkdir('.toolcrib'); os.symlink('/etc', '.toolcrib/incoming')",
    ):
        code = f"import os, shutil\nshutil.rmtree('.toolcrib') if os.path.isdir('.toolcrib') and not os.path.islink('.toolcrib') else os.path.lexists('.toolcrib') and os.remove('.toolcrib')\n{harm}\nopen('f', 'w').write('changed')"
        assert arena.python(code).status_code == 200
        status, restored = post(arena, "restore", {"snapshot_id": body["snapshot_id"]})
        assert (status, restored.get("exact")) == (200, True), restored
