"""The workspace as a tar stream, out and in. Runs in a helper: tarfile is large, and a tree may be, too.

What comes in is unpacked into a folder of our own first. Only when every member was good is it moved into place, so a
refused archive changes nothing.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterator
from contextlib import suppress

from sandbox_images.base.annotations import Any, BinaryIO
from sandbox_images.base.beneath import FOLDER, Workspace, clean, explain, split
from sandbox_images.base.mcp_stdio import ProtocolError, refused
from sandbox_images.workspace.file_store import INCOMING

MAX_MEMBERS = 1_000_000
COPY_BYTES = 256 << 10
MEMBER_COST = 512  # what a member takes beside its content


class Exactly:
    """A file of a size that was announced: cut, or padded with zeros, when it changes while it is read."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._left = file, size

    def read(self, count: int = -1) -> bytes:
        count = self._left if count < 0 else min(count, self._left)
        data = self._file.read(count)
        self._left -= count
        return data + bytes(count - len(data))


def pack(workspace: Workspace, to_fd: int) -> dict[str, Any]:
    """Write the whole tree as a tar. Sockets, FIFOs and devices are left out."""
    files = 0
    with (
        open(to_fd, "wb", buffering=1 << 18, closefd=False) as stream,
        tarfile.open(
            fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape"
        ) as tar,
    ):
        for path, info in _tree(workspace):
            files += _pack_one(workspace, tar, path, info)
            tar.members = []  # type: ignore[attr-defined] # else it remembers each
    return {"files": files}


def _tree(workspace: Workspace) -> Iterator[tuple[str, os.stat_result]]:
    folders = [""]
    while folders:
        folder = folders.pop()
        try:
            with workspace.folder(folder or ".") as fd, os.scandir(fd) as entries:
                found = sorted((entry.name, entry.stat(follow_symlinks=False)) for entry in entries)
        except OSError:
            continue
        below = []
        for name, info in found:
            path = f"{folder}/{name}" if folder else name
            if path == INCOMING:
                continue
            yield path, info
            if stat.S_ISDIR(info.st_mode):
                below.append(path)
        folders += below[::-1]


def _pack_one(workspace: Workspace, tar: tarfile.TarFile, path: str, info: os.stat_result) -> int:
    member = tarfile.TarInfo(path)
    member.mode, member.mtime = stat.S_IMODE(info.st_mode) & 0o777, info.st_mtime
    if stat.S_ISDIR(info.st_mode):
        member.type = tarfile.DIRTYPE
        tar.addfile(member)
    elif stat.S_ISLNK(info.st_mode):
        folder, name = split(path)
        try:
            with workspace.folder(folder) as fd:
                member.linkname = os.readlink(name, dir_fd=fd)
        except OSError:
            return 0
        member.type = tarfile.SYMTYPE
        tar.addfile(member)
    elif stat.S_ISREG(info.st_mode):
        try:
            file_fd, info = workspace.open_regular(path)
        except ProtocolError:
            return 0  # deleted meanwhile, or closed to us by its mode
        member.size = info.st_size
        with open(file_fd, "rb") as file:
            tar.addfile(member, Exactly(file, info.st_size))
    else:
        return 0
    return 1


def unpack(workspace: Workspace, staging: str, room: int, from_fd: int) -> dict[str, Any]:
    """Read a tar to its end and put all of it in place: {"files"} or {"kind", "message"} when it was refused."""
    try:
        workspace.make_folders(staging)
        place = Workspace(staging, workspace.open(staging, FOLDER))
        with open(from_fd, "rb", buffering=1 << 18, closefd=False) as stream:
            unpacked = Unpacked(place, room)
            unpacked.read(stream)
            while stream.read(COPY_BYTES):
                pass  # what follows the end of the archive
        Merge(workspace, place, unpacked.folders).run()
    except ProtocolError as problem:
        return {"kind": problem.kind or "bad_archive", "message": problem.message}
    except (tarfile.TarError, ValueError, EOFError) as problem:
        return {"kind": "bad_archive", "message": f"This is no tar archive that can be read to its end: {problem}."}
    except OSError as problem:
        refusal = explain(problem, "the archive")
        return {"kind": refusal.kind, "message": refusal.message}
    return {"files": unpacked.members}


class Unpacked:
    """The staged content of an archive. Raises ProtocolError at the first member that is refused."""

    def __init__(self, place: Workspace, room: int) -> None:
        self._place, self._room = place, room
        self._links: set[str] = set()
        self.folders: dict[str, tuple[int, float]] = {}
        self.members = 0

    def read(self, stream: BinaryIO) -> None:
        with tarfile.open(fileobj=stream, mode="r|", encoding="utf-8", errors="surrogateescape") as tar:
            for member in tar:
                tar.members = []  # type: ignore[attr-defined] # else it remembers each
                self._take(tar, member)

    def _take(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        path = self._path(member.name)
        self.members += 1
        self._room -= member.size + MEMBER_COST
        if self._room < 0 or self.members > MAX_MEMBERS:
            raise refused("too_large", "The archive does not fit into the workspace's disk quota.")
        parts = path.split("/")
        if any("/".join(parts[:count]) in self._links for count in range(1, len(parts))):
            raise refused("bad_archive", f"{path[:120]} goes through a symbolic link of the archive.")
        if member.isdir():
            if path in self._links:
                raise refused("bad_archive", f"{path[:120]} is both a symbolic link and a folder.")
            self._place.make_folders(path)
            if path != ".":
                self.folders[path] = (member.mode & 0o777, member.mtime)
        elif member.issym():
            self._new(path)
            folder, name = split(path)
            with self._place.folder(folder) as fd:
                os.symlink(member.linkname, name, dir_fd=fd)
            self._links.add(path)
        elif member.isreg():
            self._file(tar, member, path)
        else:
            raise refused("bad_archive", f"{path[:120]} is neither a file, a folder nor a symbolic link.")

    @staticmethod
    def _path(name: str) -> str:
        if name.startswith("/") or ".." in name.split("/"):
            raise refused("bad_archive", f"{name[:120]} leads out of the workspace.")
        try:
            return clean(name or ".")
        except ProtocolError as problem:
            raise refused("bad_archive", f"A member has a name that can't be used: {problem.message}") from problem

    def _new(self, path: str) -> None:
        """Make way for a member: its folder, and nothing of the same name. The last one of a name counts."""
        if path == ".":
            raise refused("bad_archive", "A member that is no folder has the name of the workspace itself.")
        folder, name = split(path)
        self._place.make_folders(folder)
        self._links.discard(path)
        with self._place.folder(folder) as fd, suppress(FileNotFoundError):
            os.unlink(name, dir_fd=fd)

    def _file(self, tar: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
        self._new(path)
        content = tar.extractfile(member)
        fd = self._place.create(path, os.O_WRONLY)
        try:
            left = member.size
            while left and content is not None:
                data = content.read(min(COPY_BYTES, left))
                if not data:
                    raise refused("bad_archive", f"The archive ends in the middle of {path[:120]}.")
                left -= len(data)
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
            os.fchmod(fd, member.mode & 0o777)
            os.utime(fd, (member.mtime, member.mtime))
        finally:
            os.close(fd)


class Merge:
    """Moves a staged tree into the workspace: first looked through for what can't be, then done."""

    def __init__(self, workspace: Workspace, place: Workspace, folders: dict[str, tuple[int, float]]) -> None:
        self._workspace, self._place, self._folders = workspace, place, folders

    def run(self) -> None:
        self._walk(move=False)
        self._walk(move=True)
        for path in sorted(self._folders, key=lambda path: -path.count("/")):
            mode, mtime = self._folders[path]
            with self._workspace.folder(path) as fd:
                os.utime(fd, (mtime, mtime))
                os.fchmod(fd, mode)

    def _walk(self, *, move: bool) -> None:
        folders = ["."]
        while folders:
            folder = folders.pop()
            with self._place.folder(folder) as source, self._workspace.folder(folder) as target:
                for name in sorted(os.listdir(source)):
                    path = name if folder == "." else f"{folder}/{name}"
                    if self._both_folders(path, name, source, target):
                        folders.append(path)
                    elif move:
                        os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)

    @staticmethod
    def _both_folders(path: str, name: str, source: int, target: int) -> bool:
        """Whether to go on below. Raises ProtocolError when one is a folder and the other is not."""
        try:
            there = os.stat(name, dir_fd=target, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return False
        ours = os.stat(name, dir_fd=source, follow_symlinks=False).st_mode
        if stat.S_ISDIR(there) != stat.S_ISDIR(ours):
            raise refused(
                "bad_archive", f"{path[:120]} is a folder on one side only, in the archive or in the workspace."
            )
        return stat.S_ISDIR(ours)
