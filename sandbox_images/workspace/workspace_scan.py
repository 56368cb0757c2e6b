"""What is in the workspace: how much of the disk it takes, and what has changed since a call began."""

from __future__ import annotations

import os
import stat
from collections.abc import Generator
from contextlib import suppress

from sandbox_images.base.beneath import Workspace
from sandbox_images.base.event_loop import Clock
from sandbox_images.base.path_text import spell

OWN_FOLDER = ".toolcrib"  # output artifacts and uploads under way; no change of the user's
MAX_TRACKED = 50_000  # paths whose state is remembered; beyond it only sizes are counted
MAX_CHANGED = 1000
BLOCK = 512
FORMAT, FOLDER = 0o170000, stat.S_IFDIR


class Snapshot:
    """The state at one moment. Never changed once made, so calls can share it."""

    __slots__ = ("bytes", "complete", "files", "folders", "states")

    def __init__(self) -> None:
        self.bytes, self.files, self.folders, self.complete = 0, 0, 0, True
        self.states: dict[str, int] = {}

    def remember(self, path: str, state: int) -> None:
        if len(self.states) < MAX_TRACKED:
            self.states[path] = state
        else:
            self.complete = False


def scan(workspace: Workspace) -> Generator[None, None, Snapshot]:
    """Walk the tree in slices. Sizes are blocks on disk, so holes are free and a hard link counts once."""
    found, clock = Snapshot(), Clock()
    mode = os.fstat(workspace.fd).st_mode
    if mode & 0o700 != 0o700:
        with suppress(OSError):  # user code has shut itself and us out
            os.fchmod(workspace.fd, stat.S_IMODE(mode) | 0o700)
    seen: set[int] = set()
    folders = [""]
    while folders:
        folder = folders.pop()
        own = folder == OWN_FOLDER or folder.startswith(OWN_FOLDER + "/")
        prefix = f"{folder}/" if folder else ""
        try:
            fd = workspace._deep(folder or ".")  # noqa: SLF001 - a plain descriptor is a third cheaper than the context manager
        except OSError:
            continue  # deleted meanwhile, or closed to us by its mode
        try:
            with os.scandir(fd) as entries:
                for number, entry in enumerate(entries):
                    try:
                        info = entry.stat(follow_symlinks=False)
                    except OSError:
                        continue
                    path, mode = prefix + entry.name, info.st_mode
                    if mode & FORMAT == FOLDER:
                        folders.append(path)
                        if not own and path != OWN_FOLDER:
                            found.remember(path, hash((info.st_ino, mode)))
                        continue
                    found.files += 1
                    if info.st_nlink == 1 or info.st_ino not in seen:
                        found.bytes += info.st_blocks * BLOCK
                    if info.st_nlink > 1:
                        seen.add(info.st_ino)
                    if not own:
                        found.remember(path, state_of(info))
                    if number & 31 == 31 and clock.spent():
                        yield
                        clock.start()
        finally:
            os.close(fd)
        if clock.spent():
            yield
            clock.start()
    return found


def state_of(info: os.stat_result) -> int:
    """What differs once a file has changed: whatever changes it, times set by hand too, moves its change time."""
    return hash((info.st_ino, info.st_size, info.st_ctime_ns))


def changes(before: Snapshot, after: Snapshot) -> tuple[list[str], bool]:
    """(paths made, changed or deleted, sorted; whether there are more than are named)."""
    if before is after or (before.states == after.states and before.complete and after.complete):
        return [], False
    old, new = before.states, after.states
    changed = [path for path, state in new.items() if old.get(path) != state]
    changed += [path for path in old if path not in new]
    more = not (before.complete and after.complete) or len(changed) > MAX_CHANGED
    return [spell(path) for path in sorted(changed)[:MAX_CHANGED]], more
