"""Allowances: reserved before, settled after, never given back by a crash or a resume."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import pytest

from agent.budget import MAX_GAP_S, Allowances, Bound, Budget, Ledger
from agent.errors import BudgetExhausted
from agent.events import Event, EventKind
from agent.llm.model import FailureKind, LLMFailure, Reply, Request, Usage
from agent.loops.run import Goal, Run
from agent.settings import BudgetSettings
from agent.store.fold import fold
from tests.unit.agent_core.fakes import FakeModel, FakeTools, MortalJournal, World, by_role, calls, settings, submit

_seq = count(1)


def event(kind: EventKind, at: float = 0.0, **data: Any) -> Event:
    return Event("r", next(_seq), at, kind, data, "", "")


def free(_prompt: int, _completion: int) -> float:
    return 0.0


def requested(key: str, tokens: int = 500, usd: float = 0.0) -> Event:
    return event(EventKind.LLM_REQUESTED, key=key, reserved={"tokens": tokens, "usd": usd})


def replied(key: str, prompt: int = 100, completion: int = 20, usd: float = 0.0) -> Event:
    return event(
        EventKind.LLM_REPLIED, key=key, usage={"prompt_tokens": prompt, "completion_tokens": completion}, usd=usd
    )


def test_a_reservation_counts_until_the_reply_settles_it() -> None:
    ledger = Ledger()
    ledger.apply(requested("a", 500, 0.5))
    assert (ledger.total.tokens, ledger.total.usd, ledger.total.llm_calls) == (500, 0.5, 1)
    ledger.apply(replied("a", usd=0.1))
    assert (ledger.total.tokens, ledger.total.llm_calls) == (120, 1)
    assert ledger.total.usd == pytest.approx(0.1)


def test_a_request_without_a_reply_stays_charged_when_it_is_sent_again() -> None:
    ledger = Ledger()
    for entry in (requested("a"), requested("a"), replied("a")):
        ledger.apply(entry)
    assert (ledger.total.tokens, ledger.total.llm_calls) == (620, 2)


@pytest.mark.parametrize(
    ("code", "charged"), [("unreachable", 0), ("refused", 0), ("overflow", 0), ("timeout", 500), ("incomplete", 500)]
)
def test_a_failure_without_usage_is_charged_unless_nothing_can_have_been_billed(code: str, charged: int) -> None:
    ledger = Ledger()
    ledger.apply(requested("a"))
    ledger.apply(event(EventKind.LLM_FAILED, key="a", code=code, message=""))
    assert ledger.total.tokens == charged


def test_a_failure_with_usage_is_charged_what_it_used() -> None:
    ledger = Ledger()
    ledger.apply(requested("a"))
    ledger.apply(
        event(
            EventKind.LLM_FAILED,
            key="a",
            code="incomplete",
            message="",
            usage={"prompt_tokens": 7, "completion_tokens": 1},
        )
    )
    assert ledger.total.tokens == 8


def test_cached_tokens_count_once_as_part_of_the_prompt() -> None:
    ledger = Ledger()
    ledger.apply(requested("a"))
    usage = {"prompt_tokens": 40_000, "completion_tokens": 10, "cached_tokens": 39_000}
    ledger.apply(event(EventKind.LLM_REPLIED, key="a", usage=usage, usd=0.0))
    assert ledger.total.tokens == 40_010


def test_a_tool_call_sent_again_after_a_crash_is_one_call() -> None:
    ledger = Ledger()
    for key in ("a/c0", "a/c0", "a/c1"):
        ledger.apply(event(EventKind.TOOL_INTENDED, key=key))
    assert ledger.total.tool_calls == 2


def test_seconds_count_within_processes_and_not_between_them() -> None:
    ledger = Ledger()
    ledger.apply(event(EventKind.RUN_STARTED, 100))
    ledger.apply(event(EventKind.NOTE, 107))
    ledger.apply(event(EventKind.NOTE, 50))  # the clock was set back
    ledger.apply(event(EventKind.NOTE, 51))
    ledger.apply(event(EventKind.RUN_RESUMED, 5000))
    ledger.apply(event(EventKind.NOTE, 5002))
    assert ledger.seconds == 10


def test_a_clock_that_jumps_ahead_does_not_use_up_the_time_of_a_run() -> None:
    ledger = Ledger()
    ledger.apply(event(EventKind.RUN_STARTED, 100))
    ledger.apply(event(EventKind.NOTE, 100 + 10 * 365 * 86400))
    ledger.apply(event(EventKind.NOTE, 105 + 10 * 365 * 86400))
    assert ledger.seconds == MAX_GAP_S + 5


def test_the_reply_is_shortened_to_what_is_left_of_tokens_and_money() -> None:
    budget = Budget(Allowances(10, 10, tokens=1000))
    assert budget.reserve_llm(300, 4096, free).max_tokens == 700
    budget = Budget(Allowances(10, 10, usd=1.0))
    reserved = budget.reserve_llm(100, 4096, lambda p, c: (p + c) / 1000)
    assert reserved.max_tokens == 900
    assert reserved.usd <= 1.0


@pytest.mark.parametrize(
    ("allowances", "name"),
    [
        (Allowances(0, 9), "llm_calls"),
        (Allowances(9, 9, tokens=320), "tokens"),
        (Allowances(9, 9, usd=0.31), "usd"),
        (Allowances(9, 9, seconds=0), "seconds"),
    ],
)
def test_each_allowance_stops_the_request_that_no_longer_fits(allowances: Allowances, name: str) -> None:
    budget = Budget(allowances)
    with pytest.raises(BudgetExhausted) as stop:
        budget.reserve_llm(300, 4096, lambda p, c: (p + c) / 1000)
    assert stop.value.allowance == name
    assert "higher allowance" in stop.value.message


def test_no_allowance_is_above_the_bound() -> None:
    allowed = Allowances.of(BudgetSettings(max_llm_calls=10**9, max_tool_calls=3), Bound(50, 60))
    assert (allowed.llm_calls, allowed.tool_calls) == (50, 3)


def never_done(x: Any = None) -> Any:
    numbers = count()
    return by_role(actor=lambda _: calls(("look", {"x": next(numbers)})))


async def test_three_calls_allowed_are_three_calls_made() -> None:
    world = World(never_done(), options=settings(budget={"max_llm_calls": 3}))
    result = await world.run()
    assert (result.state, result.exit_code) == ("stopped", 3)
    assert len(world.requests) == 3
    assert "3 of 3 model calls" in result.reason
    assert "t1 (executing) first" in result.answer


async def test_tool_calls_tokens_and_money_are_never_overshot() -> None:
    for budget in ({"max_tool_calls": 5}, {"max_tokens": 2500}, {"max_usd": 0.0025}):
        world = World(never_done(), options=settings(budget=budget), price=1e-6)
        assert (await world.run()).exit_code == 3
        used = fold(world.events).cost
        assert used.tool_calls <= budget.get("max_tool_calls", 10**9)
        assert used.tokens <= budget.get("max_tokens", 10**9)
        assert used.usd <= budget.get("max_usd", 10**9)


async def test_resume_does_not_give_anything_back_and_a_higher_allowance_goes_on() -> None:
    world = World(by_role(), options=settings(budget={"max_llm_calls": 4}))
    assert (await world.run()).exit_code == 3
    assert (await world.run()).exit_code == 3
    assert len(world.requests) == 4
    world.options = settings(budget={"max_llm_calls": 20})
    assert (await world.run()).state == "done"
    assert len(world.requests) == 8


async def test_a_reply_that_takes_longer_than_the_run_may_is_cut_off() -> None:
    class Slow(FakeModel):
        async def complete(self, request: Request, *, deadline_s: float) -> Reply:
            assert request.messages
            assert deadline_s <= 0.3
            await asyncio.sleep(30)
            raise AssertionError

    journal = MortalJournal("r", [])
    world = World(by_role())
    slow = Slow(world.policy)
    run = Run(
        journal=journal,
        models=lambda _: slow,
        tools=FakeTools(journal, world.server),
        settings=settings(budget={"max_seconds": 0.3}),
        goal=Goal("g"),
    )
    result = await run.execute()
    assert (result.state, result.exit_code) == ("stopped", 3)
    assert "0.3 seconds are used up" in result.reason


async def test_a_model_that_lies_about_its_usage_is_stopped_at_the_next_call() -> None:
    def lying(_: Request) -> Reply:
        return Reply("", submit().tool_calls, "tool_calls", Usage(10**6, 0), "fake")

    world = World(by_role(actor=lying), options=settings(budget={"max_tokens": 50_000}))
    assert (await world.run()).exit_code == 3
    assert len(world.asked("actor")) == 1


async def test_a_retry_of_a_failed_request_draws_from_the_same_allowance() -> None:
    world = World(
        by_role(critic=lambda _: LLMFailure(FailureKind.UNREACHABLE, "down")),
        options=settings(budget={"max_llm_calls": 5}),
    )
    assert [(await world.run()).exit_code for _ in range(4)] == [5, 5, 5, 3]
    assert len(world.requests) == 5


async def test_a_raised_budget_holds_for_later_resumptions_too() -> None:
    world = World(by_role(), options=settings(budget={"max_llm_calls": 1}))
    assert (await world.run()).exit_code == 3
    world.options = settings(budget={"max_llm_calls": 2})
    assert (await world.run()).exit_code == 3
    assert fold(world.events).settings["budget"]["max_llm_calls"] == 2
