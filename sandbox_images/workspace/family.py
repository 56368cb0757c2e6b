"""Which processes are ours, and ending those that are nobody's."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Generator

from sandbox_images.base import processes

PATIENCE_S = 3.0


class Family:
    """The worker's own children by pid, with what to tell when one ends. Every other child of the worker is a stray:

    orphans come to the worker as PID 1 or as child subreaper, and a command's orphans stay with its runner.
    """

    def __init__(self) -> None:
        self._children: dict[int, Callable[[int, float], None]] = {}
        self._me = os.getpid()

    def add(self, pid: int, on_end: Callable[[int, float], None]) -> None:
        """`on_end(wait status, cpu seconds)` is called when it has ended and is reaped."""
        self._children[pid] = on_end

    def ended(self, pid: int, status: int, cpu_s: float) -> None:
        on_end = self._children.pop(pid, None)
        if on_end is not None:
            on_end(status, cpu_s)

    def leftovers(self, interpreter: int | None) -> tuple[set[int], bool]:
        """(living processes below the interpreter, and strays with all below them; whether the interpreter has zombies)."""
        shown = processes.table()
        strays = {pid for pid, (parent, _) in shown.items() if parent == self._me and pid not in self._children}
        below = processes.descendants({interpreter}, shown) if interpreter is not None else set()
        found = strays | processes.descendants(strays, shown) | below
        zombies = any(shown[pid][1] and shown[pid][0] == interpreter for pid in below)
        return {pid for pid in found if not shown[pid][1]}, zombies

    def end_leftovers(self, interpreter: int | None) -> Generator[None, None, tuple[int, bool]]:
        """Kill them until none is left: (how many they were, whether all are gone).

        The interpreter's process group, where most of what it forked is, stands still meanwhile: the kernel stops a group in
        one step, so that nothing in it can fork faster than it is found.
        """
        killed: set[int] = set()
        until = time.monotonic() + PATIENCE_S
        stopped = False
        try:
            while True:
                found = self.leftovers(interpreter)[0]
                if not found:
                    return len(killed), True
                if time.monotonic() > until:
                    return len(killed), False
                if interpreter is not None:
                    processes.send_signal(-interpreter, signal.SIGSTOP)
                    stopped = True
                killed |= processes.kill_all(lambda: self.leftovers(interpreter)[0])
                yield
        finally:
            if interpreter is not None and stopped:
                processes.send_signal(interpreter, signal.SIGCONT)

    def end_everything(self) -> None:
        """Kill, as PID 1 and in one step, all processes but the worker: background jobs too. For when nothing else helps."""
        if self._me == 1:
            processes.send_signal(-1, signal.SIGKILL)

    def end_all(self) -> None:
        """At the worker's own end: kill everything below it, and as PID 1 everything there is."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            if self._me == 1:
                processes.send_signal(-1, signal.SIGKILL)
            found = processes.kill_all(lambda: processes.living_below({self._me}))
            try:
                os.waitpid(-1, 0 if found else os.WNOHANG)
            except ChildProcessError:
                return
