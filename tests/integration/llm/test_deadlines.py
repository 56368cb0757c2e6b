"""Silence at every place of an exchange is bounded by our own clock, whatever the server does."""

import asyncio
import socket
import time
from typing import Any

import pytest

from agent.llm.model import FailureKind, LLMFailure
from agent.llm.retry_policy import RetryPolicy
from tests.integration.llm.conftest import ASK, MakeModel, Serve, no_sleep

ONCE = RetryPolicy(1)


async def failure(model: Any, deadline_s: float = 30) -> tuple[LLMFailure, float]:
    started = time.monotonic()
    with pytest.raises(LLMFailure) as caught:
        await model.complete(ASK, deadline_s=deadline_s)
    return caught.value, time.monotonic() - started


@pytest.mark.parametrize(
    ("quirk", "words"),
    [("never_answers", "nothing"), ("stall_after_headers", "no token"), ({"name": "stall", "after": 3}, "mid-reply")],
    ids=str,
)
async def test_silence_is_a_timeout_with_what_it_may_have_cost(
    serve: Serve, model: MakeModel, quirk: Any, words: str
) -> None:
    asker = model(serve(quirk), ONCE, first_token_s=0.5, between_chunks_s=0.5)
    failed, took = await failure(asker)
    assert (failed.kind, failed.attempts) == (FailureKind.TIMEOUT, 1)
    assert words in failed.message
    assert failed.usage is not None
    assert failed.usage.estimated
    assert took < 10


async def test_silence_once_is_tried_again(serve: Serve, model: MakeModel) -> None:
    asker = model(serve({"name": "never_answers", "sends": 1}), first_token_s=1)
    reply = await asker.complete(ASK, deadline_s=30)
    assert reply.attempts == 2
    assert reply.usage.estimated  # the silent attempt may have been charged


@pytest.mark.parametrize("quirk", ["never_answers", "stall_after_headers", "stall", "server_error"])
async def test_the_total_bounds_all_attempts(serve: Serve, model: MakeModel, quirk: str) -> None:
    async def slow(_seconds: float) -> None:
        await asyncio.sleep(0.4)

    asker = model(serve(quirk), RetryPolicy(1000, sleep=slow), first_token_s=0.4, between_chunks_s=0.4)
    failed, took = await failure(asker, deadline_s=1.5)
    assert failed.kind in (FailureKind.TIMEOUT, FailureKind.UNREACHABLE)
    assert took < 10


async def test_the_total_ends_a_first_attempt_too(serve: Serve, model: MakeModel) -> None:
    failed, took = await failure(model(serve("refuses_streaming", "never_answers")), deadline_s=0.7)
    assert (failed.kind, failed.attempts) == (FailureKind.TIMEOUT, 1)
    assert "0.7 s" in failed.message
    assert took < 10
    settled, _ = await failure(model(serve("stall"), total_s=0.7))
    assert settled.kind is FailureKind.TIMEOUT
    assert settled.usage is not None


async def test_a_stall_after_the_finish_reason_costs_only_the_usage(serve: Serve, model: MakeModel) -> None:
    # frames: role, text, opening, arguments in four pieces, finish reason; then the usage never comes
    asker = model(serve({"name": "stall", "after": 8}), between_chunks_s=0.5)
    reply = await asker.complete(ASK, deadline_s=30)
    assert (reply.attempts, reply.finish_reason, reply.usage.estimated) == (1, "tool_calls", True)


async def test_a_server_that_does_not_accept_is_a_timeout(model: MakeModel) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        try:
            for filler in fillers:  # fill the queue, so that a connection is never established
                filler.setblocking(False)
                filler.connect_ex(("127.0.0.1", port))
            failed, took = await failure(model(f"http://127.0.0.1:{port}/v1", ONCE, connect_s=0.5, first_token_s=20))
        finally:
            for filler in fillers:
                filler.close()
    assert failed.kind is FailureKind.TIMEOUT
    assert "connection" in failed.message
    assert took < 15


async def test_a_refused_connection_is_unreachable_and_names_the_place(model: MakeModel) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    failed, _ = await failure(model(url))
    assert (failed.kind, failed.attempts, failed.usage) == (FailureKind.UNREACHABLE, 4, None)
    assert url in failed.message


async def test_a_host_that_has_no_address_is_unreachable(model: MakeModel) -> None:
    failed, _ = await failure(model("http://no-such-host.invalid/v1", RetryPolicy(2, sleep=no_sleep)))
    assert (failed.kind, failed.attempts) == (FailureKind.UNREACHABLE, 2)


@pytest.mark.parametrize("quirk", ["never_answers", "stall"])
async def test_cancellation_passes_through_at_once_and_the_client_stays_usable(
    serve: Serve, model: MakeModel, quirk: str
) -> None:
    server = serve({"name": quirk, "sends": 1})
    asker = model(server)
    task = asyncio.create_task(asker.complete(ASK, deadline_s=30))
    await asyncio.sleep(0.7)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)
    assert len(server.requests) == 1
    assert (await asker.complete(ASK, deadline_s=30)).tool_calls


async def test_a_deadline_of_the_caller_is_not_taken_for_ours(serve: Serve, model: MakeModel) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await model(serve("never_answers")).complete(ASK, deadline_s=30)
