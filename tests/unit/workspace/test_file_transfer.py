"""The extension's file and archive methods."""

from __future__ import annotations

import base64
import io
import os
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.workspace.trees import Place
from tests.unit.workspace.worker_process import WorkerProcess


def read_all(worker: WorkerProcess, handle: int, piece: int = 1 << 20) -> bytes:
    data = b""
    while True:
        answer = worker.result("toolcrib/file.read", handle=handle, offset=len(data), length=piece)
        data += base64.b64decode(answer["data"])
        if answer["eof"]:
            return data


def send_archive(worker: WorkerProcess, body: bytes, *, commit: bool = True) -> dict[str, Any]:
    """The answer to the close, or the error of the write that was refused."""
    handle = worker.result("toolcrib/archive.open", mode="w")["handle"]
    for at in range(0, len(body), 1 << 19):
        answer = worker.request(
            "toolcrib/file.write", handle=handle, data=base64.b64encode(body[at : at + (1 << 19)]).decode()
        )
        if "error" in answer:
            break
    return worker.request("toolcrib/file.close", handle=handle, commit=commit)


def tar(*members: tuple[str, bytes | None, dict[str, Any]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content, fields in members:
            info = tarfile.TarInfo(name)
            info.size = len(content or b"")
            for field, value in fields.items():
                setattr(info, field, value)
            archive.addfile(info, io.BytesIO(content or b""))
    return buffer.getvalue()


def test_bytes_go_in_and_out_exactly(worker: WorkerProcess, tmp_path: Path) -> None:
    data = os.urandom(3_000_001)
    worker.upload("bin/d ü.bin", data)
    assert (tmp_path / "bin/d ü.bin").read_bytes() == data
    opened = worker.result("toolcrib/file.open", path="bin/d ü.bin", mode="r")
    assert opened["bytes"] == len(data)
    assert read_all(worker, opened["handle"]) == data
    part = worker.result("toolcrib/file.read", handle=opened["handle"], offset=70_000, length=10)
    assert (base64.b64decode(part["data"]), part["eof"]) == (data[70_000:70_010], False)
    worker.result("toolcrib/file.close", handle=opened["handle"], commit=False)
    assert worker.refusal("toolcrib/file.read", handle=opened["handle"], offset=0, length=1) == "bad_handle"
    worker.upload("empty", b"")
    assert (tmp_path / "empty").read_bytes() == b""


def test_a_write_that_is_not_committed_changes_nothing(worker: WorkerProcess, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("before")
    for path in ("f", "new/folder/g"):
        handle = worker.result("toolcrib/file.open", path=path, mode="w")["handle"]
        worker.result("toolcrib/file.write", handle=handle, data=base64.b64encode(b"after").decode())
        assert (tmp_path / "f").read_text() == "before"
        worker.result("toolcrib/file.close", handle=handle, commit=False)
    assert (tmp_path / "f").read_text() == "before"
    assert not (tmp_path / "new").exists()
    assert not list((tmp_path / ".toolcrib/incoming").iterdir())


def test_an_upload_is_the_sandboxs_own_and_no_change_of_the_next_call(worker: WorkerProcess) -> None:
    worker.upload("data.csv", b"a\n")
    assert worker.python("1").meta["workspace_changed"] == []
    assert worker.python("open('data.csv', 'a').write('b')").end == "done"


def test_stat_and_list(worker: WorkerProcess, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/b").write_text("12345")
    (tmp_path / "d/a").symlink_to("b")
    os.mkfifo(tmp_path / "d/c")
    (tmp_path / "d/b").chmod(0o640)
    stat = worker.result("toolcrib/file.stat", path="d/b")
    assert (stat["path"], stat["kind"], stat["bytes"], stat["mode"]) == ("d/b", "file", 5, 0o640)
    assert abs(stat["mtime"] - time.time()) < 100
    listed = worker.result("toolcrib/file.list", path="/workspace/d", limit=100)
    assert [(e["name"], e["kind"]) for e in listed["entries"]] == [("a", "symlink"), ("b", "file"), ("c", "other")]
    assert listed["truncated"] is False
    assert worker.result("toolcrib/file.list", path="d", limit=2)["truncated"] is True
    assert worker.result("toolcrib/file.stat", path=".")["kind"] == "dir"


@pytest.mark.parametrize(
    ("path", "mode", "kind"),
    [
        ("missing", "r", "not_found"), ("d", "r", "is_directory"), ("d", "w", "is_directory"), (".", "w", "is_directory"),
        ("fifo", "r", "not_regular"), ("fifo", "w", "not_regular"), ("out", "r", "invalid_path"), ("out", "w", "invalid_path"),
        ("all/tmp/x", "r", "invalid_path"), ("all/tmp/x", "w", "invalid_path"), ("../x", "w", "invalid_path"), ("a\x00", "r", "invalid_path"),
        ("f/below", "r", "not_found"), ("f/below", "w", "invalid_path"), ("a" * 300, "w", "invalid_path"), ("", "r", "invalid_path"),
        ("round", "r", "invalid_path"), ("zero", "r", "invalid_path"),
    ],
)  # fmt: skip
def test_refusals_name_their_kind(worker: WorkerProcess, tmp_path: Path, path: str, mode: str, kind: str) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "f").write_text("")
    os.mkfifo(tmp_path / "fifo")
    for name, target in (("out", "/etc/passwd"), ("all", "/"), ("round", "round"), ("zero", "/dev/zero")):
        (tmp_path / name).symlink_to(target)
    assert worker.refusal("toolcrib/file.open", path=path, mode=mode) == kind


def test_deleting(worker: WorkerProcess, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("")
    deep = tmp_path / "d" / "/".join(["n" * 200] * 15)
    deep.mkdir(parents=True)
    (deep / "link").symlink_to(tmp_path)
    (tmp_path / "d/shut").mkdir(mode=0)
    assert worker.result("toolcrib/file.delete", path="d") == {}
    assert not (tmp_path / "d").exists()
    assert kept.exists()
    assert worker.refusal("toolcrib/file.delete", path="d") == "not_found"
    for path in (".", "/workspace", "a/.."):
        assert worker.refusal("toolcrib/file.delete", path=path) == "invalid_path"


def test_quota_refuses_uploads_and_lets_delete(worker: WorkerProcess) -> None:
    worker.result("toolcrib/bind", env={}, limits={"disk_mb": 2})
    worker.upload("first", bytes(1_500_000))
    handle = worker.result("toolcrib/file.open", path="second", mode="w")["handle"]
    worker.result("toolcrib/usage")
    assert (
        worker.refusal("toolcrib/file.write", handle=handle, data=base64.b64encode(bytes(1 << 20)).decode())
        == "too_large"
    )
    worker.result("toolcrib/file.close", handle=handle, commit=False)
    worker.upload("first", bytes(1_600_000))  # what it replaces makes room
    body = tar(("big", bytes(1_000_000), {}))
    assert send_archive(worker, body)["error"]["data"]["kind"] == "too_large"
    worker.result("toolcrib/file.delete", path="first")
    assert worker.result("toolcrib/usage")["workspace_bytes"] < 100_000
    assert send_archive(worker, body)["result"] == {"files": 1}


def test_an_archive_goes_out_and_into_another_workspace_exactly(
    worker: WorkerProcess, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "empty").mkdir(mode=0o700)
    (tmp_path / "a/b/run ü.sh").write_text("echo ran")
    (tmp_path / "a/b/run ü.sh").chmod(0o755)
    (tmp_path / "plain").write_bytes(os.urandom(3_000_000))
    (tmp_path / "plain").chmod(0o600)
    (tmp_path / os.fsdecode(b"odd \xff name")).write_text("odd")
    (tmp_path / "link").symlink_to("a/b/run ü.sh")
    (tmp_path / "out").symlink_to("/usr/bin/env")
    os.mkfifo(tmp_path / "fifo")
    os.link(tmp_path / "plain", tmp_path / "hard")
    long = tmp_path / ("n" * 200) / ("m" * 200)
    long.mkdir(parents=True)
    (long / "f").write_text("deep")
    handle = worker.result("toolcrib/archive.open", mode="r")["handle"]
    body = read_all(worker, handle, 300_000)
    worker.result("toolcrib/file.close", handle=handle, commit=False)
    place = tmp_path_factory.mktemp("other")
    (place / "a").mkdir()
    (place / "a/kept").write_text("kept")
    other = WorkerProcess(place)
    assert other.call("file_list").end == "done"
    assert send_archive(other, body)["result"]["files"] > 8
    assert (place / "plain").read_bytes() == (tmp_path / "plain").read_bytes() == (place / "hard").read_bytes()
    assert [oct((place / n).stat().st_mode & 0o777) for n in ("a/b/run ü.sh", "plain", "empty")] == [
        "0o755",
        "0o600",
        "0o700",
    ]
    assert (place / os.fsdecode(b"odd \xff name")).read_text() == "odd"
    assert [str((place / n).readlink()) for n in ("link", "out")] == ["a/b/run ü.sh", "/usr/bin/env"]
    assert (place / ("n" * 200) / ("m" * 200) / "f").read_text() == "deep"
    assert abs((place / "plain").stat().st_mtime - (tmp_path / "plain").stat().st_mtime) < 0.001
    assert (place / "a/kept").read_text() == "kept"
    assert not (place / "fifo").exists()
    assert other.close() == 0


HOSTILE: dict[str, Callable[[], bytes]] = {
    "dots": lambda: tar(("good", b"x", {}), ("../evil", b"x", {})),
    "inner dots": lambda: tar(("good", b"x", {}), ("a/../../evil", b"x", {})),
    "absolute": lambda: tar(("good", b"x", {}), ("/tmp/evil", b"x", {})),
    "through a link": lambda: tar(
        ("good", b"x", {}), ("sl", None, {"type": tarfile.SYMTYPE, "linkname": "/tmp"}), ("sl/evil", b"x", {})
    ),
    "link as folder": lambda: tar(
        ("good", b"x", {}),
        ("sl", None, {"type": tarfile.SYMTYPE, "linkname": "/tmp"}),
        ("sl", None, {"type": tarfile.DIRTYPE}),
    ),
    "hard link": lambda: tar(("good", b"x", {}), ("hl", None, {"type": tarfile.LNKTYPE, "linkname": "/etc/passwd"})),
    "device": lambda: tar(("good", b"x", {}), ("dev", None, {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3})),
    "fifo": lambda: tar(("good", b"x", {}), ("ff", None, {"type": tarfile.FIFOTYPE})),
    "long name": lambda: tar(("good", b"x", {}), ("n" * 300, b"x", {})),
    "no tar": lambda: b"this is not a tar" * 100,
    "nothing": lambda: b"",
    "cut": lambda: tar(("good", b"x", {}), ("whole.bin", os.urandom(20_000), {}))[:9000],
    "through a link of the workspace": lambda: tar(("good", b"x", {}), ("there/evil", b"x", {})),
    "file over folder": lambda: tar(("good", b"x", {}), ("folder", b"x", {})),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_refused_and_nothing_is_unpacked(worker: WorkerProcess, tmp_path: Path, name: str) -> None:
    (tmp_path / "there").symlink_to("/tmp")
    (tmp_path / "folder").mkdir()
    worker.result("ping")
    answer = send_archive(worker, HOSTILE[name]())
    assert answer["error"]["data"]["kind"] == "bad_archive"
    assert sorted(p.name for p in tmp_path.iterdir()) == [".toolcrib", "folder", "there"]
    assert not list((tmp_path / ".toolcrib/incoming").iterdir())
    assert not Path("/tmp/evil").exists()


def test_setuid_bits_are_dropped_and_an_aborted_archive_leaves_nothing(worker: WorkerProcess, tmp_path: Path) -> None:
    body = tar(("s", b"x", {"mode": 0o6755}))
    assert send_archive(worker, body, commit=False)["result"] == {}
    assert not (tmp_path / "s").exists()
    assert send_archive(worker, body)["result"] == {"files": 1}
    assert (tmp_path / "s").stat().st_mode & 0o7777 == 0o755


def test_a_large_archive_does_not_hold_up_other_requests(worker: WorkerProcess, tmp_path: Path) -> None:
    with (tmp_path / "big").open("wb") as file:
        file.truncate(200 << 20)
    handle = worker.result("toolcrib/archive.open", mode="r")["handle"]
    worker.result("toolcrib/file.read", handle=handle, offset=0, length=1 << 20)
    assert worker.python("6 * 7").structured["result"] == "42"
    assert worker.refusal("toolcrib/file.read", handle=handle, offset=0, length=10) == "bad_handle"
    worker.result("toolcrib/file.close", handle=handle, commit=False)


@pytest.mark.parametrize(
    ("name", "spelled"),
    [
        (b"caf\xe9.txt", "caf\\xe9.txt"),
        (b"\xff\xfe/inner", "\\xff\\xfe/inner"),
        ("gr\u00fc\u00df".encode(), "gr\u00fc\u00df"),
        (b"a\\xff", "a\\x5cxff"),
        (b"a\\x5c", "a\\x5cx5c"),
        (b"a\\xFF\\n\\x41", "a\\xFF\\n\\x41"),
        (b"\xc3", "\\xc3"),
    ],
)
def test_every_name_can_be_told_and_finds_its_file_again(worker: WorkerProcess, name: bytes, spelled: str) -> None:
    made = worker.python(
        f"import os\nos.makedirs(os.path.dirname(b'./' + {name!r}), exist_ok=True)\nopen({name!r}, 'w').write('it')"
    )
    assert spelled in made.meta["workspace_changed"]
    folder, _, last = spelled.rpartition("/")
    listed = worker.result("toolcrib/file.list", path=folder or ".", limit=10)["entries"]
    assert last in [entry["name"] for entry in listed]
    assert worker.result("toolcrib/file.stat", path=spelled)["path"] == spelled
    assert worker.call("file_read", path=spelled).structured["text"] == "it"
    assert spelled in [entry["name"] for entry in worker.call("file_list", recursive=True).structured["entries"]]
    found = worker.call("file_search", pattern="^it$").structured["matches"]
    assert spelled in [match["path"] for match in found]
    worker.upload(spelled, b"more")
    assert (worker.workspace / os.fsdecode(name)).read_bytes() == b"more"
    assert worker.call("file_delete", path=spelled).end == "done"
    assert not (worker.workspace / os.fsdecode(name)).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a while")
def test_a_folder_of_no_rights_is_deleted_by_its_owner(tmp_path: Path) -> None:
    for shut in ("d/shut/inside", "d/shut"):
        (tmp_path / shut).mkdir(parents=True, exist_ok=True)
        (tmp_path / shut / "file").write_text("")
    for place in (tmp_path, *tmp_path.rglob("*")):
        os.chown(place, 65534, -1)
    for shut in ("d/shut/inside", "d/shut", "d"):
        (tmp_path / shut).chmod(0)
    files = Place(tmp_path)
    os.seteuid(65534)  # root is not held up by modes
    try:
        for _ in files.store.delete("d", recursive=True):
            pass
    finally:
        os.seteuid(0)
        files.close()
    assert not (tmp_path / "d").exists()
