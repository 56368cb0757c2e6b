from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from agent.bootstrap import inputs
from agent.errors import UsageProblem


def test_files_and_links_to_files_pass(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1")
    (tmp_path / "link.csv").symlink_to(tmp_path / "a.csv")
    paths = [tmp_path / "a.csv", tmp_path / "link.csv"]
    assert inputs.check(paths) == paths


def test_every_problem_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "x").mkdir()
    for place in (tmp_path / "same.csv", tmp_path / "x" / "same.csv"):
        place.write_text("1")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    names = ("missing.csv", "folder", "pipe", "dangling", "same.csv", "x/same.csv")
    with pytest.raises(UsageProblem) as caught:
        inputs.check(tmp_path / name for name in names)
    message = caught.value.message
    for expected in (
        "missing.csv: there is no such file", "folder: is a folder", "pipe: is no regular file", "dangling: there is no such file",
        "have the same name",
    ):  # fmt: skip
        assert expected in message


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_text("x")

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UsageProblem, match=r"secret: can't be read \(Permission denied\)"):
        inputs.check([tmp_path / "secret"])


def test_files_that_do_not_fit_are_refused_before_they_are_read(tmp_path: Path) -> None:
    huge = tmp_path / "huge.bin"
    with huge.open("wb") as file:
        file.truncate(inputs.MAX_INPUT_BYTES + 1)  # sparse: takes no disk
    with pytest.raises(UsageProblem, match=r"at most 1,073,741,824 fit"):
        inputs.check([huge])


def test_files_are_described_by_size_and_hash(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"abc")
    expected = {"path": "a.csv", "bytes": 3, "sha256": hashlib.sha256(b"abc").hexdigest()}
    assert inputs.describe(tmp_path, ["a.csv"]) == (expected,)
