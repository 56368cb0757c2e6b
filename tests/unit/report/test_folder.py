from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from agent.events import EventKind
from agent.report import artifacts, folder
from agent.report.pictures import MAX_PICTURE_BYTES, Album
from agent.report.story import tell
from tests.unit.report.journal_example import Script, full_run, png


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    workspace = tmp_path / folder.WORKSPACE
    workspace.mkdir()
    (workspace / "chart.png").write_bytes(png())
    (workspace / "clean.csv").write_text("a,b\n")
    (workspace / "data.csv").write_text("raw")
    return tmp_path


def test_all_four_files_are_written_and_agree(run_folder: Path) -> None:
    result = folder.write(run_folder, full_run(answer="It is **fine**."))
    assert json.loads((run_folder / "result.json").read_text()) == result
    assert json.loads((run_folder / "artifacts.json").read_text()) == result["artifacts"]
    assert (run_folder / "answer.md").read_text() == "It is **fine**.\n"
    assert "<!doctype html>" in (run_folder / "report.html").read_text()
    assert sorted(path.name for path in run_folder.iterdir()) == [
        "answer.md",
        "artifacts.json",
        "report.html",
        "result.json",
        "workspace",
    ]


def test_result_names_state_answer_tasks_costs(run_folder: Path) -> None:
    result = folder.write(run_folder, full_run())
    assert (result["schema"], result["run_id"], result["state"], result["exit_code"]) == (1, "r-1", "done", 0)
    assert [(task["id"], task["state"], task["attempts"]) for task in result["tasks"]] == [
        ("t1", "success", 1),
        ("t2", "success", 2),
    ]
    total, roles = result["costs"]["total"], result["costs"]["by_role"]
    for figure in ("llm_calls", "tool_calls", "tokens"):
        assert total[figure] == sum(cost[figure] for cost in roles.values()) > 0
    assert roles["tools"]["tool_calls"] == total["tool_calls"] == 3


def test_manifest_says_who_made_what(run_folder: Path) -> None:
    entries = {entry["path"]: entry for entry in folder.write(run_folder, full_run())["artifacts"]}
    chart = entries["chart.png"]
    assert chart["sha256"] == hashlib.sha256(png()).hexdigest()
    assert (chart["bytes"], chart["media_type"], chart["made_by"], chart["step"]) == (
        len(png()),
        "image/png",
        "t2",
        "t2/a2/actor/s1/c0",
    )
    assert entries["clean.csv"]["made_by"] == "t1"
    assert entries["data.csv"]["made_by"] == ""


def test_a_run_without_an_end_gives_a_result_too(run_folder: Path) -> None:
    result = folder.write(run_folder, full_run()[:9])
    assert result["state"] == "running"
    assert result["exit_code"] is None
    assert (run_folder / "answer.md").read_text() == ""


def test_written_again_it_is_the_same(run_folder: Path) -> None:
    folder.write(run_folder, full_run())
    first = {path.name: path.read_bytes() for path in run_folder.iterdir() if path.is_file()}
    folder.write(run_folder, full_run())
    assert {path.name: path.read_bytes() for path in run_folder.iterdir() if path.is_file()} == first
    folder.write_report(run_folder, full_run(), run_folder / "again.html")
    assert (run_folder / "again.html").read_bytes() == first["report.html"]


def test_a_failed_write_leaves_the_old_file(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write(run_folder, full_run())
    before = (run_folder / "result.json").read_bytes()

    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        folder.write(run_folder, full_run("another goal"))
    assert (run_folder / "result.json").read_bytes() == before
    assert not [path for path in run_folder.iterdir() if path.name.startswith(".")]


def test_links_and_pipes_in_the_workspace_are_not_followed(run_folder: Path) -> None:
    workspace = run_folder / folder.WORKSPACE
    (workspace / "passwd.png").symlink_to("/etc/passwd")
    (workspace / "etc").symlink_to("/etc")
    os.mkfifo(workspace / "pipe")
    found = artifacts.manifest(tell(full_run()), workspace)
    assert [entry.path for entry in found.artifacts] == ["chart.png", "clean.csv", "data.csv"]


def test_pictures_are_told_by_their_bytes_and_bounded() -> None:
    album = Album()
    assert album.from_bytes("a.png", b"<svg onload=alert(1)>") is None
    assert album.from_base64("a", "not base64!") is None
    large = album.from_bytes("big.png", png() + b"\0" * MAX_PICTURE_BYTES)
    assert large is not None
    assert large.uri == ""
    first, again = album.from_bytes("one.png", png()), album.from_bytes("two.png", png())
    assert first is not None
    assert again is not None
    assert first.uri.startswith("data:image/png;base64,")
    assert (again.uri, again.shown_at) == ("", first.anchor)


def test_an_album_that_is_full_names_the_rest() -> None:
    album = Album(left=len(png()) + 1)
    assert album.from_bytes("a", png(shade=1)) is not None
    second = album.from_bytes("b", png(shade=2))
    assert second is not None
    assert second.uri == ""


def test_resumed_runs_are_counted_and_go_on() -> None:
    script = Script()
    script.start("goal")
    script.add(EventKind.RUN_ENDED, state="interrupted", reason="Ctrl-C", answer="", exit_code=130)
    script.add(EventKind.RUN_RESUMED, pid=1, reason="by hand")
    story = tell(script.events)
    assert (story.run.state, story.run.resumes, story.run.reason) == ("running", 1, "")
    assert [moment.level for moment in story.timeline][-2:] == ["bad", "warn"]
