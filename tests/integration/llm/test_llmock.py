"""An independent judge of our client: llmock breaks the replies, then grades what the client did."""

import itertools
from typing import Any

import pytest
from llmock.pytest_plugin import LLMock

from agent.llm.model import FailureKind, LLMFailure, Message, Request
from agent.llm.retry_policy import RetryPolicy
from tests.integration.llm.conftest import TOOL, MakeModel

ASK = Request("actor", (Message("user", "Please run this program for me."),))
CALL = Request("actor", ASK.messages, (TOOL,))


def policy(**limits: Any) -> RetryPolicy:
    """Real waits, short ones. Chance is fixed: the judge warns of waits that happen not to grow."""
    chances = itertools.cycle([0.5, 0.9])
    return RetryPolicy(first_bound_s=0.3, chance=lambda: next(chances), **limits)


def judge(llmock: LLMock, *, calls: int, attempts: int) -> None:
    """`calls` at least: on a busy machine llmock may see an attempt end after its retry began.

    It then takes the two for separate calls, and its warnings of calls never retried mean nothing.
    """
    verdict = llmock.verdict()
    assert verdict.attempts == attempts
    assert calls <= len(verdict.calls) <= attempts
    llmock.assert_resilient(strict=len(verdict.calls) == calls)


async def test_a_plain_reply_and_a_call(llmock: LLMock, model: MakeModel) -> None:
    llmock.reply("All is well.").call_tool("python_execute", {"code": "1"})
    asker = model(llmock.base_url(), policy())
    assert (await asker.complete(ASK, deadline_s=30)).text == "All is well."
    assert (await asker.complete(CALL, deadline_s=30)).tool_calls[0].name == "python_execute"
    judge(llmock, calls=2, attempts=2)


@pytest.mark.parametrize("retry_after", [0.3, 1.0])
async def test_rate_limits_are_waited_out(llmock: LLMock, model: MakeModel, retry_after: float) -> None:
    llmock.rate_limit(times=2, retry_after=retry_after)
    assert (await model(llmock.base_url(), policy()).complete(ASK, deadline_s=30)).attempts == 3
    judge(llmock, calls=1, attempts=3)


@pytest.mark.parametrize("status", [408, 409, 500, 502, 503, 529])
async def test_failures_that_pass_are_retried_with_growing_waits(llmock: LLMock, model: MakeModel, status: int) -> None:
    llmock.fail(status, times=2)
    assert (await model(llmock.base_url(), policy()).complete(ASK, deadline_s=30)).attempts == 3
    judge(llmock, calls=1, attempts=3)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
async def test_refusals_are_never_retried(llmock: LLMock, model: MakeModel, status: int) -> None:
    llmock.fail(status, times=None)
    with pytest.raises(LLMFailure) as caught:
        await model(llmock.base_url(), policy()).complete(ASK, deadline_s=30)
    assert (caught.value.kind, caught.value.attempts) == (FailureKind.REFUSED, 1)
    judge(llmock, calls=1, attempts=1)


async def test_an_outage_ends_after_bounded_attempts(llmock: LLMock, model: MakeModel) -> None:
    llmock.outage()
    with pytest.raises(LLMFailure) as caught:
        await model(llmock.base_url(), policy()).complete(ASK, deadline_s=30)
    assert (caught.value.kind, caught.value.attempts) == (FailureKind.UNREACHABLE, 4)
    judge(llmock, calls=1, attempts=4)


async def test_overflow_is_known_and_not_retried(llmock: LLMock, model: MakeModel) -> None:
    llmock.context_overflow(times=None)
    with pytest.raises(LLMFailure) as caught:
        await model(llmock.base_url(), policy()).complete(ASK, deadline_s=30)
    assert (caught.value.kind, caught.value.attempts) == (FailureKind.OVERFLOW, 1)
    judge(llmock, calls=1, attempts=1)


@pytest.mark.parametrize("fault", ["disconnect", "truncate", "corrupt"])
async def test_a_broken_stream_is_neither_used_nor_the_end(llmock: LLMock, model: MakeModel, fault: str) -> None:
    getattr(llmock, fault)(after_chunks=2)
    reply = await model(llmock.base_url(), policy()).complete(ASK, deadline_s=30)
    assert (reply.attempts, reply.finish_reason) == (2, "stop")
    judge(llmock, calls=1, attempts=2)


async def test_a_stalled_stream_is_left(llmock: LLMock, model: MakeModel) -> None:
    llmock.stall(after_chunks=2, seconds=20)
    reply = await model(llmock.base_url(), policy(), between_chunks_s=1).complete(ASK, deadline_s=30)
    assert reply.attempts == 2
    judge(llmock, calls=1, attempts=2)


async def test_a_slow_first_token_within_the_deadline_is_awaited(llmock: LLMock, model: MakeModel) -> None:
    llmock.slow_first_token(0.5)
    assert (await model(llmock.base_url(), policy()).complete(ASK, deadline_s=30)).attempts == 1
    judge(llmock, calls=1, attempts=1)


async def test_broken_tool_calls_are_handed_on(llmock: LLMock, model: MakeModel) -> None:
    llmock.break_tool_call("unknown_tool")
    reply = await model(llmock.base_url(), policy()).complete(CALL, deadline_s=30)
    assert reply.tool_calls[0].name != TOOL.name
