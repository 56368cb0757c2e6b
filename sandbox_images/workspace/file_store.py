"""Whole files of the workspace: read within bounds, written in one step, moved, deleted."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator

from sandbox_images.base.annotations import Any
from sandbox_images.base.beneath import FOLDER, NEW_FILE_MODE, Workspace, explain, split
from sandbox_images.base.event_loop import Clock
from sandbox_images.base.mcp_stdio import ProtocolError, refused
from sandbox_images.base.path_text import spell
from sandbox_images.workspace.quota import Quota
from sandbox_images.workspace.workspace_scan import BLOCK, OWN_FOLDER

INCOMING = f"{OWN_FOLDER}/incoming"  # half-written files: the same file system, out of the way of listings
KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "symlink"}


def kind_of(mode: int) -> str:
    return KINDS.get(stat.S_IFMT(mode), "other")


def describe(info: os.stat_result) -> dict[str, Any]:
    """`kind`, `bytes`, `mtime`, `mode` of a file, as the protocol says them."""
    return {
        "kind": kind_of(info.st_mode),
        "bytes": info.st_size,
        "mtime": info.st_mtime,
        "mode": stat.S_IMODE(info.st_mode),
    }


class Draft:
    """A file being written beside its target. `commit` puts it in place, `discard` leaves no trace."""

    def __init__(self, store: FileStore, path: str, fd: int, temporary: str, credit: int) -> None:
        self._store, self.path, self._fd, self._temporary, self._credit = store, path, fd, temporary, credit
        self.bytes = 0

    def write(self, data: bytes) -> None:
        """Raises ProtocolError: too_large, disk_full."""
        if self.bytes + len(data) > self._store.quota.left() + self._credit:
            raise refused("too_large", f"{self.path} does not fit into the workspace's disk quota.")
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as problem:
            raise explain(problem, self.path) from problem
        self.bytes += len(data)

    def commit(self) -> None:
        """Raises ProtocolError; then nothing has changed."""
        os.close(self._fd)
        self._fd = -1
        try:
            self._store.put_in_place(self._temporary, self.path)
        finally:
            self.discard()

    def discard(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        folder, name = split(self._temporary)
        try:
            with self._store.workspace.folder(folder) as fd:
                os.unlink(name, dir_fd=fd)
        except OSError:
            pass  # moved into place, or deleted by user code


class FileStore:
    """Paths are clean (beneath.clean). Methods raise ProtocolError."""

    def __init__(self, workspace: Workspace, quota: Quota) -> None:
        self.workspace, self.quota = workspace, quota
        self._drafts = 0

    def lstat(self, path: str) -> os.stat_result:
        try:
            return self.workspace.lstat(path)
        except OSError as problem:
            raise explain(problem, path) from problem

    def draft(self, path: str) -> Draft:
        """Begin to write a file. What can't work is refused now: a folder at the path, a file above it."""
        if path == ".":
            raise refused("is_directory", "The workspace itself is a folder.")
        mode, credit = NEW_FILE_MODE, 0
        try:
            info = self.workspace.lstat(path)
        except FileNotFoundError:
            pass
        except NotADirectoryError:
            raise refused(
                "invalid_path", f"{path[:120]}: a part of the path is a file, so nothing can be put below it."
            ) from None
        except OSError as problem:
            raise explain(problem, path) from problem
        else:
            if stat.S_ISDIR(info.st_mode):
                raise refused("is_directory", f"{path[:120]} is a folder.")
            if not stat.S_ISREG(info.st_mode) and not stat.S_ISLNK(info.st_mode):
                raise refused("not_regular", f"{path[:120]} is not a regular file.")
            if stat.S_ISLNK(info.st_mode):
                path = self._link_end(path)
            else:
                mode, credit = stat.S_IMODE(info.st_mode) & 0o777, info.st_blocks * BLOCK
        self._drafts += 1
        temporary = f"{INCOMING}/{os.getpid()}-{self._drafts}-{os.urandom(4).hex()}"
        try:
            fd = self.workspace.create(temporary, os.O_WRONLY)
            os.fchmod(fd, mode)
        except OSError as problem:
            raise explain(problem, path) from problem
        return Draft(self, path, fd, temporary, credit)

    def _link_end(self, path: str) -> str:
        """Where a symbolic link ends, inside the workspace: writing through it writes there."""
        try:
            fd = self.workspace.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as problem:
            raise explain(problem, path) from problem
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise refused("not_regular", f"{path[:120]} is not a regular file.")
            place, root = os.readlink(f"/proc/self/fd/{fd}"), os.readlink(f"/proc/self/fd/{self.workspace.fd}")
        finally:
            os.close(fd)
        # only a name, resolved again beneath the workspace by every step that follows
        return place[len(root) :].lstrip("/") if place.startswith(root + "/") else path

    def put_in_place(self, temporary: str, path: str) -> None:
        folder, name = split(path)
        self.workspace.make_folders(folder)
        source_folder, source = split(temporary)
        try:
            with self.workspace.folder(folder) as to, self.workspace.folder(source_folder) as come_from:
                os.rename(source, name, src_dir_fd=come_from, dst_dir_fd=to)
        except OSError as problem:
            raise explain(problem, path) from problem
        self.quota.stale = True

    def write(self, path: str, data: bytes) -> int:
        """The whole file in one step; its size."""
        draft = self.draft(path)
        try:
            draft.write(data)
            draft.commit()
        finally:
            draft.discard()
        return len(data)

    def read(self, path: str, limit: int) -> bytes:
        """All of a file. Raises ProtocolError too_large beyond `limit` bytes."""
        fd, info = self.workspace.open_regular(path)
        try:
            if info.st_size > limit:
                raise refused(
                    "too_large", f"{path[:120]} has {info.st_size} bytes; at most {limit} can be worked on here."
                )
            parts = []
            while data := os.read(fd, 1 << 20):
                parts.append(data)
            return b"".join(parts)
        except OSError as problem:
            raise explain(problem, path) from problem
        finally:
            os.close(fd)

    def move(self, source: str, destination: str, *, overwrite: bool) -> None:
        info = self.lstat(source)
        if source == "." or destination == ".":
            raise refused("invalid_path", "The workspace itself can't be moved.")
        if destination == source or destination.startswith(source + "/"):
            raise refused("invalid_path", f"{source[:120]} can't be moved into itself.")
        try:
            there = self.workspace.lstat(destination)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as problem:
            raise explain(problem, destination) from problem
        else:
            if not overwrite or stat.S_ISDIR(there.st_mode) or stat.S_ISDIR(info.st_mode):
                raise refused("exists", f"{destination[:120]} exists already.")
        self.put_in_place(source, destination)

    def delete(self, path: str, *, recursive: bool) -> Generator[None, None, None]:
        """In slices; a folder goes with all in it when `recursive`, else only when it is empty."""
        if path == ".":
            raise refused("invalid_path", "The workspace itself can't be deleted.")
        info = self.lstat(path)
        folder, name = split(path)
        self.quota.stale = True
        try:
            with self.workspace.folder(folder) as fd:
                if not stat.S_ISDIR(info.st_mode):
                    os.unlink(name, dir_fd=fd)
                    return
                if recursive:
                    yield from self._empty(path)
                os.rmdir(name, dir_fd=fd)
        except OSError as problem:
            if problem.errno == errno.ENOTEMPTY:
                raise refused("exists", f"{path[:120]} is a folder that is not empty.") from problem
            raise explain(problem, path) from problem

    def _empty(self, path: str) -> Generator[None, None, None]:
        """Delete all below a folder, deepest first, no symbolic link followed."""
        clock = Clock()
        folders = [path]
        while folders:
            folder, below = folders[-1], []
            self._let_in(folder)
            with self.workspace.folder(folder) as fd, os.scandir(fd) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        below.append(f"{folder}/{entry.name}")
                    else:
                        os.unlink(entry.name, dir_fd=fd)
                    if clock.spent():
                        yield
                        clock.start()
            if below:
                folders += below
                continue
            folders.pop()
            if folder != path:
                parent, name = folder.rpartition("/")[::2]
                with self.workspace.folder(parent) as fd:
                    os.rmdir(name, dir_fd=fd)
            yield

    def _let_in(self, folder: str) -> None:
        """Make a folder one that can be read and changed, whatever its mode: without the right to, it can't even be opened."""
        above, name = split(folder)
        with self.workspace.folder(above) as parent:
            fd = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            mode = stat.S_IMODE(os.fstat(fd).st_mode)
            if mode & 0o700 != 0o700:
                os.chmod(f"/proc/self/fd/{fd}", mode | 0o700)
        finally:
            os.close(fd)

    def listing(
        self, path: str, limit: int, *, recursive: bool = False
    ) -> Generator[None, None, tuple[list[dict[str, Any]], bool]]:
        """(entries sorted by name, whether there are more). Names of entries below are paths from the folder."""
        clock, more = Clock(), False
        found: list[str] = []
        folders = [""]
        while folders and not more:
            inner = folders.pop()
            place = "/".join(part for part in (path if path != "." else "", inner) if part) or "."
            try:
                fd = self.workspace.open(place, FOLDER)
            except OSError as problem:
                if inner:
                    continue
                if problem.errno == errno.ENOTDIR and self._is_file(path):
                    raise refused("not_regular", f"{path[:120]} is not a folder.") from problem
                raise explain(problem, path) from problem
            try:
                with os.scandir(fd) as entries:
                    for entry in entries:
                        if len(found) >= limit and recursive:
                            more = True
                            break
                        name = f"{inner}/{entry.name}" if inner else entry.name
                        found.append(name)
                        if recursive and entry.is_dir(follow_symlinks=False) and name != OWN_FOLDER:
                            folders.append(name)
                        if clock.spent():
                            yield
                            clock.start()
            finally:
                os.close(fd)
        found.sort()
        shown = [self._entry(path, name) for name in found[:limit]]
        return [entry for entry in shown if entry is not None], more or len(found) > limit

    def _is_file(self, path: str) -> bool:
        try:
            return not stat.S_ISDIR(self.workspace.lstat(path).st_mode)
        except OSError:
            return False

    def _entry(self, path: str, name: str) -> dict[str, Any] | None:
        whole = name if path == "." else f"{path}/{name}"
        try:
            return {"name": spell(name), "path": spell(whole), **describe(self.workspace.lstat(whole))}
        except OSError:
            return None  # deleted meanwhile

    def clear_incoming(self) -> Generator[None, None, None]:
        """Half-written files that an earlier sandbox of the session left."""
        try:
            yield from self.delete(INCOMING, recursive=True)
        except ProtocolError:
            return
