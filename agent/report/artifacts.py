"""The files a run made, as they stand in its workspace folder, and who made them."""

from __future__ import annotations

import hashlib
import mimetypes
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from agent.report.story import Story

_CHUNK = 1 << 20
MAX_FILES = 2_000  # more than a person reads; the manifest says how many were left out


@dataclass(frozen=True)
class Artifact:
    """One file. `made_by` names the task, and `step` the key of the last tool call that changed it; empty for input files."""

    path: str
    bytes: int
    sha256: str
    media_type: str
    made_by: str = ""
    step: str = ""

    @property
    def input(self) -> bool:
        return not self.step


@dataclass(frozen=True)
class Manifest:
    artifacts: tuple[Artifact, ...] = ()
    left_out: int = 0  # files past MAX_FILES


def manifest(story: Story, workspace: Path) -> Manifest:
    """All regular files below `workspace`, sorted by path. Links are not followed: what they point at is not the run's."""
    makers = _makers(story)
    paths = sorted(_files(workspace))
    artifacts = [_artifact(workspace, path, *makers.get(path, ("", ""))) for path in paths[:MAX_FILES]]
    found = tuple(artifact for artifact in artifacts if artifact is not None)
    return Manifest(found, max(0, len(paths) - MAX_FILES))


def _makers(story: Story) -> dict[str, tuple[str, str]]:
    makers: dict[str, tuple[str, str]] = {}
    for call in story.calls():
        outcome = call.outcome or {}
        named = [str(entry.get("path", "")) for entry in outcome.get("artifacts") or []]
        for path in [*map(str, outcome.get("workspace_changed") or []), *named]:
            task = call.key.partition("/")[0]
            makers[path.removeprefix("/workspace/").removeprefix("./")] = (task, call.key)
    return makers


def _files(root: Path) -> list[str]:
    found = []
    for folder, folders, names in os.walk(root, followlinks=False):
        folders.sort()
        base = os.path.relpath(folder, root)
        found += [name if base == "." else f"{base}/{name}" for name in names]
    return found


def _artifact(root: Path, path: str, made_by: str, step: str) -> Artifact | None:
    """None for what is no regular file, or is gone again."""
    try:
        handle = os.open(root / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(handle, "rb") as file:  # noqa: PTH123 - a handle, opened without following links
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return None
        digest, size = hashlib.sha256(), 0
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    media_type = mimetypes.guess_type(path)[0] or "application/octet-stream"
    return Artifact(path, size, digest.hexdigest(), media_type, made_by, step)
