"""Snapshots of a tree: exact, cheap the second time, put back from any state."""

from __future__ import annotations

import errno
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandbox_images.base.mcp_stdio import ProtocolError
from sandbox_images.workspace import snapshot_scan, snapshot_tree
from sandbox_images.workspace.snapshot_manifest import CHUNK_BYTES, order, parse
from tests.unit.workspace.trees import Place, Shelf, finish, on_disk


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its sandbox a worker sees the sandbox's processes; here it would see the machine's."""
    monkeypatch.setattr(snapshot_tree, "other_processes", list)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    (tmp_path / "ws").mkdir()
    made = Place(tmp_path / "ws")
    yield made
    made.close()


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def odd_tree(root: Path) -> None:
    top = os.fsencode(root)
    (root / "d/empty").mkdir(parents=True)
    (root / "d/run.sh").write_text("echo hi\n")
    (root / "d/run.sh").chmod(0o755)
    (root / "secret").write_text("s")
    (root / "secret").chmod(0o600)
    (root / "nothing").write_bytes(b"")
    (root / "zeros").write_bytes(bytes(10))
    (root / "big").write_bytes(os.urandom(3 * CHUNK_BYTES + 17))
    for name, target in (
        ("rel", "d/run.sh"),
        ("dangling", "no\nwhere\\at all"),
        ("abs", "/etc/passwd"),
        ("up", "../.."),
    ):
        (root / name).symlink_to(target)
    for raw in (
        b"-rf",
        b"new\nline",
        b"back\\slash\\n",
        b"\xff\xfe raw",
        "ü".encode(),
        b"n" * 255,
        b" ",
        b"*",
        b"a b",
    ):
        with open(os.path.join(top, raw), "wb") as file:
            file.write(raw)
    (root / "repo/.git/objects/ab").mkdir(parents=True)
    (root / "repo/.git/HEAD").write_text("ref: refs/heads/main\n")
    (root / "repo/.git/objects/ab/cdef").write_bytes(os.urandom(99))
    (root / "repo/.git/objects/ab/cdef").chmod(0o444)
    (root / "d/empty").chmod(0o1777)
    (root / "setgid").mkdir()
    (root / "setgid").chmod(0o2755)
    (root / "deep").mkdir()
    folder = os.open(root / "deep", os.O_RDONLY)
    for _ in range(40):  # 6,000 bytes of path: more than one call may name
        os.mkdir("x" * 150, dir_fd=folder)
        below = os.open("x" * 150, os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder)
        os.close(folder)
        folder = below
    fd = os.open("bottom", os.O_WRONLY | os.O_CREAT, 0o640, dir_fd=folder)
    os.write(fd, b"deep")
    os.close(fd)
    os.close(folder)
    (root / "shut").mkdir()
    (root / "shut/inner").mkdir()
    (root / "shut/inner/f").write_text("x")
    (root / "shut/inner/f").chmod(0)
    (root / "shut/inner").chmod(0o000)
    (root / "shut").chmod(0o500)


def wreck(root: Path) -> None:
    for entry in list(root.iterdir()):
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def lines_of(lines: list[bytes]) -> list[bytes]:
    return [parse(line).path for line in lines]


def test_an_odd_tree_comes_back_exactly(place: Place, shelf: Shelf, tmp_path: Path) -> None:
    odd_tree(place.root)
    before = on_disk(place.root)
    lines = shelf.take(place)
    assert on_disk(place.root) == before, "a snapshot changes nothing"
    paths = lines_of(lines)
    assert paths == sorted(paths, key=order)
    wreck(place.root)
    assert shelf.put(place, lines)["exact"]
    assert on_disk(place.root) == before
    assert shelf.take(place) == lines
    other = tmp_path / "other"
    other.mkdir()
    fork = Place(other)
    assert shelf.put(fork, lines)["exact"]
    assert on_disk(fork.root) == before
    fork.close()
    assert list((place.root / ".toolcrib/incoming").iterdir()) == []


def test_only_what_changed_is_read_and_written(place: Place, shelf: Shelf) -> None:
    for number in range(200):
        (place.root / f"f{number}").write_bytes(os.urandom(1000))
        os.utime(place.root / f"f{number}")
    time.sleep(0.1)
    lines = shelf.take(place)
    assert place.last.read_bytes == 200_000
    assert shelf.take(place) == lines
    assert place.last.read_bytes == 0
    (place.root / "f7").write_bytes(b"x" * 1000)
    stat = (place.root / "f8").stat()
    (place.root / "f8").write_bytes(b"y" * 1000)
    os.utime(place.root / "f8", ns=(stat.st_atime_ns, stat.st_mtime_ns))  # the forged time of an unchanged file
    assert shelf.take(place) != lines
    assert place.last.read_bytes == 2000
    untouched = (place.root / "f9").stat()
    done = shelf.put(place, lines)
    assert (done["exact"], done["written"], done["removed"], shelf.sent) == (True, 2, 0, 2)
    assert (place.root / "f9").stat() == untouched
    assert shelf.take(place) == lines


def test_a_change_within_the_tick_of_the_clock_is_seen(place: Place, shelf: Shelf) -> None:
    file = place.root / "f"
    file.write_bytes(b"0" * 100)
    last = shelf.take(place)
    for number in range(1, 60):
        with file.open("r+b") as opened:
            opened.write(b"%02d" % number)
        os.utime(file, ns=(1, 1))
        now = shelf.take(place)
        assert now != last, number
        last = now


def test_a_store_through_a_mapping_is_seen(place: Place, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """No time of the file moves with it. The scan looks at other processes' mappings, so another one holds this."""
    file = place.root / "f"
    file.write_bytes(bytes(range(256)) * 16)
    code = (
        "import mmap, sys\n"
        f"with open({str(file)!r}, 'r+b') as opened, mmap.mmap(opened.fileno(), 0) as mapped:\n"
        "    for number in range(3):\n"
        "        mapped[0] = number + 65\n"
        "        print(number, flush=True)\n"
        "        sys.stdin.readline()\n"
    )
    command = [sys.executable, "-I", "-S", "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        monkeypatch.setattr(snapshot_tree, "other_processes", lambda: [str(process.pid)])
        try:
            last: list[bytes] = []
            for number in range(3):
                process.stdout.readline()
                time.sleep(0.12)
                now = shelf.take(place)
                assert now != last, number
                last = now
                process.stdin.write(b"\n")
                process.stdin.flush()
        finally:
            process.kill()


@pytest.mark.parametrize("pids", [["1"], ["999999999"]])
def test_mappings_that_can_not_be_looked_at_mean_that_all_is_read(
    place: Place, shelf: Shelf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pids: list[str]
) -> None:
    (place.root / "f").write_bytes(b"x" * 100)
    time.sleep(0.1)
    monkeypatch.setattr(snapshot_tree, "other_processes", lambda: pids)
    shelf.take(place)
    monkeypatch.setattr(
        snapshot_scan, "shared_mappings", lambda: None if pids == ["1"] else snapshot_tree.shared_mappings()
    )
    shelf.take(place)
    assert place.last.read_bytes == (100 if pids == ["1"] else 0)


def test_a_file_that_shrinks_while_it_is_read_is_not_left_out_in_silence(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = place.root / "f"
    file.write_bytes(b"x" * 1000)
    read = os.pread

    def shrinking(fd: int, length: int, offset: int) -> bytes:
        os.truncate(file, file.stat().st_size - 1)
        return read(fd, length, offset)

    monkeypatch.setattr(os, "pread", shrinking)
    with pytest.raises(ProtocolError) as told:
        finish(snapshot_scan.scan(place.workspace, place.known, max_bytes=1 << 30, full=False))
    assert told.value.kind == "changing"


def test_moved_content_is_found_in_the_workspace(place: Place, shelf: Shelf) -> None:
    (place.root / "a").mkdir()
    (place.root / "a/big").write_bytes(os.urandom(3 * CHUNK_BYTES))
    lines = shelf.take(place)
    (place.root / "a").rename(place.root / "b")
    assert shelf.put(place, lines)["exact"]
    assert shelf.sent == 0
    assert [p.name for p in place.root.iterdir() if p.name != ".toolcrib"] == ["a"]
    with (place.root / "a/big").open("r+b") as file:
        file.seek(CHUNK_BYTES + 5)
        file.write(b"changed")
    assert shelf.put(place, lines)["exact"]
    assert shelf.sent == 1  # one piece of three


def test_holes_cost_nothing_and_stay_holes(place: Place, shelf: Shelf) -> None:
    file = place.root / "sparse"
    with file.open("wb") as opened:
        opened.truncate(1 << 40)
        opened.seek(1 << 39)
        opened.write(b"in the middle")
    begun = time.monotonic()
    lines = shelf.take(place)
    assert time.monotonic() - begun < 5
    assert place.last.read_bytes <= 2 * CHUNK_BYTES
    file.unlink()
    assert shelf.put(place, lines)["exact"]
    assert file.stat().st_size == 1 << 40
    assert file.stat().st_blocks * 512 < 1 << 20
    dense = place.root / "dense"
    dense.write_bytes(bytes(1 << 20) + b"x" + bytes(1 << 20))
    holes = place.root / "holes"
    with holes.open("wb") as opened:
        opened.truncate((2 << 20) + 1)
        opened.seek(1 << 20)
        opened.write(b"x")
    contents = {parse(line).path: parse(line).content for line in shelf.take(place)}
    assert contents[b"dense"] == contents[b"holes"], "the same bytes, with holes or without"


def test_what_is_no_file_is_left_out_told_and_removed_by_a_restore(place: Place, shelf: Shelf) -> None:
    os.mkfifo(place.root / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        folder = os.getcwd()
        os.chdir(place.root)
        listener.bind("sock")
        os.chdir(folder)
    (place.root / "f").write_text("x")
    os.link(place.root / "f", place.root / "hard")
    lines = shelf.take(place)
    assert lines_of(lines) == [b"f", b"hard"]
    assert [(e.path, e.target) for e in map(parse, place.last.left_out)] == [(b"fifo", b"fifo"), (b"sock", b"socket")]
    assert shelf.put(place, lines)["exact"]
    assert sorted(on_disk(place.root)) == [b"f", b"hard"]


@pytest.mark.parametrize("limit", ["entries", "bytes", "manifest"])
def test_what_is_too_much_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    for number in range(20):
        (place.root / f"f{number}").write_bytes(os.urandom(10_000))
    monkeypatch.setattr(snapshot_scan, "MAX_ENTRIES", 10 if limit == "entries" else 100)
    monkeypatch.setattr(snapshot_scan, "MAX_MANIFEST_BYTES", 500 if limit == "manifest" else 1 << 20)
    with pytest.raises(ProtocolError) as told:
        finish(
            snapshot_scan.scan(
                place.workspace, place.known, max_bytes=50_000 if limit == "bytes" else 1 << 30, full=False
            )
        )
    assert told.value.kind == "too_large"


def test_a_restore_that_does_not_fit_changes_nothing(place: Place, shelf: Shelf) -> None:
    for number in range(4):
        (place.root / f"big{number}").write_bytes(os.urandom(1 << 20))
    lines = shelf.take(place)
    for number in range(4):
        (place.root / f"big{number}").unlink()
    (place.root / "now").write_text("now")
    before = on_disk(place.root)
    place.quota.limit_bytes = 3 << 20
    with pytest.raises(ProtocolError) as told:
        shelf.put(place, lines)
    assert (told.value.kind, on_disk(place.root)) == ("too_large", before)
    assert list((place.root / ".toolcrib/incoming").iterdir()) == []
    place.quota.limit_bytes = 5 << 20
    assert shelf.put(place, lines)["exact"], "what it replaces makes room"


@pytest.mark.parametrize("call", ["mkdir", "symlink", "ftruncate", "rename"])
def test_a_disk_that_is_full_in_the_middle_of_a_restore_is_told_as_far_as_it_came(
    place: Place, shelf: Shelf, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    (place.root / "folder").mkdir()
    (place.root / "link").symlink_to("folder")
    (place.root / "file").write_text("then")
    lines = shelf.take(place)
    (place.root / "folder").rmdir()
    (place.root / "link").unlink()
    (place.root / "file").write_text("now, longer")
    before = on_disk(place.root)
    real = getattr(os, call)
    calls = 0

    def full(*given: Any, **more: Any) -> Any:
        nonlocal calls
        ours = call not in ("mkdir", "rename") or str(given[0]).startswith(("other-", "0"))
        calls += ours
        if ours and calls == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*given, **more)

    monkeypatch.setattr(os, call, full)
    with pytest.raises(ProtocolError) as told:
        shelf.put(place, lines)
    assert calls
    assert told.value.kind == ("incomplete" if call == "rename" else "too_large")
    assert call == "rename" or on_disk(place.root) == before
    assert shelf.put(place, lines)["exact"]
    assert list((place.root / ".toolcrib/incoming").iterdir()) == []


def test_a_wrong_piece_is_refused_before_anything_changes(place: Place, shelf: Shelf) -> None:
    (place.root / "f").write_bytes(b"right")
    lines = shelf.take(place)
    (place.root / "f").write_bytes(b"now")
    shelf.blobs = dict.fromkeys(shelf.blobs, b"wrong")
    with pytest.raises(ProtocolError) as told:
        shelf.put(place, lines)
    assert told.value.kind == "bad_archive"
    assert (place.root / "f").read_bytes() == b"now"


@pytest.mark.parametrize(
    "line",
    [
        b"f\0644\0005\x001\0../evil\n", b"d\x00755\0/evil\n", b"l\0/etc\0a/../b\n", b"f\x00644\x005\0" + b"0" * 64 + b"*9\0evil\n",
        b"f\x00644\x00-1\0\0evil\n", b"d\x0099999\0evil\n", b"x\0y\n", b"\n", b"d\x00755\0" + b"n" * 256 + b"\n", b"f\x00644\x005\0\0evil\n",
    ],
)  # fmt: skip
def test_a_manifest_that_no_scan_makes_is_refused(place: Place, shelf: Shelf, line: bytes) -> None:
    with pytest.raises(ProtocolError) as told:
        shelf.put(place, [line])
    assert told.value.kind == "bad_archive"
    assert on_disk(place.root) == {}


NAMES = st.sampled_from([b"a", b"b", b"c", b"a-", b"\xff", b"x\ny", b"\\n", b".git", b"-f"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(b"/".join)
CHANGES: st.SearchStrategy[list[tuple[str, bytes, Any]]] = st.lists(
    st.one_of(
        st.tuples(st.just("file"), PATHS, st.sampled_from([b"", b"one", b"two", bytes(5000), b"l" * (CHUNK_BYTES + 1)])),
        st.tuples(st.just("dir"), PATHS, st.none()),
        st.tuples(st.just("link"), PATHS, st.sampled_from([b"a", b"/nowhere/x", b"../nowhere/y", b"a\nb"])),
        st.tuples(st.just("fifo"), PATHS, st.none()),
        st.tuples(st.just("chmod"), PATHS, st.sampled_from([0o600, 0o755, 0o444, 0o500, 0o000, 0o1777])),
        st.tuples(st.just("remove"), PATHS, st.none()),
        st.tuples(st.just("move"), PATHS, PATHS),
    ),
    max_size=14,
)  # fmt: skip


def change(root: Path, changes: list[tuple[str, bytes, Any]]) -> None:
    """Whatever of these can be done is done."""
    top = os.fsencode(root)
    for what, name, more in changes:
        path = os.path.join(top, name)
        try:
            if what in ("file", "dir", "link", "fifo"):
                os.makedirs(os.path.dirname(path), exist_ok=True)
            if what == "file":
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
                with open(os.open(path, flags, 0o644), "wb") as file:
                    file.write(more)
            elif what == "dir":
                os.mkdir(path)
            elif what == "link":
                os.symlink(more, path)
            elif what == "fifo":
                os.mkfifo(path)
            elif what == "chmod":
                os.chmod(path, more) if not os.path.islink(path) else None
            elif what == "move":
                os.rename(path, os.path.join(top, more))
            else:
                os.remove(path) if not os.path.isdir(path) or os.path.islink(path) else shutil.rmtree(path)
        except OSError:
            continue


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(first=CHANGES, second=CHANGES, third=CHANGES)
def test_any_state_is_restored_to_any_snapshot(tmp_path: Path, first: list[tuple[str, bytes, Any]], second: list[tuple[str, bytes, Any]], third: list[tuple[str, bytes, Any]]) -> None:  # fmt: skip
    root = tmp_path / f"ws{random.getrandbits(60)}"
    root.mkdir()
    place, shelf = Place(root), Shelf()
    try:
        taken = []
        for changes in (first, second, third):
            change(root, changes)
            lines = shelf.take(place)
            tree = {path: told for path, told in on_disk(root).items() if told[0] != "other"}
            assert sorted(lines_of(lines)) == sorted(tree)
            taken.append((lines, tree))
        for number in (0, 2, 1, 0, 1, 2):
            lines, tree = taken[number]
            assert shelf.put(place, lines)["exact"]
            assert on_disk(root) == tree
    finally:
        place.close()
        shutil.rmtree(root)
