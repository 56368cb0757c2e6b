"""The workspace's tree by exact names: no symbolic link is ever followed, not even one that stays inside.

Snapshot and restore walk it by this. Where user code has shut itself, and so us, out of a folder or a file by its mode,
the mode is loosened for the moment and put back afterwards.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from contextlib import suppress

from sandbox_images.base.beneath import FOLDER, OPENAT2, Workspace, _How
from sandbox_images.base.processes import libc

EXACT = 0x08 | 0x04 | 0x02  # RESOLVE_BENEATH, NO_SYMLINKS, NO_MAGICLINKS
HOP_BYTES = 4000  # of a path that is opened in one step
O_PATH = 0o10000000
FULL = 0o700
# where the time of the last change can be trusted to move with each change of the content
TRUSTED_FILE_SYSTEMS = {0xEF53, 0x58465342, 0x9123683E, 0x794C7630, 0xF2F52010, 0x2FC12FC1}


class Tree:
    """`put_back` must be called once the walk is over. Methods raise OSError."""

    def __init__(self, workspace: Workspace) -> None:
        self.root = workspace.fd
        self._openat2 = True
        self._loosened: list[tuple[bytes, int]] = []

    def folder(self, path: bytes, *, to_change: bool = False) -> int:
        """A handle of a folder, b"" for the workspace; whoever asked closes it. ELOOP or ENOTDIR: it is a link or no folder."""
        try:
            fd = self._folder(path, FOLDER)
        except PermissionError:
            self._loosen(path)
            return self._folder(path, FOLDER)
        if to_change and os.fstat(fd).st_mode & FULL != FULL:
            self._loosen(path)
        return fd

    def _folder(self, path: bytes, flags: int) -> int:
        if not path:
            return os.open(".", flags, dir_fd=self.root)
        fd = os.dup(self.root)
        try:
            for hop in _hops(path):
                below = self._step(fd, hop, flags)
                os.close(fd)
                fd = below
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _step(self, fd: int, hop: bytes, flags: int) -> int:
        if self._openat2:
            how = _How(flags | os.O_NOFOLLOW, 0, EXACT)
            found: int = libc.syscall(
                OPENAT2, fd, ctypes.c_char_p(hop), ctypes.byref(how), ctypes.c_size_t(ctypes.sizeof(how))
            )
            if found >= 0:
                return found
            number = ctypes.get_errno()
            if number not in (errno.ENOSYS, errno.EPERM, errno.EAGAIN):
                raise OSError(number, os.strerror(number))
            self._openat2 = number == errno.EAGAIN
        found = os.dup(fd)
        for name in hop.split(b"/"):
            try:
                below = os.open(name, flags | os.O_NOFOLLOW, dir_fd=found)
            finally:
                os.close(found)
            found = below
        return found

    def _loosen(self, path: bytes) -> None:
        """Let ourselves into a folder and those above it."""
        names = path.split(b"/") if path else []
        for count in range(len(names) + 1):
            place = b"/".join(names[:count])
            fd = self._folder(place, O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                mode = stat.S_IMODE(os.fstat(fd).st_mode)
                if mode & FULL != FULL:
                    os.chmod(f"/proc/self/fd/{fd}", mode | FULL)
                    self._loosened.append((place, mode))
            finally:
                os.close(fd)

    def settled(self, path: bytes) -> None:
        """A folder has got another mode for good: nothing to put back."""
        self._loosened = [(place, mode) for place, mode in self._loosened if place != path]

    def put_back(self) -> None:
        while self._loosened:
            path, mode = self._loosened.pop()
            with suppress(OSError):
                fd = self._folder(path, O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    os.chmod(f"/proc/self/fd/{fd}", mode)
                finally:
                    os.close(fd)

    @staticmethod
    def open_file(name: bytes, folder: int) -> int:
        """For reading; never follows a link, never waits for a FIFO."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            return os.open(name, flags, dir_fd=folder)
        except PermissionError:
            handle = os.open(name, O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                info = os.fstat(handle)
                if not stat.S_ISREG(info.st_mode):
                    raise
                mode, place = stat.S_IMODE(info.st_mode), f"/proc/self/fd/{handle}"
                os.chmod(place, mode | 0o400)
                try:
                    return os.open(place, flags & ~os.O_NOFOLLOW)
                finally:
                    os.chmod(place, mode)
            finally:
                os.close(handle)

    @staticmethod
    def chmod(name: bytes, folder: int, mode: int) -> None:
        """Of the thing itself; a symbolic link is refused with ELOOP."""
        fd = os.open(name, O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            if stat.S_ISLNK(os.fstat(fd).st_mode):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            os.chmod(f"/proc/self/fd/{fd}", mode)
        finally:
            os.close(fd)

    def keeps_time(self) -> bool:
        """Whether a change of content always moves the time of the last change (statfs tells the file system)."""
        answer = ctypes.create_string_buffer(256)
        if libc.fstatfs(self.root, answer) != 0:
            return False
        return int.from_bytes(answer.raw[:8], "little") in TRUSTED_FILE_SYSTEMS


def parted(path: bytes) -> tuple[bytes, bytes]:
    """(folder, name)."""
    folder, _, name = path.rpartition(b"/")
    return folder, name


def _hops(path: bytes) -> list[bytes]:
    if len(path) <= HOP_BYTES:
        return [path]
    hops: list[bytes] = []
    names: list[bytes] = []
    length = 0
    for name in path.split(b"/"):
        if length + len(name) + 1 > HOP_BYTES:
            hops.append(b"/".join(names))
            names, length = [], 0
        names.append(name)
        length += len(name) + 1
    return [*hops, b"/".join(names)]


def other_processes() -> list[str]:
    """Of the sandbox: the pids that /proc shows, without our own."""
    return [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def shared_mappings() -> set[int] | None:
    """Inodes that some process of the sandbox has mapped for writing; None when that can't be told.

    A store through a mapping moves no time: such files are read each time.
    """
    found: set[int] = set()
    for pid in other_processes():
        try:
            with open(f"/proc/{pid}/maps", "rb") as file:
                for line in file:
                    fields = line.split(None, 5)
                    if len(fields) > 5 and fields[1][3:4] == b"s" and b"w" in fields[1]:
                        found.add(int(fields[4]))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        except (OSError, ValueError):
            return None
    return found
