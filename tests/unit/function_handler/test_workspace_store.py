"""The run's copy of the workspace: one step or nothing, never outside, never through a link, never without bound."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.tools.workspace_store import NotKept, WorkspaceStore, safe_parts


def put(store: WorkspaceStore, path: str, content: bytes = b"x") -> None:
    with store.writer(path) as target:
        target.write(content)
        target.commit()


def names_in(folder: Path) -> list[str]:
    return [place.name for place in folder.iterdir()]


@pytest.fixture
def store(tmp_path: Path) -> WorkspaceStore:
    return WorkspaceStore(tmp_path / "w", max_file_bytes=100, max_total_bytes=250, max_files=5)


@pytest.mark.parametrize(
    "path", ["..", ".", "a/..", "../a", "/a", "a//b", "a/", "", "a\0b", "x" * 256, "a/" * 70 + "b", "\ud800"]
)
def test_a_path_that_is_not_inside_is_refused(store: WorkspaceStore, path: str) -> None:
    with pytest.raises(NotKept):
        put(store, path)
    store.delete(path)
    assert store.files() == {}


@given(
    st.lists(st.sampled_from(["a", "..", ".", "", "b c", "é", "...", "~", "-rf", "\\"]), min_size=1, max_size=6).map(
        "/".join
    )
)
def test_what_passes_as_safe_never_climbs(path: str) -> None:
    try:
        parts = safe_parts(path)
    except NotKept:
        return
    assert not os.path.normpath("/w/" + "/".join(parts)).endswith("/..")
    assert os.path.normpath("/w/" + "/".join(parts)).startswith("/w/")


@pytest.mark.parametrize(
    "name", ["a b (pick one).py", "été/世界.txt", "-dash", "semi;colon&'quote'", "a\nb", ".hidden"]
)
def test_odd_names_are_kept_as_they_are(store: WorkspaceStore, name: str) -> None:
    put(store, name)
    assert (store.folder / name).read_bytes() == b"x"
    assert store.files() == {name: 1}


def test_nothing_changes_without_commit(store: WorkspaceStore) -> None:
    put(store, "a", b"old")
    with store.writer("a") as target:
        target.write(b"new")

    def broken_off() -> None:
        with store.writer("a") as target:
            target.write(b"new")
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        broken_off()
    assert (store.folder / "a").read_bytes() == b"old"
    assert names_in(store.folder) == ["a"]


def test_a_symbolic_link_is_not_followed_but_replaced(store: WorkspaceStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "target").write_bytes(b"untouched")
    (store.folder / "link").symlink_to(outside / "target")
    (store.folder / "dir").symlink_to(outside)
    put(store, "link", b"new")
    put(store, "dir/target", b"new")
    store.delete("dir")
    assert (outside / "target").read_bytes() == b"untouched"
    assert not (store.folder / "link").is_symlink()


def test_reading_does_not_follow_links_or_hang_on_pipes(store: WorkspaceStore) -> None:
    (store.folder / "link").symlink_to("/etc/passwd")
    os.mkfifo(store.folder / "pipe")
    with pytest.raises(OSError):
        store.open("link")
    with pytest.raises(NotKept):
        store.open("pipe")


def test_a_file_can_become_a_folder_and_a_folder_a_file(store: WorkspaceStore) -> None:
    put(store, "a")
    put(store, "a/b")
    assert store.files() == {"a/b": 1}
    put(store, "a", b"again")
    assert store.files() == {"a": 5}


def test_bounds_a_file_in_total_and_in_number(store: WorkspaceStore) -> None:
    with pytest.raises(NotKept, match="larger"):
        put(store, "big", b"x" * 101)
    put(store, "a", b"x" * 100)
    put(store, "b", b"x" * 100)
    with pytest.raises(NotKept, match="50 bytes"):
        put(store, "c", b"x" * 60)
    put(store, "a", b"y" * 100)
    for name in "cde":
        put(store, name, b"x")
    with pytest.raises(NotKept, match="5 files"):
        put(store, "f", b"x")
    assert sum(store.files().values()) <= 250


def test_an_announced_size_is_refused_before_a_byte_is_taken(store: WorkspaceStore) -> None:
    with pytest.raises(NotKept), store.writer("a") as target:
        target.expect(10**12)


def test_a_deleted_folder_takes_its_files_along(store: WorkspaceStore) -> None:
    put(store, "d/a")
    put(store, "d/e/b")
    put(store, "dx")
    store.delete("d")
    assert store.files() == {"dx": 1}
    assert not (store.folder / "d").exists()


def test_inputs_are_copied_whatever_their_size_and_never_over_each_other(store: WorkspaceStore, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    for name in ("data.csv", "x/data.csv"):
        (tmp_path / name).write_bytes(name.encode() * 100)
    (tmp_path / "linked.csv").symlink_to(tmp_path / "data.csv")
    names = store.add_inputs([tmp_path / "data.csv", tmp_path / "x/data.csv", tmp_path / "linked.csv"])
    assert len(set(names)) == 3
    assert names[0] == "data.csv"
    assert (store.folder / "data.csv").read_bytes() == b"data.csv" * 100
    assert not (store.folder / names[2]).is_symlink()


def test_what_a_killed_agent_left_half_written_is_gone_at_the_next_start(store: WorkspaceStore) -> None:
    with store.writer("a") as target:
        target.write(b"half")
        leftovers = names_in(store.folder)
        again = WorkspaceStore(store.folder)
        assert leftovers
        assert names_in(store.folder) == []
    assert again.files() == {}
