"""What the sandbox's own cgroup tells, of both versions; nothing where none is mounted."""

from __future__ import annotations

import os

_EVENTS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
_USAGE = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")
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
    for line in _read(_EVENTS).splitlines():
        name, _, value = line.partition(b" ")
        if name == b"oom_kill" and value.strip().isdigit():
            return int(value)
    return None


def memory_bytes() -> int | None:
    text = _read(_USAGE).strip()
    return int(text) if text.isdigit() else None
