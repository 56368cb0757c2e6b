"""The first process of a sandbox inherits whatever others leave behind: it reaps them, or they pile up as zombies."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

LOOK_EVERY_S = 2.0


async def reap_orphans() -> None:
    """Until it is cancelled. Children of our own are waited for by who started them: at once, so never seen here twice."""
    seen: set[int] = set()
    while True:
        seen = await asyncio.to_thread(_reap, seen)
        await asyncio.sleep(LOOK_EVERY_S)


def _reap(seen: set[int]) -> set[int]:
    zombies = _zombies()
    for pid in zombies & seen:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return zombies - seen


def _zombies() -> set[int]:
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{entry}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state == b"Z" and int(parent) == os.getpid():
                    found.add(int(entry))
    return found
