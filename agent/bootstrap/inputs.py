"""The files that a person gives to a run, checked before anything is started."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agent.errors import UsageProblem

MAX_INPUT_BYTES = 1 << 30  # of all files; a sandbox's disk has 1 GiB unless it was given more
_CHUNK = 1 << 20


def check(paths: Iterable[Path]) -> list[Path]:
    """The files, if all of them can go into a workspace. Raises UsageProblem that names every file that can't, and why."""
    files = list(paths)
    problems = [problem for path in files if (problem := _problem(path))]
    problems += _duplicates(files)
    if not problems:
        total = sum(path.stat().st_size for path in files)
        if total > MAX_INPUT_BYTES:
            problems.append(
                f"the files have {total:,} bytes together; at most {MAX_INPUT_BYTES:,} fit into a workspace"
            )
    if problems:
        raise UsageProblem("Wrong --file: " + "\n  ".join(problems))
    return files


def describe(workspace: Path, names: Iterable[str]) -> tuple[dict[str, Any], ...]:
    """{path, bytes, sha256} of files that lie in the workspace. Raises OSError."""
    return tuple(_describe(workspace, name) for name in names)


def _problem(path: Path) -> str | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return f"{path}: there is no such file"
    except OSError as error:
        return f"{path}: {error.strerror}"
    if stat.S_ISDIR(status.st_mode):
        return f"{path}: is a folder; name its files one by one, or pack them into one archive"
    if not stat.S_ISREG(status.st_mode):
        return f"{path}: is no regular file"
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return f"{path}: can't be read ({error.strerror})"
    return None


def _duplicates(files: list[Path]) -> list[str]:
    by_name: dict[str, list[Path]] = {}
    for path in files:
        by_name.setdefault(path.name, []).append(path)
    return [
        f"{' and '.join(map(str, same))}: have the same name; in the workspace all files lie side by side, so rename one"
        for same in by_name.values()
        if len(same) > 1
    ]


def _describe(workspace: Path, name: str) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    with (workspace / name).open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return {"path": name, "bytes": size, "sha256": digest.hexdigest()}
