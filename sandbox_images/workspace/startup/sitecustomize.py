"""Lets Python see the processors that its sandbox may use, not all that the machine has.

Every Python of the sandbox imports it at its start, because its folder is on PYTHONPATH; the interpreter of python_execute,
which is isolated from that, imports it by its whole name. From Python 3.13 on PYTHON_CPU_COUNT does a part of this by itself.
"""

from __future__ import annotations

import os

_of_the_machine = os.sched_getaffinity


def show_processors(count: int) -> None:
    """From now on this process and its forks count at most `count` processors."""

    def cpu_count() -> int:
        return min(count, len(_of_the_machine(0)))

    def sched_getaffinity(pid: int, /) -> set[int]:
        return set(sorted(_of_the_machine(pid))[:count])

    os.cpu_count = cpu_count
    os.sched_getaffinity = sched_getaffinity
    if hasattr(os, "process_cpu_count"):
        os.process_cpu_count = cpu_count


def show_told(environment: dict[str, str] | os._Environ[str]) -> None:
    """The count of PYTHON_CPU_COUNT, where it is one."""
    told = environment.get("PYTHON_CPU_COUNT", "")
    if told.isdecimal() and int(told) > 0:
        show_processors(int(told))


show_told(os.environ)
