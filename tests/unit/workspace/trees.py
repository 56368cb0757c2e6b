"""Trees for tests of snapshots: made at random, written to disk, read back with lstat, and the two halves of a snapshot."""

from __future__ import annotations

import os
import stat
from collections.abc import Generator
from pathlib import Path
from typing import Any, TypeVar

from sandbox_images.base.beneath import Workspace
from sandbox_images.base.event_loop import Loop
from sandbox_images.workspace.file_store import FileStore
from sandbox_images.workspace.quota import Quota
from sandbox_images.workspace.snapshot_manifest import HEADER
from sandbox_images.workspace.snapshot_restore import Restore, read_piece
from sandbox_images.workspace.snapshot_scan import Known, Scan, scan
from sandbox_images.workspace.snapshot_tree import Tree

T = TypeVar("T")


def finish(work: Generator[None, None, T]) -> T:
    while True:
        try:
            next(work)
        except StopIteration as end:
            value: T = end.value
            return value


def on_disk(root: Path) -> dict[bytes, tuple[Any, ...]]:
    """Everything below `root` but our own folder: kind, mode, and content or target."""
    found: dict[bytes, tuple[Any, ...]] = {}
    top = os.fsencode(root)
    for folder, folders, files, fd in os.fwalk(top):  # by handles: paths may be longer than a call can name
        if folder == top and b".toolcrib" in folders:
            folders.remove(b".toolcrib")
        for name in folders + files:
            info = os.lstat(name, dir_fd=fd)
            key = (folder + b"/" + name)[len(top) + 1 :]
            if stat.S_ISLNK(info.st_mode):
                found[key] = ("link", os.readlink(name, dir_fd=fd))
            elif stat.S_ISDIR(info.st_mode):
                found[key] = ("dir", stat.S_IMODE(info.st_mode))
            elif stat.S_ISREG(info.st_mode):
                with open(os.open(name, os.O_RDONLY, dir_fd=fd), "rb") as file:
                    found[key] = ("file", stat.S_IMODE(info.st_mode), file.read())
            else:
                found[key] = ("other", stat.S_IFMT(info.st_mode))
    return found


class Shelf:
    """What the server does, in memory: snapshots of one folder are taken from it and put back into it or another."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.sent = 0  # pieces given to restores

    def take(self, place: Place) -> list[bytes]:
        found = finish(scan(place.workspace, place.known, max_bytes=1 << 40, full=False))
        tree = Tree(place.workspace)
        for number, line in enumerate(found.lines):
            if line.startswith(b"f"):
                entry, pieces = found.file(number)
                for name, offset, length in pieces.values():
                    data = read_piece(tree, entry.path, offset, length)
                    assert data is not None
                    self.blobs[name.decode()] = data
        tree.put_back()
        place.last = found
        return found.lines

    def put(self, place: Place, lines: list[bytes]) -> dict[str, Any]:
        restore = Restore(place.store, place.known, full=False)
        try:
            restore.add_manifest(HEADER + b"".join(lines))
            lack: list[bytes] = []
            while True:
                self.sent += len(lack)
                lack = finish(restore.step([self.blobs[name.decode()] for name in lack]))
                if not lack:
                    return finish(restore.commit())
        finally:
            finish(restore.close())


class Place:
    """A folder with what a worker has to work on it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.workspace = Workspace(str(root))
        self.quota = Quota(Loop(), self.workspace)
        self.store = FileStore(self.workspace, self.quota)
        self.known = Known()
        self.last = Scan()

    def close(self) -> None:
        os.close(self.workspace.fd)
