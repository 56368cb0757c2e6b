"""What the sandbox's own cgroup tells, of both versions; nothing where none is mounted."""

from __future__ import annotations

import os

_EVENTS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
_USAGE = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")


def _read(paths: tuple[str, ...]) -> bytes | None:
    for path in paths:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            return os.read(fd, 4096)
        except OSError:
            continue
        finally:
            os.close(fd)
    return None


def oom_kills() -> int | None:
    """How many processes of this cgroup were killed for want of memory; None when that can't be known."""
    for line in (_read(_EVENTS) or b"").splitlines():
        name, _, value = line.partition(b" ")
        if name == b"oom_kill" and value.strip().isdigit():
            return int(value)
    return None


def memory_bytes() -> int | None:
    text = (_read(_USAGE) or b"").strip()
    return int(text) if text.isdigit() else None
