"""What the sandbox's own cgroup tells, of both versions; nothing where none is mounted."""

from __future__ import annotations

import os

_EVENTS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
_USAGE = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")
_PIDS = ("/sys/fs/cgroup/pids.events", "/sys/fs/cgroup/pids/pids.events")
_MAX_PIDS = ("/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids/pids.max")
_CPU = "/sys/fs/cgroup/cpu.max"
_CPU_V1 = ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us")
_open: dict[tuple[str, ...], int | None] = {}  # the counters are read at every call, so their files stay open


def _read(paths: tuple[str, ...]) -> bytes:
    if paths not in _open:
        _open[paths] = _first(paths)
    fd = _open[paths]
    try:
        return b"" if fd is None else os.pread(fd, 4096, 0)
    except OSError:
        return b""


def _first(paths: tuple[str, ...]) -> int | None:
    for path in paths:
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
    return None


def oom_kills() -> int | None:
    """How many processes of this cgroup were killed for want of memory; None when that can't be known."""
    return _count(_EVENTS, b"oom_kill")


def refused_forks() -> int | None:
    """How many processes and threads could not be made because of the limit of them; None when that can't be known."""
    return _count(_PIDS, b"max")


def max_processes() -> int | None:
    """How many processes and threads there may be; None without a limit."""
    text = _read(_MAX_PIDS).strip()
    return int(text) if text.isdigit() else None


class Counters:
    """What the cgroup has counted up to now, to be compared with what it counts later."""

    __slots__ = ("_oom_kills", "_refused_forks")

    def __init__(self) -> None:
        self._oom_kills, self._refused_forks = oom_kills(), refused_forks()

    def out_of_memory(self) -> bool:
        """Whether a process was killed for want of memory since."""
        return _more(self._oom_kills, oom_kills())

    def out_of_processes(self) -> bool:
        """Whether a process or thread could not be made since, because of the limit of them."""
        return _more(self._refused_forks, refused_forks())


def _more(before: int | None, now: int | None) -> bool:
    return before is not None and now is not None and now > before


def _count(paths: tuple[str, ...], wanted: bytes) -> int | None:
    for line in _read(paths).splitlines():
        name, _, value = line.partition(b" ")
        if name == wanted and value.strip().isdigit():
            return int(value)
    return None


def cpus() -> float | None:
    """The processor time that this cgroup may use, in processors; None without a limit."""
    quota, period = _read((_CPU,)).split() or [_read((path,)).strip() for path in _CPU_V1]
    if not quota.isdigit() or not period.isdigit():
        return None
    return int(quota) / int(period)


def memory_bytes() -> int | None:
    text = _read(_USAGE).strip()
    return int(text) if text.isdigit() else None
