"""What the workspace holds, as the lines of a manifest. Only files that may have changed since the last scan are read."""

from __future__ import annotations

import errno
import os
import stat
import struct
import time
from array import array
from collections.abc import Generator

from sandbox_images.base.beneath import Workspace
from sandbox_images.base.event_loop import Clock
from sandbox_images.base.mcp_stdio import refused
from sandbox_images.workspace.snapshot_manifest import (
    CHUNK_BYTES,
    HEADER,
    ZERO,
    ZEROS,
    Entry,
    data_bytes,
    parse,
    pieces,
)
from sandbox_images.workspace.snapshot_tree import Tree, shared_mappings
from sandbox_images.workspace.workspace_scan import BLOCK, OWN_FOLDER

MAX_ENTRIES = 200_000
MAX_MANIFEST_BYTES = 64 << 20
MAX_CONTENT_BYTES = 4 << 20  # of one file's list of pieces
MAX_READS = 3  # of a file that changes while it is read
MAX_KNOWN = 100_000  # files whose digests are remembered
# a change within the tick of the kernel's clock leaves the time as it was; some file systems count only whole seconds
TICK_NS, SECOND_NS = 50_000_000, 1_000_000_000
STATE = struct.Struct("<QQqqI")
KINDS = {stat.S_IFIFO: "fifo", stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}
Pieces = dict[int, tuple[bytes, int, int]]  # offset → (digest, offset, length)
Slices = Generator[None, None, None]


class Scan:
    """One state of the tree. `blocks`: bytes on disk of each line's entry; `left_out`: lines of FIFOs, sockets, devices."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.blocks = array("Q")
        self.left_out: list[bytes] = []
        self.files, self.bytes, self.data_bytes, self.read_bytes = 0, 0, 0, 0
        self.manifest_bytes = len(HEADER)
        self._opened: tuple[int, Entry, Pieces] = (-1, Entry(b"p", b""), {})

    def add(self, line: bytes, blocks: int) -> None:
        """Raises ProtocolError too_large."""
        self.lines.append(line)
        self.blocks.append(blocks * BLOCK)
        self.manifest_bytes += len(line)
        if len(self.lines) > MAX_ENTRIES or self.manifest_bytes > MAX_MANIFEST_BYTES:
            raise refused(
                "too_large",
                f"The workspace has too much in it for a snapshot: at most {MAX_ENTRIES} files and folders, and "
                f"{MAX_MANIFEST_BYTES >> 20} MiB of their paths. Delete some, or pack them into an archive.",
            )

    def file(self, line: int) -> tuple[Entry, Pieces]:
        """The entry of a line and, for a file, its pieces that are not zeros. The last one is kept: a large file is asked for often."""
        if self._opened[0] != line:
            entry = parse(self.lines[line])
            found = pieces(entry) if entry.kind == b"f" else ()
            self._opened = (line, entry, {piece[1]: piece for piece in found if piece[0] != ZERO})
        return self._opened[1:]


class Known:
    """Digests of the files as the last scan found them. A file counts as known only while nothing about it has moved."""

    def __init__(self) -> None:
        self.files: dict[bytes, bytes] = {}  # path → state and line


def scan(workspace: Workspace, known: Known, *, max_bytes: int, full: bool) -> Generator[None, None, Scan]:
    """Walk in slices. `max_bytes`: of content that is not zeros; `full`: read every file. Raises ProtocolError too_large, changing."""
    tree = Tree(workspace)
    try:
        return (yield from _Walk(tree, known, max_bytes, full=full).run())
    finally:
        tree.put_back()


class _Walk:
    def __init__(self, tree: Tree, known: Known, max_bytes: int, *, full: bool) -> None:
        self._tree, self._known, self._max = tree, known, max_bytes
        self._found, self._clock = Scan(), Clock()
        self._begun = time.clock_gettime_ns(time.CLOCK_REALTIME)
        mapped = None if full or not tree.keeps_time() else shared_mappings()  # looked at after the clock
        self._trusted, self._mapped = mapped is not None, mapped or set()
        self._next: dict[bytes, bytes] = {}

    def run(self) -> Generator[None, None, Scan]:
        folders = [b""]
        while folders:
            folder = folders.pop()
            try:
                fd = self._tree.folder(folder)
            except OSError:
                continue  # deleted, or replaced, since its own entry was seen
            try:
                below = yield from self._entries(folder, fd)
            finally:
                os.close(fd)
            folders += below[::-1]
        self._known.files = self._next
        return self._found

    def _entries(self, folder: bytes, fd: int) -> Generator[None, None, list[bytes]]:
        below = []
        for name in sorted(os.fsencode(name) for name in os.listdir(fd)):
            path = folder + b"/" + name if folder else name
            if path == OWN_FOLDER.encode():
                continue
            try:
                info = os.stat(name, dir_fd=fd, follow_symlinks=False)
                mode = stat.S_IMODE(info.st_mode)
                if stat.S_ISREG(info.st_mode):
                    yield from self._file(path, name, fd, info)
                elif stat.S_ISDIR(info.st_mode):
                    self._found.add(Entry(b"d", path, mode).line(), 0)
                    below.append(path)
                elif stat.S_ISLNK(info.st_mode):
                    self._found.add(Entry(b"l", path, target=os.readlink(name, dir_fd=fd)).line(), info.st_blocks)
                else:
                    kind = KINDS.get(stat.S_IFMT(info.st_mode), "other").encode()
                    self._found.left_out.append(Entry(b"p", path, target=kind).line())
            except OSError as problem:
                if problem.errno not in (errno.ENOENT, errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.ENOTDIR):
                    raise
                # deleted or replaced since its folder was listed
            if self._clock.spent():
                yield
                self._clock.start()
        return below

    def _file(self, path: bytes, name: bytes, folder: int, info: os.stat_result) -> Slices:
        state = _state(info)
        known = self._known.files.get(path)
        if self._trusted and known is not None and known.startswith(state) and info.st_ino not in self._mapped:
            self._take(info, known[STATE.size :])
            self._remember(path, known)
            return
        for _ in range(MAX_READS):
            fd = self._tree.open_file(name, folder)
            try:
                info = os.fstat(fd)
                if not stat.S_ISREG(info.st_mode):
                    return
                read = yield from self._content(fd, info.st_size)
                after = os.fstat(fd)
            finally:
                os.close(fd)
            whole = read is not None and _state(info) == _state(after)
            if whole:
                break
        if read is None:
            raise refused("changing", f"The file {_shown(path)} became shorter each time it was read.")
        if len(read) > MAX_CONTENT_BYTES:
            raise refused("too_large", f"The file {_shown(path)} is too large for a snapshot.")
        line = Entry(b"f", path, stat.S_IMODE(info.st_mode), info.st_size, read).line()
        self._take(info, line)
        if whole and self._trusted and self._settled(info) and info.st_ino not in self._mapped:
            self._remember(path, _state(info) + line)

    def _remember(self, path: bytes, known: bytes) -> None:
        if len(self._next) < MAX_KNOWN:
            self._next[path] = known

    def _settled(self, info: os.stat_result) -> bool:
        """Whether a later change is sure to move the time of the last change away from what it is now."""
        margin = TICK_NS if info.st_ctime_ns % SECOND_NS else 2 * SECOND_NS
        return info.st_ctime_ns < self._begun - margin

    def _take(self, info: os.stat_result, line: bytes) -> None:
        found = self._found
        found.files += 1
        found.bytes += info.st_size
        found.data_bytes += (
            info.st_size if info.st_size <= CHUNK_BYTES else data_bytes(info.st_size, parse(line).content)
        )
        self._check(0)
        found.add(line, info.st_blocks)

    def _check(self, more: int) -> None:
        if self._found.data_bytes + more > self._max:
            raise refused(
                "too_large", f"The workspace holds more than the {self._max >> 20} MiB that a snapshot may have."
            )

    def _content(self, fd: int, size: int) -> Generator[None, None, bytes | None]:
        """The list of a file's pieces; None when it became shorter. Holes are not read."""
        runs: list[tuple[bytes, int]] = []
        place, hashed = 0, 0
        while place < size:
            first = _next_data(fd, place, size)
            if (holes := (first - place) // CHUNK_BYTES if first < size else -(-(size - place) // CHUNK_BYTES)) > 0:
                _append(runs, ZERO, holes)
                place += holes * CHUNK_BYTES
                continue
            data = os.pread(fd, min(CHUNK_BYTES, size - place), place)
            if len(data) < min(CHUNK_BYTES, size - place):
                return None
            self._found.read_bytes += len(data)
            hashed += len(data)
            self._check(hashed)
            _append(runs, digest(data), 1)
            place += len(data)
            if self._clock.spent():
                yield
                self._clock.start()
        return b",".join(name if times == 1 else b"%s*%d" % (name, times) for name, times in runs)


def digest(data: bytes) -> bytes:
    """The name of a piece."""
    import hashlib  # noqa: PLC0415 - 4 MiB that only sandboxes with snapshots pay

    if data == (ZEROS if len(data) == CHUNK_BYTES else ZEROS[: len(data)]):
        return ZERO
    return hashlib.sha256(data).hexdigest().encode()


def _append(runs: list[tuple[bytes, int]], name: bytes, times: int) -> None:
    if runs and runs[-1][0] == name:
        runs[-1] = (name, runs[-1][1] + times)
    else:
        runs.append((name, times))


def _next_data(fd: int, place: int, size: int) -> int:
    """Where the next bytes that may not be zero begin; `size` when there are none."""
    try:
        return os.lseek(fd, place, os.SEEK_DATA)
    except OSError as problem:
        return size if problem.errno == errno.ENXIO else place


def _state(info: os.stat_result) -> bytes:
    return STATE.pack(info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_mode)


def _shown(path: bytes) -> str:
    text = path.decode("utf-8", "backslashreplace")
    return text if len(text) <= 120 else text[:117] + "..."
