"""When and how often a step may turn to the ToolServer again: one budget for all that a call needs, session included."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from agent.toolserver_client.errors import ClientProblem, ToolServerAnswer

MAX_RETRY_AFTER_S = 30.0  # a server that asks for more is reported at once, with what it asked for
_BACKOFF = wait_random_exponential(multiplier=1.0, max=15.0)  # full jitter: anything between 0 and 1, 2, 4, ... s

Sleep = Callable[[float], Awaitable[None]]


class Transient(Exception):  # noqa: N818
    """A round that may be repeated. `at_once`: there is nothing to wait for."""

    def __init__(self, cause: ClientProblem, *, at_once: bool = False) -> None:
        super().__init__(str(cause))
        self.cause, self.at_once = cause, at_once

    @property
    def retry_after_s(self) -> float:
        return (self.cause.retry_after_s or 0.0) if isinstance(self.cause, ToolServerAnswer) else 0.0


class StepRetries:
    """The retry budget of one step. `attempts()` may be used several times; all draw from the same budget.

    Only Transient is repeated: cancellation and everything else passes at once.
    """

    def __init__(
        self,
        max_attempts: int,
        within_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._left = max_attempts - 1
        self._until, self._clock, self._sleep = clock() + within_s, clock, sleep

    def attempts(self) -> AsyncRetrying:
        """`async for attempt in retries.attempts(): with attempt: ...`; raises the last Transient when the budget is used up."""
        return AsyncRetrying(
            retry=retry_if_exception_type(Transient), wait=_wait, stop=self._stop, sleep=self._sleep, reraise=True
        )

    def _stop(self, state: RetryCallState) -> bool:
        problem = _problem(state)
        if problem.retry_after_s > MAX_RETRY_AFTER_S or self._clock() + state.upcoming_sleep > self._until:
            return True
        self._left -= 1
        return self._left < 0


def _wait(state: RetryCallState) -> float:
    problem = _problem(state)
    return 0.0 if problem.at_once else max(problem.retry_after_s, _BACKOFF(state))


def _problem(state: RetryCallState) -> Transient:
    outcome = state.outcome
    problem = None if outcome is None else outcome.exception()
    if not isinstance(problem, Transient):
        raise TypeError("only a Transient is ever repeated")
    return problem
