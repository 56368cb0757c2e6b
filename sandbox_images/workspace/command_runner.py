"""The small process that stands over each shell command, so that what the command started can be told from all else.

It is a fork of the worker without an exec: cheap, and not dumpable, so user code can't write its report. As child
subreaper it inherits every orphan of its command, however often it forked and whatever session it made.
"""

from __future__ import annotations

import os
import resource
import signal
from contextlib import suppress

from sandbox_images.base import processes

SHELL = "/bin/bash"


class Start:
    """What a runner needs to know. Descriptors stay the caller's to close after the fork."""

    __slots__ = ("background", "command", "cwd", "environment", "file_size", "report", "stderr", "stdin", "stdout")

    def __init__(
        self, command: str, environment: dict[str, str], *, cwd: int, stdin: int, stdout: int, stderr: int, report: int,
        file_size: tuple[int, int], background: bool,
    ) -> None:  # fmt: skip
        self.command, self.environment, self.cwd = command, environment, cwd
        self.stdin, self.stdout, self.stderr, self.report = stdin, stdout, stderr, report
        self.file_size, self.background = file_size, background


class Report:
    """How a command ended: its wait status, what it and its children used, how many left-over processes were ended.

    `adopts`: orphans of the command came to the runner; else they went to the worker.
    """

    __slots__ = ("adopts", "cpu_ms", "ended", "peak_bytes", "status")

    def __init__(self, status: int, cpu_ms: float, peak_bytes: int, ended: int, *, adopts: bool) -> None:
        self.status, self.cpu_ms, self.peak_bytes, self.ended = status, cpu_ms, peak_bytes, ended
        self.adopts = adopts

    def encode(self) -> bytes:
        return f"{self.status} {self.cpu_ms} {self.peak_bytes} {self.ended} {int(self.adopts)}\n".encode()

    @classmethod
    def decode(cls, line: bytes) -> Report | None:
        parts = line.split()
        if len(parts) != 5:
            return None
        return cls(int(parts[0]), float(parts[1]), int(parts[2]), int(parts[3]), adopts=parts[4] == b"1")


def launch(start: Start) -> int:
    """Fork the runner and its command; the runner's pid. Raises OSError when no process can be made."""
    pid = os.fork()
    if pid == 0:
        code = 127
        try:
            _run(start)
            code = 0
        finally:
            os._exit(code)
    return pid


def _run(start: Start) -> None:
    processes.become_child(session=True)
    adopts = False
    with suppress(OSError):  # gVisor may have it for PID 1 alone
        processes.prctl(processes.PR_SET_CHILD_SUBREAPER, 1)
        adopts = True
    try:
        command = os.fork()
    except OSError:
        os.write(start.report, Report(-1, 0, 0, 0, adopts=adopts).encode())
        return
    if command == 0:
        try:
            _exec(start)
        finally:
            os._exit(127)
    processes.close_all_but({start.report})
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    while True:
        pid, status = os.wait()
        if pid == command:
            break
    ended = 0 if start.background else _end_rest()
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_ms = round((usage.ru_utime + usage.ru_stime) * 1000, 3)
    os.write(start.report, Report(status, cpu_ms, usage.ru_maxrss << 10, ended, adopts=adopts).encode())
    if start.background:
        _wait_for_all()


def _exec(start: Start) -> None:
    processes.become_child(session=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, start.file_size)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.fchdir(start.cwd)
    for source, fd in ((start.stdin, 0), (start.stdout, 1), (start.stderr, 2)):
        os.dup2(source, fd)
    processes.close_all_but(set())
    os.execve(SHELL, [SHELL, "-c", start.command], start.environment)


def _wait_for_all() -> None:
    try:
        while True:
            os.wait()
    except ChildProcessError:
        pass


def _end_rest() -> int:
    """Kill every descendant until none is left; how many they were."""
    killed: set[int] = set()
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return len(killed)
        killed |= processes.kill_all(lambda: processes.living_below({os.getpid()}))
        try:
            os.wait()  # a direct child was among them, so this returns
        except ChildProcessError:
            return len(killed)


def ask_to_end(runner: int) -> None:
    """SIGTERM to everything below the runner; to stopped processes too."""
    for pid in processes.descendants({runner}, processes.table()):
        processes.send_signal(pid, signal.SIGTERM)
        processes.send_signal(pid, signal.SIGCONT)


def kill_below(runner: int) -> None:
    """SIGKILL to everything below the runner, which then reports and ends."""
    processes.kill_all(lambda: processes.living_below({runner}))
