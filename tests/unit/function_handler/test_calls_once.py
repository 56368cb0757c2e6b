"""The crash windows: whatever dies between intent and outcome, the tool runs once, or the outcome says that nobody knows."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agent.errors import Unreachable
from agent.events import Event, EventKind
from agent.tools.outcome import OutcomeKind
from tests.unit.function_handler.conftest import Agent, until
from tests.unit.function_handler.fake_toolserver import FakeToolServer, refusal

POST = ("POST", "/tools/")


class Killed(BaseException):
    """Stands for kill -9: nothing of the process goes on."""


def kill_at(agent: Agent, kind: EventKind, *, written: bool) -> None:
    """The process dies at the first event of that kind, before or after it is durable."""
    append = agent.journal.append

    def dying(event_kind: EventKind, data: dict[str, Any]) -> Event:
        if event_kind is kind and not written:
            raise Killed
        event = append(event_kind, data)
        if event_kind is kind:
            raise Killed
        return event

    agent.journal.append = dying  # type: ignore[method-assign, assignment]


async def test_a_call_is_intended_before_it_is_sent_and_settled_after(agent: Agent, server: FakeToolServer) -> None:
    outcome = await agent.call()
    assert outcome.kind is OutcomeKind.DONE
    assert outcome.executed == "yes"
    assert agent.kinds() == [EventKind.SESSION_OPENED, EventKind.TOOL_INTENDED, EventKind.TOOL_SETTLED]
    intended = agent.of(EventKind.TOOL_INTENDED)[0]
    sent = server.sent(*POST)[0]
    assert sent.headers["idempotency-key"] == intended["call_id"] == outcome.call_id
    assert intended["arguments"] == {"text": "a"}
    assert intended["effect"] == "once"
    assert agent.allowance.reserved == 1


async def test_what_is_settled_is_answered_from_the_journal_without_a_request(
    agent: Agent, server: FakeToolServer
) -> None:
    first = await agent.call()
    server.requests.clear()
    later = agent.again()
    assert await later.call() == first
    assert server.requests == []
    assert later.allowance.reserved == 0


@pytest.mark.parametrize("written", [False, True])
async def test_an_agent_killed_at_its_intent_runs_the_tool_once(
    agent: Agent, server: FakeToolServer, written: bool
) -> None:
    kill_at(agent, EventKind.TOOL_INTENDED, written=written)
    with pytest.raises(Killed):
        await agent.call()
    later = agent.again()
    assert (await later.call()).kind is OutcomeKind.DONE
    assert len(server.effects) == 1
    assert len(server.sessions) == 1, "the session of the process before is used again"
    assert later.allowance.reserved == (0 if written else 1), "an intent that is journalled is paid for"


async def test_an_agent_killed_after_the_tool_ran_takes_the_stored_outcome(
    agent: Agent, server: FakeToolServer
) -> None:
    kill_at(agent, EventKind.TOOL_SETTLED, written=False)
    with pytest.raises(Killed):
        await agent.call()
    assert len(server.effects) == 1
    later = agent.again()
    assert (await later.call()).kind is OutcomeKind.DONE
    assert len(server.effects) == 1
    assert len(server.sent(*POST)) == 1, "it was asked for by id, not sent again"


async def test_an_agent_killed_while_the_tool_runs_waits_for_it(agent: Agent, server: FakeToolServer) -> None:
    task = asyncio.create_task(agent.call(arguments={"seconds": 0.5}))
    await until(lambda: server.calls)
    await agent.client.close()
    events = list(agent.events)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    for call in server.calls.values():  # the dying process sent no cancel
        if call.done.is_set():
            pytest.fail("the call was cancelled")
    later = Agent(server, agent.folder, events)
    assert (await later.call()).kind is OutcomeKind.DONE
    assert len(server.effects) == 1


@pytest.mark.parametrize("kind", ["drop_after", "cut_after", "hang_after"])
async def test_a_lost_answer_is_asked_for_by_id(agent: Agent, server: FakeToolServer, kind: str) -> None:
    server.fault(*POST, kind)
    outcome = await agent.call()
    assert outcome.kind is OutcomeKind.DONE
    assert len(server.effects) == 1
    assert len(server.sent(*POST)) == 1
    assert len(server.sent("GET", "/v1/calls/")) == 1


@pytest.mark.parametrize("kind", ["drop_before", "hang_before"])
async def test_a_request_that_never_arrived_is_sent_again_with_its_id(
    agent: Agent, server: FakeToolServer, kind: str
) -> None:
    server.fault(*POST, kind)
    assert (await agent.call()).kind is OutcomeKind.DONE
    assert len(server.effects) == 1
    ids = {request.headers["idempotency-key"] for request in server.sent(*POST)}
    assert len(ids) == 1


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 30\r\n\r\n<html><body>hello</body></html>",
        b'HTTP/1.1 200 OK\r\ncontent-length: 13\r\n\r\n{"call_id": 1',
        b'HTTP/1.1 200 OK\r\ncontent-length: 22\r\n\r\n{"call_id": "another"}',
        b"HTTP/1.1 502 Bad\r\ncontent-length: 15\r\n\r\n<html>no</html>",
        b"HTTP/1.1 999 What\r\ncontent-length: 2\r\n\r\n{}",
        b"\x00\x01garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 4\r\n\r\n\x1f\x8b\x08\x00",
        b'HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{"cal',
    ],
)
async def test_an_answer_that_cannot_be_read_proves_nothing_and_is_asked_for(
    agent: Agent, server: FakeToolServer, raw: bytes
) -> None:
    server.fault(*POST, "raw", raw=raw)
    assert (await agent.call()).kind is OutcomeKind.DONE
    assert len(server.effects) == 1
    assert server.sent("GET", "/v1/calls/")


async def test_a_server_restarted_before_it_ran_the_call_runs_it_once(agent: Agent, server: FakeToolServer) -> None:
    await agent.call("peek")  # the session is open
    await server.stop()
    task = asyncio.create_task(agent.call(key="t1/a1/actor/s2/c0"))
    await asyncio.sleep(0.005)
    await server.start()
    assert (await task).kind is OutcomeKind.DONE
    assert server.effects == [("peek", {"text": "a"}), ("note", {"text": "a"})]


async def test_a_once_call_cut_down_with_its_server_is_unknown_and_not_repeated(
    agent: Agent, server: FakeToolServer
) -> None:
    task = asyncio.create_task(agent.call(arguments={"seconds": 20}))
    await until(lambda: server.calls)
    await server.stop()
    server.crash()
    await server.start()
    outcome = await task
    assert outcome.kind is OutcomeKind.UNKNOWN
    assert outcome.code == "outcome_unknown"
    assert outcome.executed == "possible"
    assert "Nobody can say how this call ended" in outcome.observation
    assert "before doing it again" in outcome.observation
    assert len(server.calls) == 1


@pytest.mark.parametrize("tool", ["peek", "put"])
async def test_a_repeatable_call_of_unknown_end_is_made_once_more_under_another_id(
    agent: Agent, server: FakeToolServer, tool: str
) -> None:
    server.answer_with(*POST, refusal(500, "outcome_unknown", effects="possible"))
    outcome = await agent.call(tool)
    assert outcome.kind is OutcomeKind.DONE
    first, second = agent.of(EventKind.TOOL_INTENDED)
    assert first["call_id"] != second["call_id"] == outcome.call_id
    assert second["key"] == first["key"] + "/again"
    assert agent.allowance.reserved == 2


async def test_a_repetition_that_ends_unknown_too_is_not_made_a_third_time(
    agent: Agent, server: FakeToolServer
) -> None:
    server.answer_with(*POST, *[refusal(500, "outcome_unknown", effects="possible")] * 5)
    assert (await agent.call("peek")).kind is OutcomeKind.UNKNOWN
    assert len(server.sent(*POST)) == 2


async def test_a_repetition_is_found_again_after_a_crash(agent: Agent, server: FakeToolServer) -> None:
    server.answer_with(*POST, refusal(500, "outcome_unknown", effects="possible"))
    kill_at(agent, EventKind.TOOL_SETTLED, written=False)
    with pytest.raises(Killed):
        await agent.call("put")
    later = agent.again()
    outcome = await later.call("put")
    assert outcome.kind is OutcomeKind.DONE
    assert outcome.call_id == agent.of(EventKind.TOOL_INTENDED)[1]["call_id"]
    assert len(server.effects) == 1


async def test_a_server_that_lost_its_memory_proves_nothing(agent: Agent, server: FakeToolServer) -> None:
    kill_at(agent, EventKind.TOOL_SETTLED, written=False)
    with pytest.raises(Killed):
        await agent.call()
    server.forget()
    later = agent.again()
    outcome = await later.call()
    assert outcome.kind is OutcomeKind.UNKNOWN
    assert len(server.effects) == 1
    assert "workspace is restored to the state before this call" in outcome.observation


async def test_an_outcome_nobody_could_ask_for_is_unknown(agent: Agent, server: FakeToolServer) -> None:
    await agent.call("peek")
    task = asyncio.create_task(agent.call(arguments={"seconds": 0.1}, key="t1/a1/actor/s2/c0"))
    await until(lambda: len(server.calls) >= 2)
    await server.stop()
    outcome = await task
    assert outcome.kind is OutcomeKind.UNKNOWN
    assert outcome.executed == "possible"


async def test_a_server_that_is_gone_while_a_call_is_followed_leaves_it_unknown(
    agent: Agent, server: FakeToolServer
) -> None:
    task = asyncio.create_task(agent.call(arguments={"seconds": 20}))
    await until(lambda: server.sent("GET", "/v1/calls/"))
    await server.stop()
    outcome = await task
    assert (outcome.kind, outcome.executed) == (OutcomeKind.UNKNOWN, "possible")


async def test_a_resume_without_its_server_leaves_the_call_open_for_the_next(
    agent: Agent, server: FakeToolServer
) -> None:
    kill_at(agent, EventKind.TOOL_SETTLED, written=False)
    with pytest.raises(Killed):
        await agent.call()
    await server.stop()
    with pytest.raises(Unreachable, match="connection refused"):
        await agent.again().call()
    await server.start()
    with pytest.raises(Unreachable, match="AGENT_TOOLSERVER__API_KEY"):
        await agent.again(key="wrong").call()
    assert (await agent.again().call()).kind is OutcomeKind.DONE
    assert len(server.effects) == 1


async def test_five_equal_calls_at_five_places_run_five_times(agent: Agent, server: FakeToolServer) -> None:
    outcomes = await asyncio.gather(*(agent.call(key=f"t1/a1/actor/s{n}/c0") for n in range(5)))
    assert all(outcome.ok for outcome in outcomes)
    assert len(server.effects) == 5
    assert len({outcome.call_id for outcome in outcomes}) == 5
    assert len(server.sessions) == 1, "calls that start together open one session"


async def test_every_kill_along_a_call_ends_with_one_effect(server: FakeToolServer, tmp_path: Path) -> None:
    """The process dies at each event in turn, before and after it is durable, and again in the next process."""
    moments = [
        (kind, written)
        for kind in (EventKind.SESSION_OPENED, EventKind.TOOL_INTENDED, EventKind.TOOL_SETTLED)
        for written in (False, True)
    ]
    for number, first in enumerate(moments):
        for second in moments:
            server.effects.clear()
            events: list[Event] = []
            folder = tmp_path / f"{number}-{second}"
            for kind, written in (first, second):
                process = Agent(server, folder, events, run_id=folder.name)
                kill_at(process, kind, written=written)
                with suppress(Killed):
                    await process.call()
            last = Agent(server, folder, events, run_id=folder.name)
            assert (await last.call()).kind is OutcomeKind.DONE
            assert len(server.effects) == 1, (first, second)
