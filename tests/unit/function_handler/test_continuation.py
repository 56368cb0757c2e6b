"""450: followed under the same id up to the limit, then stopped; and Ctrl-C, which stops the call where it runs."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from agent.events import EventKind
from agent.tools.outcome import OutcomeKind
from tests.unit.function_handler.conftest import QUICK, Agent, until
from tests.unit.function_handler.fake_toolserver import FakeToolServer, Reply, done, refusal

POST = ("POST", "/tools/")
CALLS = "/v1/calls/"


def running(call_id: str = "x", text: str = "so far") -> Reply:
    extra: dict[str, Any] = {
        "type": "retry",
        "next_calling": "call_wait",
        "arguments": {"call_id": call_id},
        "content": [{"type": "text", "text": text}],
    }
    return refusal(450, "still_running", call_id=call_id, effects="possible", **extra)


async def test_a_call_that_outlives_its_wait_is_followed_to_its_end(agent: Agent, server: FakeToolServer) -> None:
    outcome = await agent.call(arguments={"seconds": 0.8})
    assert outcome.kind is OutcomeKind.DONE
    assert len(server.sent(*POST)) == 1
    followed = server.sent("GET", CALLS)
    assert 2 <= len(followed) <= 4
    assert {request.path for request in followed} == {f"{CALLS}{outcome.call_id}"}
    assert len(server.effects) == 1


async def test_only_the_calls_own_id_is_followed(agent: Agent, server: FakeToolServer) -> None:
    server.fault(*POST, "reply", reply=running("of-another-tenant"))
    outcome = await agent.call()
    assert "of-another-tenant" not in "".join(request.path for request in server.requests)
    assert outcome.kind is OutcomeKind.UNKNOWN, "the server had it running a moment ago, and now knows nothing of it"


async def test_after_all_continuations_it_is_cancelled_and_times_out_with_its_output(
    agent: Agent, server: FakeToolServer
) -> None:
    outcome = await agent.call(arguments={"seconds": 60})
    assert (outcome.kind, outcome.code, outcome.executed) == (OutcomeKind.TIMEOUT, "still_running", "possible")
    assert len(server.sent("GET", CALLS)) == agent.settings.max_continuations + 1
    assert len(server.sent("DELETE", CALLS)) == 1
    assert server.calls[outcome.call_id].done.is_set()
    assert server.effects == []
    assert "was stopped" in outcome.observation


async def test_a_call_that_ends_by_itself_when_it_is_stopped_is_done(agent: Agent, server: FakeToolServer) -> None:
    async def stubborn(_session: str, _arguments: object) -> tuple[int, dict[str, object]]:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return 200, done("made it")
        raise AssertionError

    server.behaviours["note"] = stubborn
    outcome = await agent.call()
    assert outcome.kind is OutcomeKind.DONE
    assert "made it" in outcome.observation


async def test_a_call_that_can_not_be_stopped_is_a_timeout_all_the_same(agent: Agent, server: FakeToolServer) -> None:
    server.fault(*POST, "reply", reply=running())
    for _ in range(agent.settings.max_continuations + 1):
        server.fault("GET", CALLS, "reply", reply=running(text="still so far"))
    server.answer_with("DELETE", CALLS, refusal(503, "draining"))
    outcome = await agent.call()
    assert outcome.kind is OutcomeKind.TIMEOUT
    assert "still so far" in outcome.observation


async def test_a_server_that_does_not_wait_is_not_asked_in_a_tight_loop(agent: Agent, server: FakeToolServer) -> None:
    server.fault(*POST, "reply", reply=running())
    for _ in range(agent.settings.max_continuations + 1):
        server.fault("GET", CALLS, "reply", reply=running())
    await agent.call()
    assert len(agent.waits) == agent.settings.max_continuations
    assert all(wait > 0 for wait in agent.waits)


@pytest.mark.parametrize("kind", ["drop_before", "drop_after", "cut_after"])
async def test_a_connection_lost_while_following_is_taken_up_again(
    agent: Agent, server: FakeToolServer, kind: str
) -> None:
    server.fault("GET", CALLS, kind)
    server.fault("GET", CALLS, kind)
    outcome = await agent.call(arguments={"seconds": 0.9})
    assert outcome.kind is OutcomeKind.DONE
    assert len(server.effects) == 1
    assert len(server.sent(*POST)) == 1


async def test_a_call_that_fails_while_it_is_followed_has_failed(agent: Agent, server: FakeToolServer) -> None:
    async def failing(_session: str, _arguments: object) -> tuple[int, dict[str, object]]:
        return 500, {"code": "tool_failed", "content": [{"type": "text", "text": "no such column"}]}

    server.behaviours["note"] = failing
    outcome = await agent.call(arguments={"seconds": 0.5})
    assert outcome.kind is OutcomeKind.FAILED
    assert "no such column" in outcome.observation


async def test_a_deadline_that_has_passed_ends_the_following(server: FakeToolServer, tmp_path: Path) -> None:
    now = 0.0

    def clock() -> float:
        return now

    agent = Agent(
        server, tmp_path, options={"clock": clock}, settings=QUICK.model_copy(update={"max_continuations": 1000})
    )
    call = asyncio.create_task(agent.call(arguments={"seconds": 60}))
    await until(lambda: server.sent("GET", CALLS))
    now = 1000.0
    outcome = await asyncio.wait_for(call, 5)
    assert outcome.kind is OutcomeKind.TIMEOUT
    assert len(server.sent("GET", CALLS)) < 5


async def test_ctrl_c_cancels_the_call_where_it_runs_and_settles_it(agent: Agent, server: FakeToolServer) -> None:
    task = asyncio.create_task(agent.call(arguments={"seconds": 60}))
    await until(lambda: server.calls)
    task.cancel()
    started = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - started < 3
    call = next(iter(server.calls.values()))
    assert call.done.is_set()
    assert agent.kinds()[-1] is EventKind.TOOL_SETTLED
    await agent.handler.close()
    asked = len(server.requests)
    outcome = await agent.again().call()
    assert (outcome.kind, outcome.executed) == (OutcomeKind.CANCELLED, "possible")
    assert "interrupted while it ran" in outcome.observation
    assert len(server.requests) == asked, "it is answered from the journal"
    assert server.effects == []


def half_done(server: FakeToolServer) -> None:
    """The tool `note` writes a file, then goes on for long."""

    async def work(session_id: str, _arguments: dict[str, object]) -> tuple[int, dict[str, object]]:
        server.sessions[session_id]["half.txt"] = b"half"
        await asyncio.sleep(60)
        return 200, {}

    server.behaviours["note"] = work


async def test_what_an_interrupted_call_had_written_is_fetched_before_its_session_ends(
    agent: Agent, server: FakeToolServer
) -> None:
    half_done(server)
    task = asyncio.create_task(agent.call())
    await until(lambda: server.effects)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await agent.handler.close()
    assert server.sessions == {}
    later = agent.again()
    assert later.store.files() == {"half.txt": 4}
    assert (await later.call()).kind is OutcomeKind.CANCELLED
    following = await later.call(key="t1/a1/actor/s2/c0", tool="peek")
    assert "Python variables, open shells" in following.observation
    assert server.sessions["s-2"] == {"half.txt": b"half"}


async def test_a_call_that_ended_just_before_the_interrupt_keeps_its_own_end(
    agent: Agent, server: FakeToolServer
) -> None:
    server.fault("POST", "/tools/note", "hang_after")
    task = asyncio.create_task(agent.call())
    await until(lambda: server.effects)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await agent.again().call()).kind is OutcomeKind.DONE
    assert len(server.effects) == 1


async def test_a_call_whose_files_cannot_be_fetched_stays_open_and_keeps_its_session(
    agent: Agent, server: FakeToolServer
) -> None:
    half_done(server)
    task = asyncio.create_task(agent.call())
    await until(lambda: server.effects)
    server.fault("GET", "/archive", "drop_before")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await agent.handler.close()
    assert EventKind.TOOL_SETTLED not in agent.kinds()
    assert list(server.sessions) == ["s-1"], "the next process finds the files there"
    later = agent.again()
    assert (await later.call()).kind is OutcomeKind.CANCELLED
    assert later.store.files() == {"half.txt": 4}


async def test_ctrl_c_is_not_held_up_by_a_server_that_does_not_answer(agent: Agent, server: FakeToolServer) -> None:
    task = asyncio.create_task(agent.call(arguments={"seconds": 60}))
    await until(lambda: server.calls)
    server.fault("DELETE", CALLS, "hang_before")
    started = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - started < 4


async def test_a_second_ctrl_c_ends_even_the_cancelling(agent: Agent, server: FakeToolServer) -> None:
    task = asyncio.create_task(agent.call(arguments={"seconds": 60}))
    await until(lambda: server.calls)
    server.fault("DELETE", CALLS, "hang_before")
    task.cancel()
    await until(lambda: server.sent("DELETE", CALLS))
    started = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - started < 1
    assert len(asyncio.all_tasks()) < 10


async def test_a_call_cancelled_before_it_was_sent_bothers_nobody(agent: Agent, server: FakeToolServer) -> None:
    server.fault("POST", "/v1/sessions", "hang_before")
    task = asyncio.create_task(agent.call())
    await until(lambda: server.sent("POST", "/v1/sessions"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert server.sent("DELETE") == []
    assert EventKind.TOOL_INTENDED not in agent.kinds()
