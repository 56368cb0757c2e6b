"""The file tools on a plain worker."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.workspace.worker_process import WorkerProcess

ODD_NAMES = (
    "été 世界 (1).txt",
    "a b (pick one).py",
    "x/y/z deep.txt",
    "semi;colon&'quote'.txt",
    "-dash.txt",
    "hash#and?mark%41.txt",
)
TEXT = "first\nzwei ü\n日本\n\ttab \\n 'quoted'\r\nno newline at the end"


@pytest.mark.parametrize("name", ODD_NAMES)
def test_what_is_written_is_read_whatever_the_name(worker: WorkerProcess, tmp_path: Path, name: str) -> None:
    written = worker.call("file_write", path=name, content=TEXT)
    assert written.end == "done"
    assert name in written.meta["workspace_changed"]
    assert (tmp_path / name).read_bytes() == TEXT.encode()
    assert worker.call("file_read", path=f"/workspace/{name}").structured["text"] == TEXT


def test_writing_keeps_the_mode_and_can_append(worker: WorkerProcess, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("old")
    (tmp_path / "run.sh").chmod(0o750)
    worker.call("file_write", path="run.sh", content="new\n")
    worker.call("file_write", path="run.sh", content="more\n", append=True)
    assert (tmp_path / "run.sh").read_text() == "new\nmore\n"
    assert (tmp_path / "run.sh").stat().st_mode & 0o777 == 0o750
    assert worker.call("file_write", path="empty", content="").end == "done"
    assert (tmp_path / "empty").read_bytes() == b""
    assert not list((tmp_path / ".toolcrib/incoming").iterdir())


def test_lines_of_a_long_file(worker: WorkerProcess, tmp_path: Path) -> None:
    (tmp_path / "long").write_text("".join(f"line-{n:05d}\n" for n in range(1, 60_001)))
    part = worker.call("file_read", path="long", start_line=1000, end_line=1050)
    assert part.structured["text"].split("\n")[:-1] == [f"line-{n:05d}" for n in range(1000, 1051)]
    assert part.structured["total_lines"] == 60_000
    whole = worker.call("file_read", path="long")
    assert whole.structured["truncated"] is True
    assert len(whole.text) < 70_000
    assert "go on with start_line=" in whole.text
    assert "there is no line" in worker.call("file_read", path="long", start_line=60_001).text
    assert worker.call("file_read", path="long", start_line=5, end_line=2).end == "invalid"


@pytest.mark.parametrize(("start", "end"), [(0, 5), (-1, 5), (1, 0), (10**12, None)])
def test_impossible_lines_are_invalid(worker: WorkerProcess, start: int, end: int | None) -> None:
    lines = {"start_line": start} | ({} if end is None else {"end_line": end})
    assert worker.call("file_read", path="x", **lines).end == "invalid"


def test_binary_sparse_and_odd_files(worker: WorkerProcess, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    assert worker.call("file_read", path="binary").structured["binary"] is True
    (tmp_path / "latin").write_bytes(b"caf\xe9\n")
    assert worker.call("file_read", path="latin").structured["text"] == "caf\\xe9\n"
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    assert "binary file of 1099511627776 bytes" in worker.call("file_read", path="sparse").text
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("fifo", "folder", "zero"):
        for tool, more in (
            ("file_read", {}),
            ("file_write", {"content": "x"}),
            ("file_edit", {"old_string": "a", "new_string": "b"}),
        ):
            outcome = worker.call(tool, path=name, **more)
            assert outcome.end == "invalid", (name, tool)
            assert outcome.meta["usage"]["wall_ms"] < 3000
    assert worker.call("file_read", path="missing.txt").end == "failed"
    assert "missing.txt" in worker.call("file_read", path="missing.txt").message
    assert worker.call("file_read", path="binary/below").end == "failed"
    assert worker.call("file_write", path="binary/below", content="x").end == "invalid"


@pytest.mark.parametrize(
    "path",
    [
        "../x",
        "a/../../x",
        "/etc/passwd",
        "/workspace/../etc/passwd",
        "/workspace-evil/x",
        "a\x00b",
        "a" * 300,
        "x/" * 2500 + "y",
        "\ud800",
    ],
)
def test_paths_out_of_the_workspace_are_invalid(worker: WorkerProcess, path: str) -> None:
    outcome = worker.call("file_read", path=path)
    assert outcome.end == "invalid"
    assert outcome.meta["errors"][0]["pointer"] == "/path"


def test_links_that_stay_inside_work(worker: WorkerProcess, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/real").write_text("real")
    (tmp_path / "d/up").symlink_to("../d/real")
    (tmp_path / "absolute").symlink_to("/workspace/d/real")
    (tmp_path / "folder").symlink_to("d")
    for name in ("d/up", "absolute", "folder/real"):
        assert worker.call("file_read", path=name).structured["text"] == "real"
    worker.call("file_write", path="d/up", content="through the link")
    assert (tmp_path / "d/real").read_text() == "through the link"
    assert (tmp_path / "d/up").is_symlink()
    assert worker.call("file_delete", path="absolute").end == "done"
    assert (tmp_path / "d/real").exists()


def test_an_edit_is_exact_and_refuses_none_and_many(worker: WorkerProcess, tmp_path: Path) -> None:
    text = b"one = 1\ntwo = 2\nthree = 3\n\xff\none = 1\ntwo = 2\nfour = '\xc3\xbc'\r\n"
    (tmp_path / "e.py").write_bytes(text)
    outcome = worker.call("file_edit", path="e.py", old_string="four = 'ü'", new_string="four = '$1 \\1 &'")
    changed = text.replace(b"four = '\xc3\xbc'", b"four = '$1 \\1 &'")
    assert outcome.structured == {"path": "e.py", "replaced": 1, "lines": [7]}
    assert (tmp_path / "e.py").read_bytes() == changed
    twice = worker.call("file_edit", path="e.py", old_string="one = 1\ntwo = 2", new_string="x")
    assert twice.end == "failed"
    assert "lines 1, 5" in twice.message
    spaced = worker.call("file_edit", path="e.py", old_string="three  =  3", new_string="x")
    assert "Line 3 is the same but for white space" in spaced.message
    near = worker.call("file_edit", path="e.py", old_string="three = 4", new_string="x")
    assert "nearest is line 3" in near.message
    assert worker.call("file_edit", path="e.py", old_string="not in there at all", new_string="x").end == "failed"
    assert (tmp_path / "e.py").read_bytes() == changed
    everywhere = worker.call("file_edit", path="e.py", old_string="two = 2", new_string="", replace_all=True)
    assert everywhere.structured["lines"] == [2, 6]
    assert worker.call("file_edit", path="e.py", old_string="", new_string="x").end == "invalid"


def test_listing_searching_moving_deleting(worker: WorkerProcess, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/needle_xyz.txt").write_text("hay\nneedle_xyz here\n")
    (tmp_path / "d/other.txt").write_text("hay\n")
    (tmp_path / "top.md").write_text("# top\n")
    listed = worker.call("file_list")
    assert [(e["name"], e["kind"]) for e in listed.structured["entries"]] == [("d", "dir"), ("top.md", "file")]
    deep = worker.call("file_list", recursive=True).structured["entries"]
    assert [e["name"] for e in deep] == ["d", "d/needle_xyz.txt", "d/other.txt", "top.md"]
    found = worker.call("file_search", pattern="needle_xyz")
    assert found.structured["matches"] == [
        {"path": "d/needle_xyz.txt"},
        {"path": "d/needle_xyz.txt", "line": 2, "text": "needle_xyz here"},
    ]
    assert (
        worker.call("file_search", pattern="^HAY$", ignore_case=True, glob="*other*").structured["matches"][0]["path"]
        == "d/other.txt"
    )
    assert "no match" in worker.call("file_search", pattern="absent").text
    assert worker.call("file_search", pattern="hay", limit=1).structured["truncated"] is True
    assert worker.call("file_search", pattern="(").end == "invalid"
    assert worker.call("file_search", pattern="x", path="missing").end == "failed"
    moved = worker.call("file_move", source="top.md", destination="new/place/name.md")
    assert moved.meta["workspace_changed"] == ["new", "new/place", "new/place/name.md", "top.md"]
    assert worker.call("file_move", source="d/other.txt", destination="new/place/name.md").end == "failed"
    assert worker.call("file_move", source="d/other.txt", destination="new/place/name.md", overwrite=True).end == "done"
    assert worker.call("file_move", source="d", destination="d/inside").end == "invalid"
    assert worker.call("file_move", source="missing", destination="x").end == "failed"
    assert worker.call("file_delete", path="new").end == "failed"
    assert worker.call("file_delete", path="new", recursive=True).end == "done"
    assert not (tmp_path / "new").exists()
    assert worker.call("file_delete", path=".").end == "invalid"
    assert worker.call("file_delete", path="missing").end == "failed"


def test_a_search_that_runs_away_can_be_stopped(worker: WorkerProcess, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a" * 60 + "!")
    assert worker.call("file_search", pattern="(a+)+$", deadline_s=0.5).end == "deadline"
    assert worker.call("file_search", pattern="a!").end == "done"


def test_reading_changes_nothing(worker: WorkerProcess, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    for tool, arguments in (("file_read", {"path": "f"}), ("file_list", {}), ("file_search", {"pattern": "x"})):
        assert worker.call(tool, **arguments).meta["workspace_changed"] == []
