"""What the kernel tells about processes at each call: the files of /proc stay open, for opening costs more than reading."""

from __future__ import annotations

import os
import time


class ProcessFigures:
    """Of one process. Everything is None, and nothing an error, once it is gone."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._status = _open(f"/proc/{pid}/status", os.O_RDONLY)
        self._clear = _open(f"/proc/{pid}/clear_refs", os.O_WRONLY)

    def cpu_seconds(self) -> float | None:
        """CPU time that all its threads have used."""
        try:
            return time.clock_gettime((~self._pid << 3) | 2)  # CPUCLOCK_SCHED, as clock_getcpuclockid makes it
        except OSError:
            return None

    def reset_peak(self) -> None:
        if self._clear is not None:
            try:
                os.write(self._clear, b"5")
            except OSError:
                return

    def peak_bytes(self) -> int | None:
        """The largest resident size since `reset_peak`."""
        if self._status is None:
            return None
        try:
            text = os.pread(self._status, 4096, 0)
            return int(text.partition(b"VmHWM:")[2].split(None, 1)[0]) << 10
        except (OSError, ValueError, IndexError):
            return None

    def close(self) -> None:
        for fd in (self._status, self._clear):
            if fd is not None:
                os.close(fd)
        self._status = self._clear = None


class LastPid:
    """The pid that was given out last in this namespace. Equal readings mean that no process or thread was made between."""

    def __init__(self) -> None:
        self._loads = _open("/proc/loadavg", os.O_RDONLY)

    def read(self) -> int:
        """0 when the kernel does not tell."""
        if self._loads is None:
            return 0
        try:
            return int(os.pread(self._loads, 128, 0).split()[4])
        except (OSError, ValueError, IndexError):
            return 0


def _open(path: str, flags: int) -> int | None:
    try:
        return os.open(path, flags | os.O_CLOEXEC)
    except OSError:
        return None
