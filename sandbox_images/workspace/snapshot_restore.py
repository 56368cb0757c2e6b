"""A restore: what differs is staged beside the tree first, then put in place by renames, then the tree is looked at again.

Until the first rename nothing of the workspace has changed. A restore that was cut off afterwards is mended by the next one,
since any state is a state to restore from.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator
from contextlib import suppress

from sandbox_images.base.annotations import Any
from sandbox_images.base.beneath import explain
from sandbox_images.base.event_loop import Clock
from sandbox_images.base.mcp_stdio import ProtocolError, refused
from sandbox_images.workspace.file_store import INCOMING, FileStore
from sandbox_images.workspace.snapshot_manifest import HEADER, ZERO, Entry, pieces, side_by_side
from sandbox_images.workspace.snapshot_plan import Plan, all_lines
from sandbox_images.workspace.snapshot_scan import MAX_MANIFEST_BYTES, Known, digest, scan
from sandbox_images.workspace.snapshot_tree import FULL, Tree, parted
from sandbox_images.workspace.workspace_scan import BLOCK, OWN_FOLDER

WINDOW_BYTES, WINDOW_PIECES = 1 << 20, 4096  # of pieces asked for at a time; one piece always fits
PAGE_BYTES, ZERO_PAGE = 4096, bytes(4096)
MAX_DIFFERS = 20
NO_LIMIT = 1 << 62
# a path is not any more what the scan saw: something in the sandbox goes on writing
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMLINK)
MOVED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EEXIST, errno.ENOTEMPTY, errno.EISDIR, errno.EXDEV)
Slices = Generator[None, None, None]


class Restore:
    """`add_manifest`, then `step` until nothing lacks, then `commit`; `close` at the end, whatever happened."""

    def __init__(self, store: FileStore, known: Known, *, full: bool) -> None:
        """`full`: as for a scan."""
        self._store, self._known, self._full = store, known, full
        self.busy = False
        self._incoming = bytearray()
        self._want: list[bytes] = []
        self._plan: Plan | None = None
        self._tree = Tree(store.workspace)
        self._stage = f"{INCOMING}/restore-{os.urandom(8).hex()}"
        self._stage_fd = -1
        self._staged = 0  # files of the plan that are whole
        self._file_fd = -1
        self._pieces: list[
            tuple[bytes, int, int]
        ] = []  # of the file that is being staged: those still to come, last first
        self._disk_bytes = 0
        self._local: dict[bytes, tuple[bytes, int, int]] = {}
        self._lack: list[bytes] = []
        self._files: list[Entry] = []

    def working(self, work: Generator[None, None, dict[str, Any]]) -> Generator[None, None, dict[str, Any]]:
        """Run `work` as the only thing that this restore does."""
        self.busy = True
        try:
            return (yield from work)
        finally:
            self.busy = False

    def add_manifest(self, data: bytes) -> None:
        """The next part of the snapshot's manifest. Raises ProtocolError."""
        if self._plan is not None:
            raise refused("bad_handle", "The restore has begun: its snapshot can't change.")
        if len(self._incoming) + len(data) > MAX_MANIFEST_BYTES:
            raise refused("too_large", "The snapshot has too much in it for this workspace.")
        self._incoming += data

    def step(self, blobs: list[bytes]) -> Generator[None, None, list[bytes]]:
        """Stage on with the pieces that the last step lacked, in that order; those that lack now, empty when all is staged."""
        if self._plan is None:
            yield from self._make_plan()
        given = {}
        for name, data in zip(self._lack, blobs, strict=False):
            if digest(data) != name:
                raise refused("bad_archive", "A piece of the snapshot is not what its name says.")
            given[name] = data
        if self._lack and len(given) < len(self._lack):
            raise refused("bad_handle", "Pieces of the last step are missing.")
        clock = Clock()
        while self._staged < len(self._files):
            try:
                whole = yield from self._stage_file(self._files[self._staged], given, clock)
            except OSError as problem:
                raise (
                    self._no_room() if problem.errno in NO_ROOM else explain(problem, "the restored tree")
                ) from problem
            if not whole:
                self._lack = self._look_ahead()
                return self._lack
        self._lack = []
        return []

    def _make_plan(self) -> Slices:
        if not self._incoming.startswith(HEADER):
            raise refused("bad_archive", "This is no snapshot that can be read.")
        self._want = [line + b"\n" for line in bytes(self._incoming).split(b"\n")[1:-1]]
        self._incoming = bytearray()
        have = yield from scan(self._store.workspace, self._known, max_bytes=NO_LIMIT, full=self._full)
        plan = Plan()
        yield from plan.compare(have, self._want)
        self._files = [entry for entry in plan.make if entry.kind == b"f"]
        self._local = yield from plan.local_pieces(have)
        self._plan = plan

    # ---- stage

    def _stage_file(self, entry: Entry, given: dict[bytes, bytes], clock: Clock) -> Generator[None, None, bool]:
        """Whether it is whole; if not, it goes on at the piece that lacks."""
        if self._stage_fd < 0:
            self._open_stage()
        if self._file_fd < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file_fd = os.open(str(self._staged), flags, 0o600, dir_fd=self._stage_fd)
            os.ftruncate(self._file_fd, entry.size)
            self._pieces = list(pieces(entry))[::-1]
        while self._pieces:
            name, offset, length = self._pieces[-1]
            if name != ZERO:
                data = given.get(name) or self._from_workspace(name)
                if data is None:
                    return False
                if len(data) != length:
                    raise refused("bad_archive", "A piece of the snapshot has not its length.")
                _write_sparse(self._file_fd, data, offset)
            self._pieces.pop()
            if clock.spent():
                yield
                clock.start()
        os.fchmod(self._file_fd, entry.mode)
        self._disk_bytes += os.fstat(self._file_fd).st_blocks * BLOCK
        os.close(self._file_fd)
        self._file_fd = -1
        self._staged += 1
        if self._disk_bytes > self._store.quota.limit_bytes:
            raise self._too_large()
        return True

    def _open_stage(self) -> None:
        for place in (OWN_FOLDER, INCOMING):
            folder, name = parted(place.encode())
            with suppress(FileNotFoundError):
                fd = self._tree.folder(folder, to_change=True)
                try:
                    if not stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                        os.unlink(name, dir_fd=fd)  # user code has put something else where our own folder belongs
                finally:
                    os.close(fd)
        self._store.workspace.make_folders(self._stage)
        self._stage_fd = self._tree.folder(self._stage.encode())

    def _from_workspace(self, name: bytes) -> bytes | None:
        place = self._local.get(name)
        if place is None:
            return None
        data = read_piece(self._tree, *place)
        if data is not None and digest(data) == name:
            return data
        del self._local[name]
        return None

    def _look_ahead(self) -> list[bytes]:
        """The next pieces that lack, as many as fit into one message."""
        lack: dict[bytes, None] = {}
        room = WINDOW_BYTES
        for number in range(self._staged, len(self._files)):
            under_way = number == self._staged and self._file_fd >= 0
            for name, _, length in reversed(self._pieces) if under_way else pieces(self._files[number]):
                if name == ZERO or name in lack or name in self._local:
                    continue
                if length > room or len(lack) >= WINDOW_PIECES:
                    return list(lack)
                lack[name] = None
                room -= length
        return list(lack)

    def _no_room(self) -> ProtocolError:
        return refused(
            "too_large",
            "The snapshot does not fit into what is left of the workspace's disk, where it is staged beside the files that are there. "
            "Nothing was changed. Delete files, or make a session with a larger disk_mb.",
        )

    def _too_large(self) -> ProtocolError:
        limit = self._store.quota.limit_bytes / (1 << 20)
        return refused(
            "too_large",
            f"The snapshot does not fit into the workspace's disk quota of {limit:.0f} MiB. Nothing was changed.",
        )

    # ---- put in place

    def commit(self) -> Generator[None, None, dict[str, Any]]:
        """{"exact", "differs": [paths], "written", "removed"}. Raises ProtocolError: `changing` when the tree moved under it."""
        plan, quota = self._plan, self._store.quota
        if plan is None or self._staged < len(self._files):
            raise refused("bad_handle", "The restore is not staged yet.")
        try:
            yield from self._stage_rest(plan)
        except OSError as problem:
            raise self._no_room() if problem.errno in NO_ROOM else explain(problem, "the restored tree") from problem
        yield from quota.refresh()
        if quota.snapshot.bytes - plan.freed > max(quota.limit_bytes, quota.snapshot.bytes - self._disk_bytes):
            raise self._too_large()
        try:
            yield from self._apply(plan)
        except OSError as problem:
            if problem.errno in MOVED:
                raise refused(
                    "changing", "Something in the sandbox changed the files while they were restored."
                ) from None
            if problem.errno in NO_ROOM:  # where a folder's own list of names had to grow
                raise refused(
                    "incomplete",
                    "The disk was full while the snapshot was put in place: a part of the workspace is restored, a part is not. "
                    "Delete files, then restore again.",
                ) from problem
            raise explain(problem, "the restored tree") from problem
        finally:
            self._tree.put_back()
            quota.stale = True
        differs = yield from self._compare()
        return {
            "exact": not differs,
            "differs": differs[:MAX_DIFFERS],
            "written": len(plan.make),
            "removed": len(plan.doomed),
        }

    def _stage_rest(self, plan: Plan) -> Slices:
        """Folders and links take room as files do: they are made before anything changes, for the same reason."""
        if self._stage_fd < 0:
            self._open_stage()
        clock = Clock()
        for number, entry in enumerate(plan.make):
            name = f"other-{number}"
            if entry.kind == b"d":
                os.mkdir(name, 0o700, dir_fd=self._stage_fd)
            elif entry.kind == b"l":
                os.symlink(entry.target, name, dir_fd=self._stage_fd)
            else:
                continue
            self._disk_bytes += os.stat(name, dir_fd=self._stage_fd, follow_symlinks=False).st_blocks * BLOCK
            if clock.spent():
                yield
                clock.start()

    def _apply(self, plan: Plan) -> Slices:
        clock = Clock()
        for number, path in enumerate(plan.doomed):
            folder, name = parted(path)
            self._let_in(path, plan)
            fd = self._tree.folder(folder, to_change=True)
            try:
                os.rename(name, f"gone-{number}", src_dir_fd=fd, dst_dir_fd=self._stage_fd)
            finally:
                os.close(fd)
            if clock.spent():
                yield
                clock.start()
        staged = 0
        for number, entry in enumerate(plan.make):
            folder, name = parted(entry.path)
            fd = self._tree.folder(folder, to_change=True)
            try:
                made = str(staged) if entry.kind == b"f" else f"other-{number}"
                os.rename(made, name, src_dir_fd=self._stage_fd, dst_dir_fd=fd)
                staged += entry.kind == b"f"
            finally:
                os.close(fd)
            if clock.spent():
                yield
                clock.start()
        self._tree.put_back()
        folders = [entry for entry in (*plan.make, *plan.modes) if entry.kind == b"d"]
        files = [entry for entry in plan.modes if entry.kind == b"f"]
        for entry in (*files, *sorted(folders, key=lambda entry: -entry.path.count(b"/"))):
            folder, name = parted(entry.path)
            fd = self._tree.folder(folder)
            try:
                self._tree.chmod(name, fd, entry.mode)
                self._tree.settled(entry.path)
            finally:
                os.close(fd)
            if clock.spent():
                yield
                clock.start()

    def _let_in(self, path: bytes, plan: Plan) -> None:
        """Open the folders of a doomed one that are shut, outer ones first, so that it can be moved, and deleted later."""
        for place, mode in plan.shut:
            if place == path or place.startswith(path + b"/"):
                folder, name = parted(place)
                with suppress(OSError):
                    fd = self._tree.folder(folder)
                    try:
                        self._tree.chmod(name, fd, mode | FULL)
                    finally:
                        os.close(fd)

    def _compare(self) -> Generator[None, None, list[bytes]]:
        """Paths that are not as the snapshot has them, now that all was done."""
        now = yield from scan(self._store.workspace, self._known, max_bytes=NO_LIMIT, full=self._full)
        differs = []
        clock = Clock()
        for ours, theirs in side_by_side(all_lines(now), self._want):
            entry = ours or theirs
            if ours != theirs and entry is not None:
                differs.append(entry.path)
                if len(differs) > MAX_DIFFERS:
                    break
            if clock.spent():
                yield
                clock.start()
        return differs

    def close(self) -> Slices:
        """Leave nothing staged."""
        for fd in (self._file_fd, self._stage_fd):
            if fd >= 0:
                os.close(fd)
        self._file_fd = self._stage_fd = -1
        self._tree.put_back()
        with suppress(ProtocolError, OSError):
            yield from self._store.delete(self._stage, recursive=True)


def read_piece(tree: Tree, path: bytes, offset: int, length: int) -> bytes | None:
    """None when there is no such file any more, or it is shorter now."""
    folder, name = parted(path)
    with suppress(OSError):
        place = tree.folder(folder)
        try:
            fd = tree.open_file(name, place)
        finally:
            os.close(place)
        try:
            data = os.pread(fd, length, offset)
            return data if len(data) == length else None
        finally:
            os.close(fd)
    return None


def _write_sparse(fd: int, data: bytes, offset: int) -> None:
    """Pages of zeros stay holes, so that a file takes no more of the disk than before."""
    start, length = 0, len(data)
    if data.count(b"\0") < PAGE_BYTES:  # no page of zeros in it, as a rule
        _write(fd, data, offset)
        return
    while start < length:
        end = start
        while end < length and data[end : end + PAGE_BYTES] != ZERO_PAGE:
            end += PAGE_BYTES
        if end > start:
            _write(fd, data[start:end], offset + start)
        start = max(end, start)
        while start < length and data[start : start + PAGE_BYTES] == ZERO_PAGE:
            start += PAGE_BYTES


def _write(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count
