"""Work for a forked helper: what may run long in C (a regular expression) or needs modules that the worker does without.

The helper is a fork of the worker without an exec, so user code can't look into it. It gets one pipe in, one pipe out.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable

from sandbox_images.base import processes
from sandbox_images.base.annotations import Any
from sandbox_images.base.event_loop import WRITABLE, Loop
from sandbox_images.workspace.family import Family
from sandbox_images.workspace.output import read_ready

MAX_ANSWER_BYTES = 16 << 20


class Helper:
    """A running helper. `work(read from fd, write to fd)` runs in the child; what it returns is sent as JSON at the end of
    a report pipe, so data and report don't mix. `on_end(report or None)` comes once: None when it was killed.
    """

    def __init__(
        self,
        loop: Loop,
        family: Family,
        work: Callable[[int, int], dict[str, Any]],
        on_end: Callable[[dict[str, Any] | None], None],
    ) -> None:
        self._loop, self._on_end = loop, on_end
        self._report = bytearray()
        in_end, self.to_fd = os.pipe2(os.O_CLOEXEC)
        self.from_fd, out_end = os.pipe2(os.O_CLOEXEC)
        self._report_fd, report_end = os.pipe2(os.O_CLOEXEC)
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _child(work, in_end, out_end, report_end)
        except OSError:
            for fd in (self.to_fd, self.from_fd, self._report_fd):
                os.close(fd)
            raise
        finally:
            for fd in (in_end, out_end, report_end):
                os.close(fd)
        for fd in (self.to_fd, self.from_fd, self._report_fd):
            os.set_blocking(fd, False)
        family.add(self.pid, lambda _status, _cpu: None)
        loop.watch(self._report_fd, lambda _events: self._on_report())

    def _on_report(self) -> None:
        data = read_ready(self._report_fd)
        if data is None:
            return
        if data and len(self._report) < MAX_ANSWER_BYTES:
            self._report += data
            return
        self._loop.unwatch(self._report_fd)
        os.close(self._report_fd)
        try:
            report = json.loads(self._report)
        except ValueError:
            report = None
        self._on_end(report)

    def when_writable(self, callback: Callable[[], None]) -> None:
        """Once, as soon as the helper takes more."""

        def ready(_events: int) -> None:
            self._loop.unwatch(self.to_fd)
            callback()

        self._loop.watch(self.to_fd, ready, WRITABLE)

    def when_readable(self, callback: Callable[[], None]) -> None:
        """Once, as soon as the helper has written more or has ended."""

        def ready(_events: int) -> None:
            self._loop.unwatch(self.from_fd)
            callback()

        self._loop.watch(self.from_fd, ready)

    def close_input(self) -> None:
        if self.to_fd >= 0:
            self._loop.unwatch(self.to_fd)
            os.close(self.to_fd)
            self.to_fd = -1

    def close(self) -> None:
        """Let go of the data pipes; a helper that still reads or writes ends by that."""
        self.close_input()
        if self.from_fd >= 0:
            self._loop.unwatch(self.from_fd)
            os.close(self.from_fd)
            self.from_fd = -1

    def kill(self) -> None:
        processes.send_signal(self.pid, signal.SIGKILL)


def _child(work: Callable[[int, int], dict[str, Any]], in_end: int, out_end: int, report_end: int) -> None:
    try:
        processes.become_child(session=True)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        _close_others({in_end, out_end, report_end})
        data = json.dumps(work(in_end, out_end)).encode()
        while data:
            data = data[os.write(report_end, data) :]
    finally:
        os._exit(0)


def _close_others(keep: set[int]) -> None:
    """All but `keep` and the folder handles that the work uses: pipes, sockets and the like go."""
    import stat  # noqa: PLC0415

    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        try:
            if fd > 2 and fd not in keep and not stat.S_ISDIR(os.fstat(fd).st_mode):
                os.close(fd)
        except OSError:
            continue
