"""Circuit breakers of the ToolServer and of each tool. docs/decisions/circuit-breaker.md says why they look like this.

pybreaker keeps the state and counts the failures; it never sees a call. A call asks for a permit, runs, and reports
what it learned in an instant. Time is monotonic, and while half-open exactly one probe is under way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pybreaker

OnChange = Callable[[str, str, int], None]
"""Called with name, state (closed, open, half-open) and the failures in a row."""

_MAX_WAIT_FACTOR = 8  # of the reset time, reached by doubling


class BreakerOpen(Exception):  # noqa: N818
    """No call may be made now. `retry_in_s` is when the next may be tried."""

    def __init__(self, name: str, retry_in_s: float) -> None:
        super().__init__(f"the breaker of {name} is open")
        self.name, self.retry_in_s = name, retry_in_s


class _Failed(Exception):  # noqa: N818
    """What pybreaker is shown for a failure."""


class Breaker:
    def __init__(
        self,
        name: str,
        *,
        failures: int,
        reset_s: float,
        on_change: OnChange,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        # its own timer reads the wall clock and is never asked: `call` is only used while closed or half-open
        self._state = pybreaker.CircuitBreaker(fail_max=failures, throw_new_error_on_trip=False, name=name)
        self._reset_s, self._on_change, self._clock = reset_s, on_change, clock
        self._wait_s, self._reopen_at = reset_s, 0.0
        self._probe: Permit | None = None

    @property
    def state(self) -> str:
        return str(self._state.current_state)

    @property
    def withheld(self) -> bool:
        """Whether a call would be refused now."""
        return self.state != pybreaker.STATE_CLOSED and (self._probe is not None or self._clock() < self._reopen_at)

    def admit(self) -> Permit:
        """Raises BreakerOpen. The permit must be released when the call is over, however it ended."""
        if self.state == pybreaker.STATE_CLOSED:
            return Permit(self)
        left = self._reopen_at - self._clock()
        if self.state == pybreaker.STATE_OPEN:
            if left > 0:
                raise BreakerOpen(self.name, left)
            self._state.half_open()
            self._changed()
        if self._probe is not None:
            raise BreakerOpen(self.name, max(left, 1.0))
        self._probe = Permit(self)
        return self._probe

    def bystander(self) -> Permit:
        """For questions about a call that is already on its way: never refused, never the probe."""
        return Permit(self)

    def still_admits(self, permit: Permit) -> bool:
        return self.state == pybreaker.STATE_CLOSED or (self.state != pybreaker.STATE_OPEN and permit is self._probe)

    def record(self, permit: Permit, *, failed: bool) -> None:
        """A late answer of a call from before the outage says nothing about now, so only the probe counts then."""
        before = self.state
        if before == pybreaker.STATE_OPEN or (before != pybreaker.STATE_CLOSED and permit is not self._probe):
            return
        if failed:
            with suppress(_Failed):
                self._state.call(_fail)
        else:
            self._state.call(_succeed)
        if self.state == before:
            return
        self._probe = None
        if self.state == pybreaker.STATE_OPEN:
            again = before != pybreaker.STATE_CLOSED
            self._wait_s = min(self._wait_s * 2, self._reset_s * _MAX_WAIT_FACTOR) if again else self._reset_s
            self._reopen_at = self._clock() + self._wait_s
        self._changed()

    def release(self, permit: Permit) -> None:
        if permit is self._probe:
            self._probe = None

    def _changed(self) -> None:
        self._on_change(self.name, self.state, self._state.fail_counter)


class Permit:
    """Leave for one call, and the way to report on it."""

    def __init__(self, breaker: Breaker) -> None:
        self._breaker = breaker

    @property
    def valid(self) -> bool:
        return self._breaker.still_admits(self)

    def worked(self) -> None:
        self._breaker.record(self, failed=False)

    def failed(self) -> None:
        self._breaker.record(self, failed=True)

    def release(self) -> None:
        """The call is over. A probe that learned nothing (cancelled, refused arguments) leaves its place to the next caller."""
        self._breaker.release(self)


class Pass:
    """The permits of one call: of the server and of the tool."""

    def __init__(self, server: Permit, tool: Permit) -> None:
        self.server, self.tool = server, tool

    @property
    def valid(self) -> bool:
        return self.server.valid and self.tool.valid

    def worked(self) -> None:
        self.server.worked()
        self.tool.worked()

    def release(self) -> None:
        self.tool.release()
        self.server.release()


class Breakers:
    """One breaker for the ToolServer as a whole (`toolserver`) and one a tool (`toolserver/NAME`)."""

    def __init__(
        self, *, failures: int, reset_s: float, on_change: OnChange, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._new = partial(Breaker, failures=failures, reset_s=reset_s, on_change=on_change, clock=clock)
        self.server = self._new("toolserver")
        self._tools: dict[str, Breaker] = {}

    def admit(self, tool: str) -> Pass:
        """Raises BreakerOpen. The pass must be released."""
        server = self.server.admit()
        try:
            return Pass(server, self._of(tool).admit())
        except BreakerOpen:
            self.server.release(server)
            raise

    def bystander(self, tool: str) -> Pass:
        return Pass(self.server.bystander(), self._of(tool).bystander())

    def withheld(self, tool: str) -> bool:
        return tool in self._tools and self._tools[tool].withheld

    def _of(self, tool: str) -> Breaker:
        if tool not in self._tools:
            self._tools[tool] = self._new(f"toolserver/{tool}")
        return self._tools[tool]


def _fail() -> None:
    raise _Failed


def _succeed() -> None:
    return None
