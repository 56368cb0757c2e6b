"""Who holds a run: a lock file the kernel lets go of at once when its process dies, whatever the way.

Unlike a process id it is never mistaken for another process's, and it works between containers that share the folder.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class RunLock:
    """Held from `take` to `release`. Not inherited by programs that the process starts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle: int | None = None

    def take(self, note: str) -> bool:
        """False when another process, or another opener in this one, holds the run. `note` is left for `holder`."""
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return False
        os.ftruncate(handle, 0)
        os.write(handle, note.encode())
        self._handle = handle
        return True

    def release(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def holder(self) -> str:
        """The note of who took it last."""
        try:
            return self._path.read_text("utf-8", errors="replace")[:200]
        except OSError:
            return "unknown"


def is_held(path: Path) -> bool:
    """Whether a live process holds the lock at `path`."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(handle)
