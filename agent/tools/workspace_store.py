"""The run's own copy of its workspace: what a new session is filled from, and what is left when the last one has ended.

Names come from a sandbox, so nothing is trusted: every folder is opened relative to its parent without following
symbolic links, files are written beside their place and moved there in one step, and size and number are bounded.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

MAX_FILE_BYTES = 256 << 20
MAX_TOTAL_BYTES = 2 << 30
MAX_FILES = 20_000
_MAX_PARTS, _MAX_PART_BYTES, _MAX_PATH_BYTES = 64, 255, 4_000
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_TEMPORARY = ".toolcrib-part-"


class NotKept(Exception):  # noqa: N818
    """A file that can't be kept here: its name, its size, or the disk. The message says which."""


class WorkspaceStore:
    """Regular files under `folder`, by relative path. Blocking, and safe to use from a thread, one call at a time."""

    def __init__(
        self,
        folder: Path,
        *,
        max_file_bytes: int = MAX_FILE_BYTES,
        max_total_bytes: int = MAX_TOTAL_BYTES,
        max_files: int = MAX_FILES,
    ) -> None:
        self.folder = folder
        self.max_file_bytes, self.max_total_bytes, self.max_files = max_file_bytes, max_total_bytes, max_files
        folder.mkdir(parents=True, exist_ok=True)
        self._remove_unfinished()
        self._sizes = dict(self._walk())

    def files(self) -> dict[str, int]:
        """Sizes by path, sorted."""
        return dict(sorted(self._sizes.items()))

    def add_inputs(self, files: Iterable[Path]) -> list[str]:
        """Copy the run's input files to the top of the workspace, each once; their paths. Not bounded: a person chose them.

        Two of one name get a number. Call it once, when the run starts. Raises OSError, NotKept.
        """
        added = []
        for source in files:
            if source.is_symlink() or not source.is_file():
                source = source.resolve(strict=True)  # noqa: PLW2901 - a person may name a link
            name, number = source.name, 1
            while name in self._sizes:
                number += 1
                name = f"{source.stem}-{number}{source.suffix}"
            with source.open("rb") as stream, self.writer(name, bounded=False) as target:
                shutil.copyfileobj(stream, target.file, 1 << 20)
                target.commit()
            added.append(name)
        return added

    @contextmanager
    def writer(self, path: str, *, bounded: bool = True) -> Iterator[FileWriter]:
        """A file in the making; without `commit` nothing changes. Raises NotKept, also for an OSError of the body."""
        parts = safe_parts(path)
        if bounded and path not in self._sizes and len(self._sizes) >= self.max_files:
            raise NotKept(f"the run's folder holds {self.max_files:,} files already")
        room = self.max_total_bytes - sum(self._sizes.values()) + self._sizes.get(path, 0)
        try:
            parent = self._open_folder(parts[:-1], make=True)
            try:
                for depth in range(1, len(parts)):  # a file that had a folder's name has made place for it
                    self._sizes.pop("/".join(parts[:depth]), None)
                writer = FileWriter(parent, parts[-1], min(self.max_file_bytes, room) if bounded else None)
                try:
                    yield writer
                finally:
                    writer.close()
                if writer.committed:
                    self._forget(path)
                    self._sizes[path] = writer.written
            finally:
                os.close(parent)
        except OSError as problem:
            raise NotKept(_reason(problem)) from problem

    def delete(self, path: str) -> None:
        """Delete a file, or a folder with all in it. What is not there, or has no safe name, is gone already."""
        try:
            parts = safe_parts(path)
            parent = self._open_folder(parts[:-1], make=False)
        except (NotKept, OSError):
            return
        try:
            _remove(parent, parts[-1])
        finally:
            os.close(parent)
        self._forget(path)

    def open(self, path: str) -> IO[bytes]:
        """Raises NotKept, OSError (also for a symbolic link or anything that is no regular file)."""
        parts = safe_parts(path)
        parent = self._open_folder(parts[:-1], make=False)
        try:
            handle = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
        finally:
            os.close(parent)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise NotKept(f"{path} is no regular file")
        return os.fdopen(handle, "rb")

    def _open_folder(self, parts: list[str], *, make: bool) -> int:
        handle = os.open(self.folder, _FOLDER)
        for part in parts:
            try:
                if make:
                    _make_folder(handle, part)
                below = os.open(part, _FOLDER, dir_fd=handle)
            finally:
                os.close(handle)
            handle = below
        return handle

    def _forget(self, path: str) -> None:
        for known in [known for known in self._sizes if known == path or known.startswith(path + "/")]:
            del self._sizes[known]

    def _walk(self) -> Iterator[tuple[str, int]]:
        for root, _, names in os.walk(self.folder):
            for name in names:
                place = Path(root, name)
                status = place.lstat()
                if stat.S_ISREG(status.st_mode):
                    yield place.relative_to(self.folder).as_posix(), status.st_size

    def _remove_unfinished(self) -> None:
        """What an agent that was killed while it fetched a file has left."""
        for root, _, names in os.walk(self.folder):
            for name in names:
                if name.startswith(_TEMPORARY):
                    Path(root, name).unlink(missing_ok=True)


class FileWriter:
    """`file` takes the bytes; `write` counts them against the bound. Made by WorkspaceStore.writer."""

    def __init__(self, parent: int, name: str, limit: int | None) -> None:
        self._parent, self._name, self._limit = parent, name, limit
        self._temporary = f"{_TEMPORARY}{secrets.token_hex(8)}"
        self.committed, self._count = False, 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self.file: IO[bytes] = os.fdopen(os.open(self._temporary, flags, 0o644, dir_fd=parent), "wb")

    @property
    def written(self) -> int:
        return self._count

    def write(self, chunk: bytes) -> None:
        """Raises NotKept beyond the bound or when the disk is full."""
        self.expect(self.file.tell() + len(chunk))
        try:
            self.file.write(chunk)
        except OSError as problem:
            raise NotKept(_reason(problem)) from problem

    def expect(self, total: int) -> None:
        """Raises NotKept when `total` bytes would be too many: known before the first byte where the size is announced."""
        if self._limit is not None and total > self._limit:
            raise NotKept(f"it is larger than the {max(self._limit, 0):,} bytes that may be kept")

    def commit(self) -> None:
        """Put the file in its place, whatever was there. Raises NotKept."""
        try:
            self._count = self.file.tell()
            self.file.close()
            with suppress(FileNotFoundError):
                if stat.S_ISDIR(os.stat(self._name, dir_fd=self._parent, follow_symlinks=False).st_mode):
                    _remove(self._parent, self._name)
            os.replace(self._temporary, self._name, src_dir_fd=self._parent, dst_dir_fd=self._parent)
        except OSError as problem:
            raise NotKept(_reason(problem)) from problem
        self.committed = True

    def close(self) -> None:
        with suppress(OSError):
            self.file.close()
        with suppress(OSError):
            os.unlink(self._temporary, dir_fd=self._parent)


def safe_parts(path: str) -> list[str]:
    """The parts of a path that stays inside the workspace. Raises NotKept."""
    try:
        raw = path.encode()
    except UnicodeEncodeError as problem:
        raise NotKept("its name is no valid text") from problem
    parts = path.split("/")
    if not path or b"\0" in raw or len(raw) > _MAX_PATH_BYTES or len(parts) > _MAX_PARTS:
        raise NotKept("its name is empty, too long or holds a NUL")
    if any(part in ("", ".", "..") or len(part.encode()) > _MAX_PART_BYTES for part in parts):
        raise NotKept("its name does not stay inside the workspace")
    if any(part.startswith(_TEMPORARY) for part in parts):
        raise NotKept("its name is one that the agent uses itself")
    return parts


def _make_folder(parent: int, name: str) -> None:
    """A real folder, in the place of a file or link that had the name before."""
    try:
        os.mkdir(name, 0o755, dir_fd=parent)
    except FileExistsError:
        if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=parent)
            os.mkdir(name, 0o755, dir_fd=parent)


def _remove(parent: int, name: str) -> None:
    with suppress(FileNotFoundError):
        if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=parent)
        else:
            os.unlink(name, dir_fd=parent)


def _reason(problem: OSError) -> str:
    return f"the disk said: {problem.strerror or type(problem).__name__}"
