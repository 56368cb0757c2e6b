import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from agent.llm.attempt import AttemptFailed, incomplete
from agent.llm.model import FailureKind, LLMFailure, Usage
from agent.llm.retry_policy import Retries, RetryPolicy


class World:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def policy(self, chance: float = 1.0, attempts: int = 4, cap: float = 60.0) -> RetryPolicy:
        return RetryPolicy(attempts, cap, clock=lambda: self.now, sleep=self.sleep, chance=lambda: chance)


def failing(*failures: Exception | None) -> Callable[[], Awaitable[str]]:
    left = list(failures)

    async def attempt() -> str:
        failure = left.pop(0) if len(left) > 1 else left[0]
        if failure is not None:
            raise failure
        return "reply"

    return attempt


def broken(
    kind: FailureKind = FailureKind.UNREACHABLE, *, retryable: bool = True, after: float | None = None
) -> AttemptFailed:
    return AttemptFailed(kind, "broken", retryable=retryable, retry_after_s=after)


async def run(
    world: World, attempt: Callable[[], Awaitable[str]], policy: RetryPolicy | None = None, deadline_s: float = 600
) -> str:
    return await (policy or world.policy()).run(attempt, deadline_s=deadline_s)


async def test_a_failure_that_may_pass_is_tried_again_with_a_growing_bound() -> None:
    world = World()
    assert await run(world, failing(broken(), broken(), broken(), None)) == "reply"
    assert world.slept == pytest.approx([1.1, 2.1, 4.1])


async def test_jitter_is_full_between_a_floor_and_the_bound() -> None:
    policy = RetryPolicy(chance=random.Random(7).random)
    waits = [policy.wait_s(broken(), 3) for _ in range(500)]
    assert min(waits) >= policy.floor_s
    assert max(waits) <= policy.floor_s + 4
    assert min(waits) < 0.5 < 3.5 < max(waits)
    assert RetryPolicy(chance=lambda: 1.0).wait_s(broken(), 30) == pytest.approx(20.1)


async def test_attempts_are_bounded_and_counted() -> None:
    world = World()
    with pytest.raises(LLMFailure) as caught:
        await run(world, failing(broken(FailureKind.TIMEOUT)))
    assert (caught.value.kind, caught.value.attempts) == (FailureKind.TIMEOUT, 4)
    assert "4 attempts" in caught.value.message


@pytest.mark.parametrize("kind", [FailureKind.REFUSED, FailureKind.OVERFLOW, FailureKind.FILTERED])
async def test_what_would_fail_again_is_not_tried_again(kind: FailureKind) -> None:
    world = World()
    with pytest.raises(LLMFailure) as caught:
        await run(world, failing(broken(kind, retryable=False)))
    assert (caught.value.kind, caught.value.attempts, world.slept) == (kind, 1, [])


async def test_retry_after_is_waited_for_and_never_undercut() -> None:
    world = World()
    await run(world, failing(broken(FailureKind.RATE_LIMITED, after=7), None), world.policy(chance=0.0))
    assert 7 <= world.slept[0] < 8


async def test_retry_after_beyond_the_cap_is_reported_at_once() -> None:
    world = World()
    with pytest.raises(LLMFailure) as caught:
        await run(world, failing(broken(FailureKind.RATE_LIMITED, after=90)))
    assert (caught.value.kind, caught.value.attempts, world.slept) == (FailureKind.RATE_LIMITED, 1, [])
    assert "90 s" in caught.value.message


async def test_retry_after_beyond_the_deadline_is_reported_at_once() -> None:
    world = World()
    with pytest.raises(LLMFailure) as caught:
        await run(world, failing(broken(FailureKind.RATE_LIMITED, after=30)), deadline_s=20)
    assert (caught.value.kind, world.slept) == (FailureKind.RATE_LIMITED, [])


async def test_used_up_retries_of_a_429_are_unreachable() -> None:
    world = World()
    with pytest.raises(LLMFailure) as caught:
        await run(world, failing(broken(FailureKind.RATE_LIMITED, after=1)))
    assert (caught.value.kind, caught.value.attempts) == (FailureKind.UNREACHABLE, 4)


async def test_no_wait_goes_past_the_deadline() -> None:
    world = World()
    with pytest.raises(LLMFailure) as caught:
        await run(world, failing(broken()), deadline_s=3)
    assert caught.value.attempts == 2
    assert world.now < 1003


async def test_what_failed_attempts_may_have_cost_is_added_up() -> None:
    world = World()
    first, second = incomplete("cut"), incomplete("cut again")
    first.usage, second.usage = Usage(10, 5, estimated=True), Usage(10, 7, estimated=True)
    retries = Retries(world.policy(), 600)
    await retries.run(failing(first, second, None))
    assert retries.spent() == Usage(20, 12, estimated=True)
    assert retries.attempts == 3


async def test_cancellation_passes_through_at_once_with_one_attempt() -> None:
    attempts = 0

    async def attempt() -> str:
        nonlocal attempts
        attempts += 1
        await asyncio.sleep(60)
        return "reply"

    task = asyncio.create_task(RetryPolicy().run(attempt, deadline_s=600))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 1)
    assert attempts == 1


async def test_cancellation_during_the_wait_passes_through() -> None:
    task = asyncio.create_task(RetryPolicy(chance=lambda: 1.0).run(failing(broken()), deadline_s=600))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 1)


async def test_an_error_of_our_own_is_not_swallowed_by_retries() -> None:
    world = World()
    with pytest.raises(ZeroDivisionError):
        await run(world, failing(ZeroDivisionError()))
    assert world.slept == []
