"""A shell command while it runs: its pipes, its runner, and the ladder that ends it."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
from collections import deque
from collections.abc import Callable

from sandbox_images.base import processes
from sandbox_images.base.event_loop import WRITABLE, Loop, Timer
from sandbox_images.workspace import command_runner
from sandbox_images.workspace.calls import ToolFailure
from sandbox_images.workspace.command_runner import Report, Start
from sandbox_images.workspace.output import Output, Stream, read_ready

TERM_GRACE_S, KILL_AGAIN_S, RUNNER_GRACE_S = 1.0, 0.05, 3.0
MAX_WAITING_INPUT = 4 << 20


class Command:
    """One command line with its runner. Ends exactly once: `on_end(report or None)` when its runner is gone or has reported."""

    def __init__(self, loop: Loop, output: Output, on_end: Callable[[Report | None], None]) -> None:
        self.loop, self.output, self.on_end = loop, output, on_end
        self.runner = 0
        self.streams: dict[int, str] = {}  # read ends that are open
        self.stdin: int | None = None
        self.waiting: deque[bytes] = deque()
        self.close_stdin_after = False
        self.report_fd = -1
        self.report: Report | None = None
        self.background = False
        self.stopping: str | None = None  # the end it was stopped with
        self._ladder: Timer | None = None
        self._kills = 0
        self.on_output: Callable[[], None] = lambda: None

    def launch(
        self,
        line: str,
        environment: dict[str, str],
        cwd: int,
        stdin: int | None,
        file_size: tuple[int, int],
        *,
        background: bool,
    ) -> None:
        """Start it. `stdin`: a descriptor to read from, or None for a pipe that `write` feeds. Raises OSError."""
        self.background = background
        ends: list[int] = []
        try:
            pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(3 if stdin is not None else 4)]
            ends = [fd for pipe in pipes for fd in pipe]
            (out, out_end), (err, err_end), (report, report_end) = pipes[:3]
            child_stdin = stdin if stdin is not None else pipes[3][0]
            start = Start(line, environment, cwd=cwd, stdin=child_stdin, stdout=out_end, stderr=err_end, report=report_end,
                          file_size=file_size, background=background)  # fmt: skip
            self.runner = command_runner.launch(start)
        except OSError:
            for fd in ends:
                os.close(fd)
            raise
        for fd in (out_end, err_end, report_end):
            os.close(fd)
        if stdin is None:
            os.close(pipes[3][0])
            self.stdin = pipes[3][1]
            os.set_blocking(self.stdin, False)
        self.report_fd = report
        for fd, name in ((out, "stdout"), (err, "stderr")):
            os.set_blocking(fd, False)
            self.streams[fd] = name
            self.loop.watch(fd, lambda _events, fd=fd: self._read(fd))  # type: ignore[misc]
        os.set_blocking(report, False)
        self.loop.watch(report, lambda _events: self._on_report())

    def _read(self, fd: int) -> None:
        data = read_ready(fd)
        if data is None:
            return
        if not data:
            self._close_stream(fd)
        else:
            self._feed(fd, data)
        self.on_output()

    def _feed(self, fd: int, data: bytes) -> None:
        stream: Stream = self.output.stdout if self.streams[fd] == "stdout" else self.output.stderr
        self.output.feed(stream, data)

    def _close_stream(self, fd: int) -> None:
        self.loop.unwatch(fd)
        del self.streams[fd]
        os.close(fd)

    def drain(self) -> None:
        """Take what the pipes hold now, not what others may go on writing."""
        for fd in list(self.streams):
            left = waiting_bytes(fd)
            while left > 0:
                data = read_ready(fd)
                if not data:
                    break
                self._feed(fd, data)
                left -= len(data)

    def close(self) -> None:
        self.drain()
        for fd in list(self.streams):
            self._close_stream(fd)
        self.close_stdin()
        if self.report_fd >= 0:
            self.loop.unwatch(self.report_fd)
            os.close(self.report_fd)
            self.report_fd = -1
        if self._ladder is not None:
            self._ladder.cancel()

    def _on_report(self) -> None:
        """The report of a command line that has ended. A foreground command answers when its runner is gone, too."""
        if self._take_report() and self.background:
            self.on_end(self.report)

    def _take_report(self) -> bool:
        """False when there is nothing to read yet."""
        if self.report_fd < 0:
            return True
        line = read_ready(self.report_fd)
        if line is None:
            return False
        if line:
            self.report = Report.decode(line)
        self.loop.unwatch(self.report_fd)
        os.close(self.report_fd)
        self.report_fd = -1
        return True

    def runner_gone(self) -> None:
        """To be called when the runner has ended; without a report it was killed."""
        had_ended = self.report_fd < 0 and self.background
        self._take_report()
        if not had_ended:
            self.on_end(self.report)

    def write(self, data: bytes, *, eof: bool) -> None:
        """Queue text for its stdin. Raises ToolFailure."""
        if self.stdin is None:
            raise ToolFailure("The job's standard input is closed.")
        if sum(map(len, self.waiting)) + len(data) > MAX_WAITING_INPUT:
            raise ToolFailure("The job does not read its standard input: too much is waiting for it already.")
        if data:
            self.waiting.append(data)
        self.close_stdin_after = self.close_stdin_after or eof
        self._write_waiting()

    def _write_waiting(self) -> None:
        if self.stdin is None:
            return
        try:
            while self.waiting:
                data = self.waiting.popleft()
                written = os.write(self.stdin, data)
                if written < len(data):
                    self.waiting.appendleft(data[written:])
        except BlockingIOError:
            self.waiting.appendleft(data)
            self.loop.watch(self.stdin, lambda _events: self._write_waiting(), WRITABLE)
            return
        except OSError:
            self.close_stdin()
            return
        self.loop.unwatch(self.stdin)
        if self.close_stdin_after:
            self.close_stdin()

    def close_stdin(self) -> None:
        if self.stdin is not None:
            self.loop.unwatch(self.stdin)
            os.close(self.stdin)
            self.stdin = None
        self.waiting.clear()

    def stop(self, end: str, *, force: bool = False) -> None:
        """SIGTERM to all of it, SIGKILL a second later, until its runner is gone."""
        if self.stopping is not None and not force:
            return
        self.stopping = self.stopping or end
        if self._ladder is not None:
            self._ladder.cancel()
        if force:
            self._kill()
        else:
            command_runner.ask_to_end(self.runner)
            self._ladder = self.loop.call_later(TERM_GRACE_S, self._kill)

    def _kill(self) -> None:
        command_runner.kill_below(self.runner)
        self._kills += 1
        if self._kills * KILL_AGAIN_S > RUNNER_GRACE_S:
            processes.send_signal(self.runner, 9)
        self._ladder = self.loop.call_later(KILL_AGAIN_S, self._kill)


def waiting_bytes(fd: int) -> int:
    """How much a pipe holds."""
    return int(struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"))[0])
