"""How often and after what wait an attempt is made again: the only layer of retries, with one deadline for all attempts.

Waits are full jitter over a doubling bound, plus a small floor; a Retry-After is obeyed up to a cap, and beyond it, or beyond
the deadline, the failure is reported at once. Clock, sleep and chance are arguments. Cancellation is never caught.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception

from agent.llm.attempt import AttemptFailed
from agent.llm.model import FailureKind, LLMFailure, Usage
from agent.llm.tokens import add_usage

T = TypeVar("T")


@dataclass(frozen=True)
class RetryPolicy:
    """Seconds, but for `max_attempts`, which counts the first one. `chance` gives numbers from 0 to 1."""

    max_attempts: int = 4
    max_retry_after_s: float = 60.0
    floor_s: float = 0.1
    first_bound_s: float = 1.0
    bound_s: float = 20.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    chance: Callable[[], float] = random.random

    async def run(self, attempt: Callable[[], Awaitable[T]], *, deadline_s: float) -> T:
        """The first result. Raises LLMFailure with the number of attempts and what all of them may have cost.

        `deadline_s` bounds the waits here; the attempt itself must keep to it too.
        """
        return await Retries(self, deadline_s).run(attempt)

    def wait_s(self, failure: AttemptFailed, attempt: int) -> float:
        """Seconds to wait after the failed attempt with this number (1 is the first)."""
        jitter = self.chance() * min(self.bound_s, self.first_bound_s * 2.0 ** (attempt - 1))
        if failure.retry_after_s is not None:
            # Jitter after what was asked for keeps many waiting clients apart.
            return failure.retry_after_s + self.floor_s + min(jitter, 0.1 * failure.retry_after_s)
        return self.floor_s + jitter


class Retries:
    """The attempts at one reply. `attempts` and `failures` can be read at any time, also after a cancellation."""

    def __init__(self, policy: RetryPolicy, deadline_s: float) -> None:
        self._policy = policy
        self._ends_at = policy.clock() + deadline_s
        self.attempts = 0
        self.failures: list[AttemptFailed] = []

    async def run(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Raises LLMFailure for the last AttemptFailed; everything else that `attempt` raises passes through at once."""
        retrying = AsyncRetrying(
            sleep=self._policy.sleep,
            stop=self._stop,
            wait=self._wait,
            retry=retry_if_exception(lambda error: isinstance(error, AttemptFailed) and error.retryable),
            reraise=True,
        )

        async def counted() -> T:
            self.attempts += 1
            try:
                return await attempt()
            except AttemptFailed as failure:
                self.failures.append(failure)
                raise

        try:
            return await retrying(counted)
        except AttemptFailed as failure:
            raise self.as_failure(failure) from failure

    def as_failure(self, last: AttemptFailed) -> LLMFailure:
        kind = last.kind
        if kind is FailureKind.RATE_LIMITED and not self._asks_too_much(last):
            kind = FailureKind.UNREACHABLE  # the retries are used up, not the server's patience
        message = last.message if self.attempts < 2 else f"{last.message} ({self.attempts} attempts)"
        if kind is FailureKind.RATE_LIMITED:
            message += f". It asks to wait {last.retry_after_s:g} s, longer than is waited here"
        return LLMFailure(kind, message, attempts=self.attempts, usage=self.spent())

    def spent(self) -> Usage | None:
        """What the failed attempts may have cost."""
        total: Usage | None = None
        for failure in self.failures:
            total = add_usage(total, failure.usage)
        return total

    def _wait(self, _state: RetryCallState) -> float:
        return self._policy.wait_s(self.failures[-1], self.attempts)

    def _stop(self, state: RetryCallState) -> bool:
        if self.attempts >= self._policy.max_attempts or self._asks_too_much(self.failures[-1]):
            return True
        return self._policy.clock() + state.upcoming_sleep >= self._ends_at

    def _asks_too_much(self, failure: AttemptFailed) -> bool:
        after = failure.retry_after_s
        if after is None:
            return False
        return after > self._policy.max_retry_after_s or self._policy.clock() + after >= self._ends_at
