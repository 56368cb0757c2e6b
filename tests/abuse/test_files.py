"""Hostile paths, links, archives and sizes."""

from __future__ import annotations

import io
import shlex
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import httpx
import pytest

from tests.abuse.arena import Arena, code_of

LINKS = "import os\nos.symlink('/etc/passwd', 'link')\nos.symlink('/', 'all')\nos.symlink('../../etc', 'up')\nos.mkdir('dir')\nos.mkfifo('pipe')\nos.symlink('/dev/zero', 'zero')\nos.symlink('loop', 'loop')"
PATHS = [
    "../../etc/passwd",
    "/etc/passwd",
    "a/../../x",
    "a\x00b",
    "x" * 5000,
    "/workspace-evil/x",
    "link",
    "all/etc/passwd",
    "up/passwd",
    "loop",
    "x/" * 3000 + "y",
]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: repr(path[:20]))
@pytest.mark.parametrize("tool", ["file_read", "file_write", "file_delete", "file_list"])
def test_no_path_leads_out_through_a_tool(arena: Arena, tool: str, path: str) -> None:
    arena.python(LINKS)
    arguments = {"path": path} | ({"content": "evil"} if tool == "file_write" else {})
    answer = arena.call(tool, arguments)
    if tool == "file_delete" and path in ("link", "loop"):
        assert answer.status_code in (200, 422, 500)  # the link itself may go, never what it names
    elif tool == "file_write" and path in ("link", "loop") and answer.status_code == 200:
        assert arena.call("file_read", {"path": path}).status_code == 200  # replaced by a plain file of the workspace
    else:
        assert answer.status_code in (404, 422, 500), answer.text
        assert code_of(answer) in ("invalid_arguments", "tool_failed", "policy_denied", "file_not_found")
    assert "sandbox:x:" not in answer.text
    assert "sandbox:x:" in arena.python("open('/etc/passwd').read()").text


@pytest.mark.parametrize("path", PATHS, ids=lambda path: repr(path[:20]))
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_no_path_leads_out_through_the_files_api(arena: Arena, method: str, path: str) -> None:
    arena.python(LINKS)
    answer = arena.request(
        method, f"{arena.path}/files/{quote(path, safe='')}", content=b"evil" if method == "PUT" else None
    )
    if answer.status_code < 300:
        assert path in ("link", "loop")
        assert method != "GET"
    else:
        assert answer.status_code in (404, 413, 414, 422), answer.text
    assert b"sandbox:x:" not in answer.content
    assert "sandbox:x:" in arena.python("open('/etc/passwd').read()").text


@pytest.mark.parametrize("path", ["pipe", "zero", "dir"])
def test_what_is_no_plain_file_is_refused_at_once(arena: Arena, path: str) -> None:
    arena.python(LINKS)
    begun = time.monotonic()
    assert code_of(arena.call("file_read", {"path": path})) in ("tool_failed", "invalid_arguments")
    answer = arena.request("GET", f"{arena.path}/files/{path}")
    assert 400 <= answer.status_code < 500
    assert time.monotonic() - begun < 3


RACE_S = 10
RACE = f"""
import ctypes, os, time
os.makedirs('/tmp/out', exist_ok=True); os.makedirs('real', exist_ok=True)
open('/tmp/out/f', 'w').write('outside-canary'); open('real/f', 'w').write('inside')
os.symlink('/tmp/out', 'evil')
libc, until, swaps = ctypes.CDLL(None), time.time() + {RACE_S}, 0
while time.time() < until:
    libc.renameat2(-100, b'real', -100, b'evil', 2); swaps += 1
print(swaps, sorted(os.listdir('/tmp/out')), open('/tmp/out/f').read())
"""


def test_a_race_of_renames_never_leads_out(arena: Arena) -> None:
    """The folder and a link to a place where the worker may write are exchanged while files are asked for in every way."""
    up = _tar(("real/unpacked", b"evil", {}))

    def ask(number: int) -> httpx.Response:
        path, kind = f"{arena.path}/files/real", number % 8
        with arena.server.client() as client:
            if kind == 0:
                return client.put(f"{path}/made{number}", content=b"evil")
            if kind == 1:
                return client.delete(f"{path}/f")
            if kind == 2:
                return client.get(f"{arena.path}/archive")
            if kind == 3:
                return client.put(f"{arena.path}/archive", content=up)
            if kind == 4:
                return client.get(f"{arena.path}/files", params={"path": "real"})
            if kind == 5:
                body = {"arguments": {"path": f"real/tool{number}", "content": "evil"}}
                return client.post(f"{arena.path}/tools/file_write", json=body)
            return client.get(f"{path}/f")

    with ThreadPoolExecutor(4) as pool:
        racing = pool.submit(arena.shell, f"python3 -c {shlex.quote(RACE)}", deadline_s=60, wait_s=80)
        time.sleep(0.5)
        asked = 0
        while not racing.done():
            for answer in pool.map(ask, range(asked, asked + 24)):
                assert b"outside-canary" not in answer.content
                assert answer.status_code in (200, 201, 204, 404, 409, 413, 422, 500), answer.text
                if answer.status_code == 500:
                    assert code_of(answer) == "tool_failed", answer.text
            asked += 24
        told = racing.result().json()["structured"]["stdout"]
    assert told.strip().endswith("['f'] outside-canary"), told
    assert int(told.split()[0]) > 1000
    assert asked >= 48


def _tar(*members: tuple[str, bytes, dict[str, object]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content, fields in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            for field, value in fields.items():
                setattr(info, field, value)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


GOOD: tuple[str, bytes, dict[str, object]] = ("good.txt", b"good", {})
ARCHIVES = {
    "dots": _tar(GOOD, ("../evil", b"x", {})),
    "many dots": _tar(GOOD, ("a/../../../tmp/evil", b"x", {})),
    "absolute": _tar(GOOD, ("/tmp/evil", b"x", {})),
    "through a link": _tar(GOOD, ("sl", b"", {"type": tarfile.SYMTYPE, "linkname": "/tmp"}), ("sl/evil", b"x", {})),
    "hard link": _tar(GOOD, ("hl", b"", {"type": tarfile.LNKTYPE, "linkname": "/etc/passwd"})),
    "device": _tar(GOOD, ("dev", b"", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3})),
    "fifo": _tar(GOOD, ("pipe", b"", {"type": tarfile.FIFOTYPE})),
    "no archive": b"this is no archive" * 1000,
    "cut": _tar(GOOD, ("big", b"x" * 50_000, {}))[:20_000],
    "compressed": b"\x1f\x8b\x08\x00" + b"\x00" * 100,
}


@pytest.mark.parametrize("body", ARCHIVES.values(), ids=ARCHIVES.keys())
def test_of_a_bad_archive_nothing_is_unpacked(arena: Arena, body: bytes) -> None:
    answer = arena.request("PUT", f"{arena.path}/archive", content=body)
    assert (answer.status_code, code_of(answer)) == (422, "invalid_arguments"), answer.text
    assert arena.request("GET", f"{arena.path}/files/good.txt").status_code == 404
    assert "evil" not in arena.python("import os; os.listdir('/tmp') + os.listdir('/')").text


def test_setuid_bits_do_not_come_in(arena: Arena) -> None:
    assert (
        arena.request(
            "PUT", f"{arena.path}/archive", content=_tar(("suid", b"#!/bin/sh\n", {"mode": 0o6755}))
        ).status_code
        < 300
    )
    assert arena.python("import os; oct(os.stat('suid').st_mode & 0o7777)").json()["structured"]["result"] == "'0o755'"


@pytest.mark.parametrize("arena", [{"disk_mb": 32}], indirect=True)
def test_uploads_and_archives_past_the_quota_are_refused(arena: Arena) -> None:
    up = arena.request("PUT", f"{arena.path}/files/big", content=bytes(40 << 20))
    assert (up.status_code, code_of(up)) in ((413, "too_large"), (500, "disk_full"))
    archive = arena.request("PUT", f"{arena.path}/archive", content=_tar(("big", bytes(40 << 20), {})))
    assert (archive.status_code, code_of(archive)) in ((413, "too_large"), (500, "disk_full"))
    assert arena.request("GET", f"{arena.path}/files/big").status_code == 404


@pytest.mark.parametrize(
    "name", ["../../evil", "a b (pick one).py", "-rf", "sémi;colon&'quote'", "${HOME}", "a\\b", "con:x"]
)
def test_a_name_out_of_a_models_text_is_literal_or_refused(arena: Arena, name: str) -> None:
    answer = arena.call("file_write", {"path": name, "content": "x = 1\n"})
    if answer.status_code != 200:
        assert code_of(answer) in ("invalid_arguments", "tool_failed")
        assert name.startswith("..")
    else:
        assert arena.request("GET", f"{arena.path}/files/{quote(name, safe='')}").content == b"x = 1\n"


def test_an_upload_belongs_to_the_sandbox_user(arena: Arena) -> None:
    arena.request("PUT", f"{arena.path}/files/data.csv", content=b"a\n").raise_for_status()
    answer = arena.python(
        "import os\nopen('data.csv', 'a').write('b\\n')\nos.chmod('data.csv', 0o600)\nos.stat('data.csv').st_uid == os.getuid()"
    )
    assert answer.json()["structured"]["result"] == "True"


def test_a_huge_sparse_file_is_read_in_part(arena: Arena) -> None:
    arena.shell("truncate -s 20M sparse && truncate -s 400G sparse || true")
    answer = arena.call("file_read", {"path": "sparse"})
    assert answer.status_code in (200, 500)
    part = arena.request("GET", f"{arena.path}/files/sparse", headers={"Range": "bytes=1000-1009"})
    assert part.status_code == 206
    assert part.content == bytes(10)


@pytest.mark.parametrize("line", [-1, 0, 10**12])
def test_impossible_line_numbers_are_422_or_an_empty_part(arena: Arena, line: int) -> None:
    arena.call("file_write", {"path": "a.txt", "content": "one\n"})
    answer = arena.call("file_read", {"path": "a.txt", "start_line": line})
    assert answer.status_code in (200, 422, 500)
    assert code_of(answer) in ("", "invalid_arguments", "tool_failed")
    assert line > 0 or code_of(answer) == "invalid_arguments"


def test_a_listing_of_very_many_files_is_bounded(arena: Arena) -> None:
    assert (
        arena.python(
            "import os\nos.mkdir('many')\nfor n in range(30000): open(f'many/{n}', 'w').close()", deadline_s=60
        ).status_code
        == 200
    )
    begun = time.monotonic()
    listing = arena.request("GET", f"{arena.path}/files?path=many")
    assert listing.status_code == 200
    assert listing.json()["truncated"] is True
    assert arena.call("file_list", {"path": "many"}).status_code == 200
    assert time.monotonic() - begun < 6


def test_a_catastrophic_search_pattern_ends(arena: Arena) -> None:
    arena.call("file_write", {"path": "a.txt", "content": "a" * 40 + "!\n"})
    begun = time.monotonic()
    answer = arena.call("file_search", {"pattern": "(a+)+$"}, deadline_s=4)
    assert answer.status_code in (200, 450, 500)
    assert time.monotonic() - begun < 12


def test_closing_a_session_that_writes_leaves_nothing(arena: Arena) -> None:
    with arena.server.client() as client:
        session = client.post("/v1/sessions", json={"ttl_s": 60}).json()["id"]
        code = "import time\nfor n in range(600): open(f'f{n}', 'w').write('x'); time.sleep(0.02)"
        box: list[int] = []
        runner = threading.Thread(
            target=lambda: box.append(
                arena.client.post(
                    f"/v1/sessions/{session}/tools/python_execute", json={"arguments": {"code": code}}
                ).status_code
            )
        )
        runner.start()
        time.sleep(1.5)
        assert client.delete(f"/v1/sessions/{session}").status_code == 204
        runner.join(15)
        assert box
        assert box[0] in (410, 500)
        arena.server.wait_no_leftovers(session)
