"""The file tree of a fake session: paths to bytes, in memory."""

from __future__ import annotations

import io
import tarfile
import time
from dataclasses import dataclass, field
from typing import Any


class Refused(Exception):  # noqa: N818 - reads as the answer it becomes
    """A refusal of the worker extension; `kind` as in docs/reference/sandbox-protocol.md."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind, self.message = kind, message


@dataclass
class FakeWorkspace:
    """Files by relative path; folders are those named in `folders` and the parents of files. `disk_bytes` bounds the sum."""

    disk_bytes: int = 1 << 30
    files: dict[str, bytes] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)

    def clean(self, path: str) -> str:
        """The path relative to the workspace, "" for itself. Raises Refused when it leaves it."""
        if "\0" in path or len(path) > 4096:
            raise Refused("invalid_path", "The path holds a NUL or is too long.")
        relative = path.removeprefix("/workspace") if path == "/workspace" or path.startswith("/workspace/") else path
        if relative.startswith("/") and not path.startswith("/workspace"):
            raise Refused("invalid_path", f"{path} is outside the workspace.")
        parts = [part for part in relative.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise Refused("invalid_path", f"{path} leaves the workspace.")
        return "/".join(parts)

    def kind(self, clean: str) -> str | None:
        if clean in self.files:
            return "file"
        known = clean == "" or clean in self.folders
        return "dir" if known or any(name.startswith(clean + "/") for name in (*self.files, *self.folders)) else None

    def stat(self, path: str) -> dict[str, Any]:
        clean = self.clean(path)
        kind = self.kind(clean)
        if kind is None:
            raise Refused("not_found", f"There is no {path}.")
        size = len(self.files.get(clean, b""))
        return {
            "path": clean,
            "kind": kind,
            "bytes": size,
            "mtime": time.time(),
            "mode": 0o644 if kind == "file" else 0o755,
        }

    def list(self, path: str, limit: int) -> dict[str, Any]:
        clean = self.clean(path)
        if self.stat(path)["kind"] != "dir":
            raise Refused("not_regular", f"{path} is not a folder.")
        prefix = f"{clean}/" if clean else ""
        names = sorted(
            {n[len(prefix) :].split("/")[0] for n in (*self.files, *self.folders) if n.startswith(prefix)} - {""}
        )
        entries = [{**self.stat(prefix + name), "name": name} for name in names[:limit]]
        return {"path": clean, "entries": entries, "truncated": len(names) > limit}

    def read(self, path: str) -> bytes:
        clean = self.clean(path)
        kind = self.kind(clean)
        if kind is None:
            raise Refused("not_found", f"There is no {path}.")
        if kind == "dir":
            raise Refused("is_directory", f"{path} is a folder.")
        return self.files[clean]

    def write(self, path: str, data: bytes) -> None:
        clean = self.clean(path)
        if self.kind(clean) == "dir":
            raise Refused("is_directory", f"{path} is a folder.")
        if self.size() - len(self.files.get(clean, b"")) + len(data) > self.disk_bytes:
            raise Refused("disk_full", "The workspace is full.")
        self.files[clean] = data

    def delete(self, path: str) -> None:
        clean = self.clean(path)
        if clean == "":
            raise Refused("invalid_path", "The workspace itself can't be deleted.")
        if self.kind(clean) is None:
            raise Refused("not_found", f"There is no {path}.")
        for name in [n for n in self.files if n == clean or n.startswith(clean + "/")]:
            del self.files[name]
        self.folders = {n for n in self.folders if n != clean and not n.startswith(clean + "/")}

    def size(self) -> int:
        return sum(len(data) for data in self.files.values())

    def pack(self) -> bytes:
        """The whole tree as a tar."""
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as tar:
            for name, data in sorted(self.files.items()):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        return out.getvalue()

    def unpack(self, archive: bytes) -> int:
        """All regular files of a tar, or none when a member is refused; how many."""
        found: dict[str, bytes] = {}
        folders: set[str] = set()
        try:
            with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
                for member in tar:
                    content = tar.extractfile(member) if member.isfile() else None
                    if content is not None:
                        found[self.clean(member.name)] = content.read()
                    elif member.isdir():
                        folders.add(self.clean(member.name))
                    else:
                        raise Refused("bad_archive", f"{member.name} is not a file or folder.")
        except (tarfile.TarError, EOFError) as problem:
            raise Refused("bad_archive", f"not a tar archive: {problem}") from problem
        if self.size() + sum(len(data) for data in found.values()) > self.disk_bytes:
            raise Refused("disk_full", "The workspace is full.")
        self.files.update(found)
        self.folders |= folders - {""}
        return len(found)
