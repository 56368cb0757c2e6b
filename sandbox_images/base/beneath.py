"""Paths of the workspace, opened by the kernel so that none leads out of it.

`openat2(RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS)` resolves and opens in one step, so a path can't be swapped in between.
Where the kernel lacks it, and for absolute symbolic links that point into the workspace, the path is walked one folder
handle at a time, no symbolic link followed by the kernel.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sandbox_images.base.mcp_stdio import ProtocolError, refused
from sandbox_images.base.path_text import read
from sandbox_images.base.processes import libc

MOUNT = "/workspace"  # how user code names the workspace
MAX_PATH_BYTES, MAX_NAME_BYTES, MAX_LINKS = 4095, 255, 40
OPENAT2 = 437
BENEATH_NO_MAGICLINKS = 0x08 | 0x02
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
NEW_FILE_MODE, NEW_FOLDER_MODE = 0o644, 0o755


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def clean(path: object) -> str:
    """The path relative to the workspace, "." for itself. Raises ProtocolError invalid_path."""
    if not isinstance(path, str) or not path:
        raise refused("invalid_path", "A path must be a text that is not empty.")
    try:
        path = read(path)
    except UnicodeEncodeError:
        raise refused("invalid_path", "The path holds a character that no file name can hold.") from None
    if "\x00" in path:
        raise refused("invalid_path", "A path can't hold a NUL character.")
    try:
        raw = os.fsencode(path)
    except UnicodeEncodeError:
        raise refused("invalid_path", "The path holds a character that no file name can hold.") from None
    if len(raw) > MAX_PATH_BYTES or any(len(name) > MAX_NAME_BYTES for name in raw.split(b"/")):
        raise refused("invalid_path", f"The path is too long: at most {MAX_PATH_BYTES} bytes, {MAX_NAME_BYTES} a name.")
    names: list[str] = []
    if path.startswith("/"):
        if path != MOUNT and not path.startswith(MOUNT + "/"):
            raise refused("invalid_path", f"{_short(path)} is outside the workspace: use a path relative to {MOUNT}.")
        path = path[len(MOUNT) :]
    for name in path.split("/"):
        if name == "..":
            if not names:
                raise refused("invalid_path", f"{_short(path)} leads out of the workspace.")
            names.pop()
        elif name not in ("", "."):
            names.append(name)
    return "/".join(names) or "."


def _short(path: str) -> str:
    return path if len(path) <= 120 else path[:117] + "..."


def split(path: str) -> tuple[str, str]:
    """(folder, name) of a clean path."""
    folder, _, name = path.rpartition("/")
    return folder or ".", name


def explain(problem: OSError, path: str) -> ProtocolError:
    """What an OSError of the file system means to the caller."""
    shown = _short(path)
    if problem.errno in (errno.EXDEV, errno.ELOOP):
        return refused(
            "invalid_path", f"{shown} leads out of the workspace, or round in circles, through a symbolic link."
        )
    if problem.errno == errno.ENOENT:
        return refused("not_found", f"There is no {shown} in the workspace.")
    if problem.errno == errno.ENOTDIR:
        return refused("not_found", f"There is no {shown}: a part of the path is not a folder.")
    if problem.errno == errno.EISDIR:
        return refused("is_directory", f"{shown} is a folder.")
    if problem.errno in (errno.EEXIST, errno.ENOTEMPTY):
        return refused("exists", f"{shown} exists already.")
    if problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return refused("disk_full", f"The disk is full: {shown} was not written. Delete files, then try again.")
    if problem.errno in (errno.ENXIO, errno.ENODEV):
        return refused("not_regular", f"{shown} is not a regular file.")
    return refused("invalid_path", f"{shown} can't be used: {(problem.strerror or str(problem)).rstrip('.')}.")


class Workspace:
    """The file tree below one folder. Methods take clean paths and raise OSError, or ProtocolError where they say so."""

    def __init__(self, root: str, fd: int | None = None) -> None:
        """`fd`: a handle of the folder, when it is open already."""
        self.root = root
        self.fd = os.open(root, FOLDER) if fd is None else fd
        self._openat2 = True

    def open(self, path: str, flags: int, mode: int = NEW_FILE_MODE) -> int:
        """A descriptor of what `path` names. Symbolic links that stay inside are followed unless O_NOFOLLOW is given."""
        flags |= os.O_CLOEXEC  # openat2 refuses flags that make no sense together, so nothing else is added
        if self._openat2:
            how = _How(flags, mode if flags & os.O_CREAT else 0, BENEATH_NO_MAGICLINKS)
            name = ctypes.c_char_p(os.fsencode(path))
            fd: int = libc.syscall(OPENAT2, self.fd, name, ctypes.byref(how), ctypes.c_size_t(ctypes.sizeof(how)))
            if fd >= 0:
                return fd
            number = ctypes.get_errno()
            if number in (errno.ENOSYS, errno.EPERM) and not self._probe():
                self._openat2 = False
            elif (
                number != errno.EXDEV
            ):  # EXDEV: perhaps an absolute link into the workspace, which the walk understands
                raise OSError(number, os.strerror(number), path)
        return self._walk(path, flags, mode)

    def _probe(self) -> bool:
        """Whether openat2 works at all here."""
        how = _How(FOLDER, 0, BENEATH_NO_MAGICLINKS)
        fd: int = libc.syscall(OPENAT2, self.fd, b".", ctypes.byref(how), ctypes.c_size_t(ctypes.sizeof(how)))
        if fd >= 0:
            os.close(fd)
        return fd >= 0

    def _walk(self, path: str, flags: int, mode: int) -> int:
        """Open component by component, with a stack of folder handles instead of the kernel's `..`."""
        todo = [name for name in path.split("/") if name not in ("", ".")][::-1]
        stack, links = [os.dup(self.fd)], 0
        try:
            while todo:
                name = todo.pop()
                if name == "..":
                    if len(stack) == 1:
                        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
                    os.close(stack.pop())
                    continue
                if not todo and flags & os.O_NOFOLLOW:
                    return os.open(name, flags, mode, dir_fd=stack[-1])
                target = self._link_target(name, stack[-1])
                if target is not None:
                    links += 1
                    if links > MAX_LINKS:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                    if target.startswith("/"):
                        target = self._inside(target, path)
                        while len(stack) > 1:
                            os.close(stack.pop())
                    todo += [part for part in target.split("/") if part not in ("", ".")][::-1]
                elif todo:
                    stack.append(os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=stack[-1]))
                else:
                    return os.open(name, flags | os.O_NOFOLLOW, mode, dir_fd=stack[-1])
            return os.open(".", flags & ~os.O_CREAT, dir_fd=stack[-1])
        finally:
            for fd in stack:
                os.close(fd)

    def _inside(self, target: str, path: str) -> str:
        for prefix in (MOUNT, self.root):
            if target == prefix or target.startswith(prefix + "/"):
                return target[len(prefix) :]
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)

    @staticmethod
    def _link_target(name: str, folder: int) -> str | None:
        try:
            return os.readlink(name, dir_fd=folder)
        except OSError as problem:
            if problem.errno in (errno.EINVAL, errno.ENOENT):
                return None
            raise

    @contextmanager
    def folder(self, path: str) -> Iterator[int]:
        """A handle of a folder of any depth, closed at the end."""
        fd = self._deep(path)
        try:
            yield fd
        finally:
            os.close(fd)

    def _deep(self, path: str) -> int:
        if len(os.fsencode(path)) < MAX_PATH_BYTES:
            return self.open(path, FOLDER)
        fd = os.dup(self.fd)
        for name in path.split("/"):  # deeper than a path can say: one step at a time
            below = os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=fd)
            os.close(fd)
            fd = below
        return fd

    def lstat(self, path: str) -> os.stat_result:
        """Of the thing itself, also when it is a symbolic link."""
        if path == ".":
            return os.fstat(self.fd)
        folder, name = split(path)
        with self.folder(folder) as fd:
            return os.stat(name, dir_fd=fd, follow_symlinks=False)

    def open_regular(self, path: str) -> tuple[int, os.stat_result]:
        """For reading; never waits for a FIFO. Raises ProtocolError."""
        try:
            fd = self.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as problem:
            raise explain(problem, path) from problem
        info = os.fstat(fd)
        if stat.S_ISREG(info.st_mode):
            return fd, info
        os.close(fd)
        if stat.S_ISDIR(info.st_mode):
            raise refused("is_directory", f"{_short(path)} is a folder.")
        raise refused("not_regular", f"{_short(path)} is not a regular file.")

    def make_folders(self, path: str) -> None:
        """Make a folder and those above it. Raises ProtocolError."""
        if path == ".":
            return
        done = ""
        for name in path.split("/"):
            step = f"{done}/{name}" if done else name
            try:
                with self.folder(done or ".") as fd, suppress(FileExistsError):
                    os.mkdir(name, NEW_FOLDER_MODE, dir_fd=fd)
                with self.folder(step):
                    pass
            except NotADirectoryError:
                raise refused(
                    "invalid_path", f"{_short(step)} is not a folder, so nothing can be put below it."
                ) from None
            except OSError as problem:
                raise explain(problem, step) from problem
            done = step

    def create(self, path: str, flags: int) -> int:
        """A new file with its folders, open for writing. Raises ProtocolError, OSError."""
        folder, name = split(path)
        self.make_folders(folder)
        with self.folder(folder) as fd:
            return os.open(
                name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, NEW_FILE_MODE, dir_fd=fd
            )
