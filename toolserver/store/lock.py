"""One server a state folder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from toolserver.errors import StartRefused


class StateLock:
    """Held for the life of a server. The lock goes with the process, so a killed server leaves none."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / "server.lock"
        self._file: int | None = None

    def take(self) -> None:
        """Raises StartRefused when another server holds it."""
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            os.close(self._file)
            self._file = None
            raise StartRefused(
                f"The state folder {self._path.parent} is in use by another ToolServer. Stop it, or give this one another "
                "folder with --state-dir."
            ) from problem

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
