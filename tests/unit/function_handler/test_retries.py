"""Retries: one budget a step, jittered, as long as the server asks but not longer than sensible, and only for what is transient."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from agent.errors import BudgetExhausted, Unreachable
from agent.events import EventKind
from agent.tools.outcome import OutcomeKind
from agent.tools.retry_policy import StepRetries, Transient
from agent.toolserver_client.errors import NoAnswer, NoAnswerKind, ToolServerAnswer
from tests.unit.function_handler.conftest import QUICK, Agent, until
from tests.unit.function_handler.fake_toolserver import FakeToolServer, refusal

POST = ("POST", "/tools/")


def refused(retry_after_s: float | None = None) -> Transient:
    return Transient(ToolServerAnswer(503, "no_capacity", {"message": "m"}, retry_after_s))


async def run(retries: StepRetries, problem: BaseException, rounds: list[int]) -> None:
    async for attempt in retries.attempts():
        with attempt:
            rounds.append(1)
            raise problem


async def test_one_budget_covers_all_that_a_step_does() -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    retries, rounds = StepRetries(5, 600, sleep=sleep), list[int]()
    for _ in range(3):
        with pytest.raises(Transient):
            await run(retries, refused(), rounds)
    assert len(rounds) == 5 + 2, "five attempts in all, then one try for each further thing"
    assert len(waits) == 4
    assert all(0 <= wait <= 15 for wait in waits)


async def test_waits_are_jittered_within_a_growing_bound() -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    for _ in range(20):
        with pytest.raises(Transient):
            await run(StepRetries(4, 600, sleep=sleep), refused(), [])
    assert all(wait <= bound for wait, bound in zip(waits, [1, 2, 4] * 20, strict=True))
    assert len({round(wait, 3) for wait in waits}) > 40


@pytest.mark.parametrize(("told", "waits"), [(7.0, 1), (29.0, 1), (31.0, 0), (1e6, 0)])
async def test_retry_after_is_obeyed_up_to_a_cap_and_reported_at_once_beyond(told: float, waits: int) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    with pytest.raises(Transient):
        await run(StepRetries(2, 600, sleep=sleep), refused(told), [])
    assert len(slept) == waits
    assert all(seconds >= told for seconds in slept)


async def test_no_retry_that_would_end_past_the_steps_time() -> None:
    rounds: list[int] = []
    with pytest.raises(Transient):
        await run(StepRetries(5, 3.0, clock=lambda: 0.0), refused(20.0), rounds)
    assert len(rounds) == 1


@pytest.mark.parametrize(
    "problem", [asyncio.CancelledError(), ValueError("x"), NoAnswer(NoAnswerKind.LOST, "x"), KeyboardInterrupt()]
)
async def test_nothing_but_a_transient_is_ever_repeated(problem: BaseException) -> None:
    rounds: list[int] = []
    with pytest.raises(type(problem)):
        await run(StepRetries(5, 600), problem, rounds)
    assert len(rounds) == 1


async def test_a_call_cancelled_while_it_waits_for_its_next_try_ends_at_once(
    server: FakeToolServer, tmp_path: Path
) -> None:
    agent = Agent(server, tmp_path)
    server.answer_with(*POST, *[refusal(503, "no_capacity", retry_after_s=20)] * 9)
    agent.handler._sleep = asyncio.sleep
    task = asyncio.create_task(agent.call())
    await until(lambda: server.sent(*POST))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 4)
    assert len(server.sent(*POST)) == 1


async def test_retry_after_reaches_the_wait(agent: Agent, server: FakeToolServer) -> None:
    server.answer_with(*POST, refusal(503, "draining", retry_after_s=11))
    assert (await agent.call()).ok
    assert len(agent.waits) == 1
    assert 11 <= agent.waits[0] <= 16


async def test_a_server_that_asks_for_an_hour_is_reported_at_once(agent: Agent, server: FakeToolServer) -> None:
    server.answer_with(*POST, refusal(429, "quota_exceeded", retry_after_s=3600))
    outcome = await agent.call()
    assert (outcome.kind, outcome.code) == (OutcomeKind.UNAVAILABLE, "quota_exceeded")
    assert "3600 s" in outcome.observation
    assert len(server.sent(*POST)) == 1


async def test_session_list_and_call_draw_from_one_budget(agent: Agent, server: FakeToolServer) -> None:
    server.answer_with("GET", "/v1/tools", *[refusal(503, "starting")] * 2)
    server.answer_with("POST", "/v1/sessions", *[refusal(503, "no_capacity")] * 2)
    server.answer_with(*POST, *[refusal(503, "no_capacity")] * 9)
    assert (await agent.call()).kind is OutcomeKind.UNAVAILABLE
    assert len(agent.waits) == agent.settings.max_attempts - 1


async def test_no_session_means_no_intent_and_no_charge(agent: Agent, server: FakeToolServer) -> None:
    server.answer_with("POST", "/v1/sessions", *[refusal(503, "no_capacity")] * 20)
    outcome = await agent.call()
    assert (outcome.kind, outcome.code, outcome.executed) == (OutcomeKind.UNAVAILABLE, "no_capacity", "none")
    assert agent.kinds()[-1] is EventKind.TOOL_SETTLED
    assert agent.of(EventKind.TOOL_INTENDED) == []
    assert agent.allowance.reserved == 0


async def test_a_used_up_budget_ends_the_run_before_anything_is_sent(agent: Agent, server: FakeToolServer) -> None:
    agent.allowance.refuse = BudgetExhausted("tool_calls", "no calls are left")
    with pytest.raises(BudgetExhausted):
        await agent.call()
    assert server.sent(*POST) == []
    assert EventKind.TOOL_INTENDED not in agent.kinds()
    assert EventKind.TOOL_SETTLED not in agent.kinds(), "a higher allowance lets the run go on here"


async def test_fifty_agents_against_a_server_at_half_strength_stay_within_their_budgets(
    server: FakeToolServer, tmp_path: Path
) -> None:
    failing = iter([True, False] * 10_000)
    answer = server._answer

    async def half(request: object) -> object:
        if "/tools/" in request.path and next(failing):  # type: ignore[attr-defined]
            return refusal(503, "no_capacity")
        return await answer(request)  # type: ignore[arg-type]

    server._answer = half  # type: ignore[method-assign,assignment]
    agents = [Agent(server, tmp_path / str(n), run_id=f"run-{n}") for n in range(50)]
    outcomes = await asyncio.gather(*(agent.call() for agent in agents))
    good = [outcome for outcome in outcomes if outcome.ok]
    assert len(good) > 25
    assert all(outcome.kind is OutcomeKind.UNAVAILABLE for outcome in outcomes if not outcome.ok)
    assert len(server.sent(*POST)) <= 50 * QUICK.max_attempts
    assert len(server.effects) == len(good)


async def test_a_catalog_that_was_never_seen_names_what_is_wrong(agent: Agent, server: FakeToolServer) -> None:
    await server.stop()
    with pytest.raises(Unreachable) as problem:
        await agent.handler.catalog()
    assert server.url in problem.value.message
    assert "connection refused" in problem.value.message
    outcome = await agent.call()
    assert outcome.kind is OutcomeKind.UNAVAILABLE
    await server.start()
    assert len(await agent.handler.catalog()) == 3


async def test_a_catalog_behind_a_wrong_key_names_the_setting(server: FakeToolServer, tmp_path: Path) -> None:
    agent = Agent(server, tmp_path, key="wrong")
    with pytest.raises(Unreachable, match="AGENT_TOOLSERVER__API_KEY"):
        await agent.handler.catalog()
    assert len(server.sent("GET", "/v1/tools")) == 1


async def test_the_catalog_is_asked_for_once_and_leaves_out_the_handlers_own_tools(
    agent: Agent, server: FakeToolServer
) -> None:
    server.add_tool("call_wait")
    server.add_tool("call_cancel")
    tools = {tool.name: tool.effect for tool in await agent.handler.catalog()}
    assert tools == {"note": "once", "peek": "read", "put": "idempotent"}
    await agent.handler.catalog()
    await agent.call()
    assert len(server.sent("GET", "/v1/tools")) == 1
    assert (await agent.call("call_wait", key="t1/a1/actor/s9/c0")).kind is OutcomeKind.UNKNOWN_TOOL


async def test_arguments_go_out_as_the_model_meant_them(agent: Agent, server: FakeToolServer) -> None:
    await agent.call(arguments='```json\n{"text": "grüß 日本 \\n", "number": 5,}\n```')
    assert json.loads(server.sent(*POST)[0].body)["arguments"] == {"text": "grüß 日本 \n", "number": 5}
