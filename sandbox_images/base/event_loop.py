"""One thread, one epoll: file descriptors, timers, ended children, and long work cut into slices.

A slice is a generator that yields whenever it has worked for a moment; the loop runs all of them in turn between two
looks at the file descriptors, so that a scan of a large tree never holds up an answer.
"""

from __future__ import annotations

import heapq
import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Generator

SLICE_S = 0.002  # how long one generator may hold the loop
READABLE, WRITABLE = select.EPOLLIN, select.EPOLLOUT
Slices = Generator[None, None, None]


class Timer:
    """A pending `call_later`."""

    __slots__ = ("_loop", "callback", "due")

    def __init__(self, loop: Loop, due: float, callback: Callable[[], None] | None) -> None:
        self._loop, self.due, self.callback = loop, due, callback

    def __lt__(self, other: Timer) -> bool:
        return self.due < other.due

    def cancel(self) -> None:
        if self.callback is not None:
            self.callback = None
            self._loop.forget_cancelled()


class Loop:
    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._timers: list[Timer] = []
        self._slices: deque[Slices] = deque()
        self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._stopped, self._cancelled = False, 0
        self.on_child: Callable[[int, int, float], None] = lambda _pid, _status, _cpu: None

    def watch_children(self) -> None:
        """From now on every ended child is reaped at once and handed to `on_child(pid, wait status, cpu seconds)`."""
        signal.set_wakeup_fd(self._wake[1], warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _signum, _frame: None)
        self.watch(self._wake[0], self._on_wake)

    def watch(self, fd: int, handler: Callable[[int], None], events: int = READABLE) -> None:
        if fd in self._handlers:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self._handlers[fd] = handler

    def unwatch(self, fd: int) -> None:
        """No error when it was not watched. Call it before closing the descriptor."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(self, time.monotonic() + seconds, callback)
        heapq.heappush(self._timers, timer)
        return timer

    def forget_cancelled(self) -> None:
        """Cancelled entries stay in the heap until they are half of it: long deadlines of short calls must not pile up."""
        self._cancelled += 1
        if self._cancelled > 256 and self._cancelled * 2 > len(self._timers):
            self._timers = [timer for timer in self._timers if timer.callback is not None]
            heapq.heapify(self._timers)
            self._cancelled = 0

    def start(self, work: Slices) -> None:
        """Run the first slice of `work` now, the rest in turn with the others."""
        if next(work, self) is not self:
            self._slices.append(work)

    def stop(self) -> None:
        self._stopped = True

    def run(self) -> None:
        while not self._stopped:
            for fd, events in self._epoll.poll(self._timeout()):
                handler = self._handlers.get(fd)
                if handler is not None:
                    handler(events)
            self._run_timers()
            if self._slices:
                work = self._slices.popleft()
                if next(work, self) is not self:
                    self._slices.append(work)

    def _timeout(self) -> float:
        if self._slices:
            return 0
        while self._timers and self._timers[0].callback is None:
            heapq.heappop(self._timers)
        return max(0.0, self._timers[0].due - time.monotonic()) if self._timers else -1

    def _run_timers(self) -> None:
        if not self._timers:
            return
        now = time.monotonic()
        while self._timers and self._timers[0].due <= now:
            timer = heapq.heappop(self._timers)
            callback, timer.callback = timer.callback, None
            if callback is not None:
                callback()

    def _on_wake(self, _events: int) -> None:
        try:
            while len(os.read(self._wake[0], 4096)) == 4096:
                pass
        except BlockingIOError:
            pass
        self.reap()

    def reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.on_child(pid, status, usage.ru_utime + usage.ru_stime)


class Clock:
    """Tells a generator when its slice is used up: `if clock.spent(): yield; clock.start()`."""

    __slots__ = ("_until",)

    def __init__(self) -> None:
        self._until = time.monotonic() + SLICE_S

    def spent(self) -> bool:
        return time.monotonic() > self._until

    def start(self) -> None:
        self._until = time.monotonic() + SLICE_S
