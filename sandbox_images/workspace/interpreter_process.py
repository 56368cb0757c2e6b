"""The interpreter process as the worker sees it: its pipes and the private channel. It knows nothing of calls."""

from __future__ import annotations

import _socket  # what `socket` wraps, at a fraction of its cost
import fcntl
import json
import os
import resource
import struct
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from sandbox_images.base import processes
from sandbox_images.base.annotations import Any
from sandbox_images.base.event_loop import READABLE, WRITABLE, Loop
from sandbox_images.workspace.output import read_ready
from sandbox_images.workspace.process_figures import ProcessFigures
from sandbox_images.workspace.shell_command import waiting_bytes

SCRIPT = os.path.join(os.path.dirname(os.path.realpath(__file__)), "interpreter.py")
HEADER = struct.Struct(">II")
MAX_FRAME_BYTES = 40 << 20
PIPE_BYTES = 256 << 10
F_SETPIPE_SZ = 1031
READ_BYTES = 1 << 16


class InterpreterProcess:
    """One process from its start to its end. Callbacks: `on_output(name, data)`, `on_frame(head, data)`, `on_damage()`."""

    def __init__(
        self,
        loop: Loop,
        on_output: Callable[[str, bytes], None],
        on_frame: Callable[[dict[str, Any], bytes], None],
        on_damage: Callable[[], None],
    ) -> None:
        self._loop, self._on_output, self._on_frame, self._on_damage = loop, on_output, on_frame, on_damage
        self.pid = 0
        self.figures = ProcessFigures(0)
        self._pipes: dict[int, str] = {}
        self._control: int | None = None
        self._began: int | None = None
        self._incoming = bytearray()
        self._outgoing: deque[bytes] = deque()
        self._full = False  # the channel takes no more now

    def start(self, environment: dict[str, str], folder: int, limits: dict[int, tuple[int, int]]) -> None:
        """Fork and execute. Raises OSError when no process can be made."""
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
        out, out_end = os.pipe2(os.O_CLOEXEC)
        err, err_end = os.pipe2(os.O_CLOEXEC)
        began, began_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self.pid = os.fork()
            if self.pid == 0:
                self._become(environment, folder, limits, (theirs.fileno(), began_end, out_end, err_end))
        except OSError:
            for fd in (out, err, began):
                os.close(fd)
            ours.close()
            raise
        finally:
            for fd in (out_end, err_end, began_end):
                os.close(fd)
            theirs.close()
        self._control, self._began = ours.detach(), began
        self.figures = ProcessFigures(self.pid)
        for fd, name in ((out, "stdout"), (err, "stderr")):
            self._pipes[fd] = name
            self._loop.watch(fd, lambda _events, fd=fd: self._read_pipe(fd))  # type: ignore[misc]
            with suppress(OSError):  # the user's allowance of pipe pages is used up: the usual size will do
                fcntl.fcntl(fd, F_SETPIPE_SZ, PIPE_BYTES)
        for fd in (self._control, out, err):
            os.set_blocking(fd, False)
        self._loop.watch(self._control, self._on_control)

    @staticmethod
    def _become(
        environment: dict[str, str], folder: int, limits: dict[int, tuple[int, int]], fds: tuple[int, int, int, int]
    ) -> None:
        control, began, out, err = fds
        try:
            processes.become_child(session=True)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            for kind, values in limits.items():
                with suppress(ValueError):  # the worker has set a lower bound from outside already
                    resource.setrlimit(kind, values)
            os.fchdir(folder)
            null = os.open(os.devnull, os.O_RDONLY)
            for source, fd in ((null, 0), (out, 1), (err, 2)):
                os.dup2(source, fd)
            processes.close_all_but({control, began})
            for fd in (control, began):
                os.set_inheritable(fd, True)
            os.execve(sys.executable, [sys.executable, "-I", SCRIPT, str(control), str(began)], environment)
        except OSError as problem:
            os.write(2, f"The interpreter could not be started: {problem}\n".encode())
        finally:
            os._exit(127)

    def send(self, message: dict[str, Any]) -> None:
        """Queue a frame. It is dropped when the channel is closed: the end of the process is noticed elsewhere."""
        body = json.dumps(message).encode()
        self._outgoing.append(HEADER.pack(len(body), 0) + body)
        self._write()

    def _write(self) -> None:
        if self._control is None:
            return
        try:
            while self._outgoing:
                data = self._outgoing.popleft()
                written = os.write(self._control, data)
                if written < len(data):
                    self._outgoing.appendleft(data[written:])
        except BlockingIOError:
            self._outgoing.appendleft(data)
            self._full = True
            self._loop.watch(self._control, self._on_control, READABLE | WRITABLE)
            return
        except OSError:
            self._outgoing.clear()
        if self._full:
            self._full = False
            self._loop.watch(self._control, self._on_control, READABLE)

    def has_begun(self) -> bool:
        """Whether it has begun to run code since this was asked last. It says so in a pipe, which wakes nobody up."""
        try:
            return self._began is not None and bool(os.read(self._began, 1 << 16))
        except BlockingIOError:
            return False

    def _on_control(self, events: int) -> None:
        if events & WRITABLE and self._outgoing:
            self._write()
        if not events & ~WRITABLE or self._control is None:
            return
        try:
            data = os.read(self._control, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close_control()
            self._on_damage()
            return
        self._incoming += data
        self._take_frames()

    def _take_frames(self) -> None:
        while len(self._incoming) >= HEADER.size:
            head_bytes, data_bytes = HEADER.unpack_from(self._incoming)
            size = HEADER.size + head_bytes + data_bytes
            if size > MAX_FRAME_BYTES:
                self._damaged()
                return
            if len(self._incoming) < size:
                return
            frame = bytes(self._incoming[HEADER.size : size])
            del self._incoming[:size]
            try:
                head = json.loads(frame[:head_bytes])
            except (ValueError, RecursionError):
                head = None
            if not isinstance(head, dict):
                self._damaged()
                return
            self._on_frame(head, frame[head_bytes:])

    def _damaged(self) -> None:
        """User code wrote something of its own into the channel."""
        self._close_control()
        self._on_damage()

    def _close_control(self) -> None:
        if self._control is not None:
            self._loop.unwatch(self._control)
            os.close(self._control)
            self._control = None
        self._incoming.clear()
        self._outgoing.clear()

    def _read_pipe(self, fd: int) -> None:
        data = read_ready(fd)
        if data:
            self._on_output(self._pipes[fd], data)
        elif data == b"":
            self._loop.unwatch(fd)
            del self._pipes[fd]
            os.close(fd)

    def drain(self) -> None:
        """Take what the pipes hold now, not what a child may go on writing."""
        for fd in list(self._pipes):
            left = waiting_bytes(fd)
            while left > 0:
                data = read_ready(fd)
                if not data:
                    break
                self._on_output(self._pipes[fd], data)
                left -= len(data)

    def close(self) -> None:
        """Let go of the descriptors of a process that has ended."""
        self.drain()
        for fd in list(self._pipes):
            self._loop.unwatch(fd)
            os.close(fd)
        self._pipes.clear()
        self._close_control()
        if self._began is not None:
            os.close(self._began)
            self._began = None
        self.figures.close()
