"""A tar of a workspace, taken into the run's store: regular files under safe names, within the store's bounds."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from typing import IO

from agent.tools.workspace_store import NotKept, WorkspaceStore

_CHUNK = 1 << 20

LeftOut = Callable[[str, str], None]
"""Told the path of a file that can't be kept, and why."""


def unpack(archive: IO[bytes], store: WorkspaceStore, left_out: LeftOut, wanted: frozenset[str] | None = None) -> int:
    """How many files were taken. Files of the store that the archive does not have are deleted; only `wanted` ones, if given.

    Blocking. Raises tarfile.TarError or EOFError for an archive that can't be read to its end: then nothing is deleted.
    """
    present: set[str] = set()
    taken = 0
    with tarfile.open(fileobj=archive, mode="r:") as tar:
        for member in tar:
            path = member.name.removeprefix("./").rstrip("/")
            if wanted is not None and path not in wanted:
                continue
            present.add(path)
            content = tar.extractfile(member) if member.isreg() else None
            if content is None:
                no_file(store, path)
            elif (problem := _keep(store, path, content, member.size)) is None:
                taken += 1
            else:
                store.delete(path)  # an older copy must not pass for the file
                left_out(path, problem)
    for path in (set(store.files()) if wanted is None else set(wanted)) - present:
        store.delete(path)
    return taken


def no_file(store: WorkspaceStore, path: str) -> None:
    """A folder, link or device: only regular files are kept, but one that had the name before is gone."""
    if path in store.files():
        store.delete(path)


def _keep(store: WorkspaceStore, path: str, content: IO[bytes], count: int) -> str | None:
    """Why it can't be kept."""
    try:
        with store.writer(path) as target:
            target.expect(count)
            while chunk := content.read(_CHUNK):
                target.write(chunk)
            target.commit()
    except NotKept as problem:
        return str(problem)
    return None
