"""What this process uses, as the kernel tells it."""

from __future__ import annotations

import os
import time
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
STARTED_AT = time.time()


def resident_bytes() -> float:
    return float(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


def open_files() -> float:
    return float(len(os.listdir("/proc/self/fd")))  # noqa: PTH208 - a path object for each would be waste


def cpu_seconds() -> float:
    used = os.times()
    return used.user + used.system
