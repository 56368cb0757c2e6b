"""What the run's own ToolServer kept of an agent that was killed."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from agent.events import EventKind
from agent.store.memory_store import MemoryJournal
from agent.tools.kept_workspace import take_over
from agent.tools.workspace_store import WorkspaceStore

LAST = {"session_id": "ses_2", "reason": "gone", "restored_files": 0}


def archive(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    return out.getvalue()


@pytest.fixture
def journal() -> MemoryJournal:
    journal = MemoryJournal("run-1", [])
    journal.append(EventKind.SESSION_OPENED, {**LAST, "session_id": "ses_1"})
    journal.append(EventKind.SESSION_OPENED, LAST)
    return journal


@pytest.fixture
def store(tmp_path: Path) -> WorkspaceStore:
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace" / "old").write_bytes(b"old")
    (tmp_path / "workspace" / "same").write_bytes(b"before")
    return WorkspaceStore(tmp_path / "workspace", max_file_bytes=100)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    folder = tmp_path / "kept"
    folder.mkdir()
    return folder


def intend(journal: MemoryJournal) -> None:
    data = {"key": "t1/a1/actor/s1/c0", "call_id": "c", "tool": "note", "session_id": "ses_2"}
    journal.append(EventKind.TOOL_INTENDED, {**data, "arguments": {}, "task_id": "t1", "effect": "once"})


def notes(journal: MemoryJournal) -> list[str]:
    return [event.data["text"] for event in journal.events() if event.kind is EventKind.NOTE]


def names(folder: Path) -> list[str]:
    return sorted(place.name for place in folder.iterdir())


async def test_the_store_becomes_what_the_last_session_had(
    kept: Path, store: WorkspaceStore, journal: MemoryJournal
) -> None:
    (kept / "ses_1.tar").write_bytes(archive({"earlier": b"x"}))
    (kept / "ses_2.tar").write_bytes(archive({"same": b"after", "new/file": b"1"}))
    (kept / ".ses_2.part").write_bytes(b"half")
    assert await take_over(kept, store, journal) == {"ses_2"}
    assert store.files() == {"new/file": 1, "same": 5}
    assert (store.folder / "same").read_bytes() == b"after"
    assert names(kept) == []
    assert notes(journal) == [], "no call was open: nothing is worth telling"


async def test_a_later_process_knows_it_too_while_a_call_is_open(
    kept: Path, store: WorkspaceStore, journal: MemoryJournal
) -> None:
    intend(journal)
    (kept / "ses_2.tar").write_bytes(archive({"same": b"after"}))
    assert await take_over(kept, store, journal) == {"ses_2"}
    assert await take_over(kept, store, journal) == {"ses_2"}
    assert len(notes(journal)) == 1
    assert "ended while note ran" in notes(journal)[0]


async def test_unsafe_names_and_what_is_too_large_are_left_out_and_told(
    kept: Path, store: WorkspaceStore, journal: MemoryJournal, tmp_path: Path
) -> None:
    (kept / "ses_2.tar").write_bytes(archive({"../out": b"x", "/abs": b"x", "same": b"x" * 101, "ok": b"1"}))
    assert await take_over(kept, store, journal) == {"ses_2"}
    assert store.files() == {"ok": 1}
    assert not (tmp_path / "out").exists()
    assert len(notes(journal)) == 3


@pytest.mark.parametrize("data", [b"", b"no tar at all" * 100, archive({"same": b"x" * 2000})[:1500]])
async def test_an_archive_that_is_not_whole_does_not_count_and_deletes_nothing(
    data: bytes, kept: Path, store: WorkspaceStore, journal: MemoryJournal
) -> None:
    (kept / "ses_2.tar").write_bytes(data)
    assert await take_over(kept, store, journal) == frozenset()
    assert "old" in store.files()
    assert "can't be read" in "".join(notes(journal))
    assert names(kept) == []


async def test_nothing_kept_is_nothing_done(tmp_path: Path, store: WorkspaceStore, journal: MemoryJournal) -> None:
    assert await take_over(tmp_path / "nowhere", store, journal) == frozenset()
    assert set(store.files()) == {"old", "same"}
