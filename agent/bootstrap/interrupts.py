"""Ctrl-C, and what a service manager sends: the first asks for a clean end, the second ends at once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EXIT_INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SHOW_CURSOR = "\x1b[?25h\n"


class Interrupts:
    """`stop` is what the first signal calls: the work that is under way sets it. Without it the main task is cancelled."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.count = 0
        self.stop: Callable[[], None] | None = None
        self._tell = tell
        self._main = asyncio.current_task()

    def on_signal(self) -> None:
        self.count += 1
        if self.count > 1:
            if sys.stderr.isatty():
                sys.stderr.write(_SHOW_CURSOR)
                sys.stderr.flush()
            # an embedded ToolServer ends by itself: the pipe that it watches closes with us
            os._exit(EXIT_INTERRUPTED)
        self._tell("Stopping … the run can be resumed. Press Ctrl-C again to end at once.")
        if self.stop is not None:
            self.stop()
        elif self._main is not None:
            self._main.cancel()


@contextmanager
def interrupts(tell: Callable[[str], None]) -> Iterator[Interrupts]:
    """Take the signals while the block runs; to be used inside the main task of the event loop."""
    loop, handler = asyncio.get_running_loop(), Interrupts(tell)
    for number in _SIGNALS:
        loop.add_signal_handler(number, handler.on_signal)
    try:
        yield handler
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
