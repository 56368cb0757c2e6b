"""What the server keeps of snapshots: pieces by content, manifests that are checked, differences between two."""

from __future__ import annotations

import hashlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_images.workspace.snapshot_manifest import Entry as Made
from sandbox_images.workspace.snapshot_manifest import order
from toolserver.errors import StoreUnavailable
from toolserver.snapshots import manifest
from toolserver.snapshots.compare import compare
from toolserver.snapshots.manifest import NotAManifest
from toolserver.store.blobs import BlobStore, Damaged, unused_stores


def name(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def nothing(_data: bytes) -> list[bytes]:
    return []


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path, "tenant")


def file_of(tmp_path: Path) -> Path:
    return next(path for path in tmp_path.iterdir() if path.suffix == ".db")


PIECES = [b"", b"small", b"text " * 10_000, os.urandom(1 << 20), bytes(5000)]


def test_pieces_come_back_exactly_and_are_stored_once(store: BlobStore, tmp_path: Path) -> None:
    names = [name(piece) for piece in PIECES]
    assert store.lacking(names) == set(names)
    assert store.put(PIECES) == names
    size = store.used_bytes()
    store.put(PIECES)
    assert store.used_bytes() == size < 1_500_000, "text is compressed, nothing is there twice"
    assert store.lacking([*names, name(b"other")]) == {name(b"other")}
    assert [store.get(one) for one in names] == PIECES
    again = BlobStore(tmp_path, "tenant")
    assert again.get(names[1]) == b"small"
    assert file_of(tmp_path).stat().st_mode & 0o077 == 0
    again.close()
    store.close()


def test_a_sweep_keeps_what_roots_name(store: BlobStore, tmp_path: Path) -> None:
    kept, root = [b"a" * 100, b"b" * 100], b"root"
    store.put([*kept, root, *(os.urandom(100_000) for _ in range(30))])
    size = store.used_bytes()
    assert store.keep_only([name(root)], lambda data: [name(piece) for piece in kept if data == root]) == 30
    assert store.lacking(map(name, [*kept, root])) == set()
    assert store.used_bytes() < size / 10
    assert file_of(tmp_path).stat().st_size < size / 10, "the room is given back"
    assert store.keep_only([name(b"a root that is not there")], nothing) == 3
    store.delete()
    assert list(tmp_path.iterdir()) == []
    store.put([b"x"])  # a store that was deleted begins anew
    assert list(unused_stores(tmp_path, ["tenant"])) == []
    assert file_of(tmp_path) in set(unused_stores(tmp_path, ["another"]))
    store.close()


@pytest.mark.parametrize(
    "harm",
    [
        "UPDATE blobs SET data = CAST(? || substr(data, 2) AS BLOB)",
        "UPDATE blobs SET data = ?",
        "DELETE FROM blobs WHERE 'x' != ?",
    ],
)
@pytest.mark.parametrize("piece", [b"text " * 1000, os.urandom(1000)], ids=["compressed", "plain"])
def test_damage_is_told_and_mended_by_the_next_put(store: BlobStore, tmp_path: Path, harm: str, piece: bytes) -> None:
    store.put([piece])
    store.close()
    with sqlite3.connect(file_of(tmp_path)) as raw:
        raw.execute(harm, (b"\xff",))
    raw.close()
    with pytest.raises(Damaged):
        store.get(name(piece))
    store.put([piece])
    assert store.get(name(piece)) == piece
    store.close()


def test_a_file_that_is_no_database_is_a_store_that_is_away(store: BlobStore, tmp_path: Path) -> None:
    store.put([b"x"])
    store.close()
    file_of(tmp_path).write_bytes(b"nonsense" * 5000)
    with pytest.raises(StoreUnavailable):
        store.get(name(b"x"))


def test_writers_and_readers_in_many_threads(store: BlobStore) -> None:
    problems: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for round_ in range(20):
                piece = f"{number % 3} {round_}".encode() * 50
                store.put([piece])
                assert store.get(name(piece)) == piece
        except BaseException as problem:  # noqa: BLE001 - told by the main thread
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    store.close()


def test_a_kill_in_the_middle_of_puts_and_sweeps_loses_nothing(tmp_path: Path) -> None:
    """What was put before, and is a root of every sweep, is whole whenever the process dies."""
    kept = [os.urandom(2000) for _ in range(20)]
    store = BlobStore(tmp_path, "tenant")
    store.put(kept)
    store.close()
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom toolserver.store.blobs import BlobStore\n"
        "store = BlobStore(Path(sys.argv[1]), 'tenant')\nroots = [bytes.fromhex(one) for one in sys.argv[2:]]\n"
        "print('on', flush=True)\n"
        "while True:\n    store.put([os.urandom(50_000) for _ in range(20)])\n    store.keep_only(roots, lambda data: [])\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), *(name(piece).hex() for piece in kept)]
    for number in range(6):
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"on\n"
            time.sleep(0.013 * number)
            process.send_signal(signal.SIGKILL)
        store = BlobStore(tmp_path, "tenant")
        assert [store.get(name(piece)) for piece in kept] == kept
        store.close()


# ---- manifests

NAMES = st.sampled_from([b"a", b"b", b"a-", b"a b", b"\xff", b"x\ny", b"back\\n"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(b"/".join)
DIGEST = hashlib.sha256(b"x").hexdigest().encode()
ENTRIES = st.one_of(
    st.builds(lambda p, m, s: Made(b"f", p, m, s, DIGEST if s else b""), PATHS, st.sampled_from([0o644, 0o755]), st.integers(0, 9)),
    st.builds(lambda p, m: Made(b"d", p, m), PATHS, st.sampled_from([0o755, 0o700])),
    st.builds(lambda p, t: Made(b"l", p, target=t), PATHS, st.sampled_from([b"a", b"/etc", b"n\nl"])),
)  # fmt: skip
TREES = st.lists(ENTRIES, max_size=12).map(lambda found: {entry.path: entry for entry in found})


def written(tree: dict[bytes, Made]) -> bytes:
    lines = sorted(tree.values(), key=lambda entry: order(entry.path))
    return manifest.HEADER + b"".join(entry.line() for entry in lines)


@given(before=TREES, after=TREES)
def test_a_difference_is_what_two_dictionaries_say(before: dict[bytes, Made], after: dict[bytes, Made]) -> None:
    manifest.wanted(written(before))
    found = compare(written(before), written(after))

    def paths(kind: str) -> set[str]:
        return {entry["path"] for entry in found[kind]}

    def shown(some: set[bytes]) -> set[str]:
        return {path.decode("utf-8", "backslashreplace") for path in some}

    assert paths("added") == shown(after.keys() - before.keys())
    assert paths("removed") == shown(before.keys() - after.keys())
    assert paths("changed") == shown({path for path in before.keys() & after.keys() if before[path] != after[path]})
    assert all(entry["changes"] for entry in found["changed"])


def test_a_difference_says_of_which_kind() -> None:
    before = {
        b"m": Made(b"f", b"m", 0o644, 1, DIGEST),
        b"t": Made(b"l", b"t", target=b"x"),
        b"k": Made(b"d", b"k", 0o755),
    }
    after = {
        b"m": Made(b"f", b"m", 0o755, 2, DIGEST),
        b"t": Made(b"l", b"t", target=b"\xff"),
        b"k": Made(b"l", b"k", target=b"y"),
    }
    changed = {entry["path"]: entry for entry in compare(written(before), written(after))["changed"]}
    assert {path: entry["changes"] for path, entry in changed.items()} == {
        "m": ["content", "mode"],
        "t": ["target"],
        "k": ["type"],
    }
    assert (changed["t"]["target"], changed["t"]["target_base64"]) == ("\\xff", "/w==")
    assert changed["m"]["before"] == {"path": "m", "type": "file", "mode": 0o644, "bytes": 1}


@given(
    st.one_of(
        st.binary(max_size=200),
        st.lists(
            st.sampled_from([b"f", b"d", b"l", b"\0", b"\n", b"0", b"755", b"a", b"*9", b",", b"/", b"..", DIGEST])
        ).map(b"".join),
    )
)
def test_what_is_no_manifest_is_refused_in_one_way(noise: bytes) -> None:
    for data in (noise, manifest.HEADER + noise, manifest.HEADER + noise + b"\n"):
        try:
            manifest.wanted(data)
            list(manifest.names(data))
        except NotAManifest:
            continue


@pytest.mark.parametrize("path", [b"../x", b"/x", b"a//b", b"", b".", b"a/../b"])
def test_a_path_that_leads_elsewhere_is_refused(path: bytes) -> None:
    with pytest.raises(NotAManifest):
        manifest.wanted(written({path: Made(b"d", path, 0o755)}))


@pytest.mark.parametrize(
    "text", ["unknown", "../../etc", "snap_", "snap_" + "0" * 63, "snap_" + "G" * 64, "snap_" + "0" * 64 + "\n", ""]
)
def test_what_can_be_no_id_names_nothing(text: str) -> None:
    assert manifest.name_of(text) is None
