"""Processes of this host, told apart from later ones with the same number by their start time."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class HostProcess:
    """`started`: clock ticks since boot, from /proc."""

    pid: int
    started: int

    @classmethod
    def running(cls, pid: int) -> HostProcess | None:
        """None when there is none, or it is dead and waits to be reaped."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rsplit(")", 1)[1].split()
        except (OSError, IndexError):
            return None
        return None if fields[0] in "ZX" else cls(pid, int(fields[19]))

    def is_running(self) -> bool:
        return HostProcess.running(self.pid) == self

    def hold(self) -> int | None:
        """A pidfd, the caller's to close; None when it is that process no more."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        if self.is_running():
            return handle
        os.close(handle)
        return None

    def kill(self) -> bool:
        """SIGKILL, if it still is that process; whether it was. Raises PermissionError for another user's."""
        handle = self.hold()
        if handle is None:
            return False
        try:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        except ProcessLookupError:
            return False
        finally:
            os.close(handle)
        return True

    def dump(self) -> str:
        return f"{self.pid} {self.started}\n"

    @classmethod
    def load(cls, text: str) -> HostProcess | None:
        parts = text.split()
        return cls(int(parts[0]), int(parts[1])) if len(parts) == 2 and all(p.isdigit() for p in parts) else None
