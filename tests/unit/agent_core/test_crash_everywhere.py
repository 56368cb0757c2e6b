"""A process killed at any position of the journal: the next one goes on to the same end, and nothing is done twice."""

from __future__ import annotations

from typing import Any

import pytest

from agent.events import EventKind
from agent.llm.model import FailureKind, LLMFailure, Reply, Request
from agent.store.fold import RunState, fold
from tests.unit.agent_core.fakes import (
    Killed,
    World,
    answered,
    attempt_of,
    by_role,
    calls,
    plan,
    prompt,
    refine,
    reflection,
    settings,
    submit,
    task_of,
    text,
    verdict,
)

PARTS = [{"goal": "left", "acceptance": []}, {"goal": "right", "acceptance": [], "outputs": {"n": "a count"}}]
FIRST = plan(
    {"goal": "load", "outputs": {"rows": "count"}},
    {"goal": "analyse", "inputs": {"rows": "t1.rows"}},
    {"goal": "big", "outputs": {"n": "a count"}},
    {"goal": "hopeless", "failure_policy": "retry"},
)


def act(request: Request) -> Reply | LLMFailure:
    """All that an actor does wrong, once each, and what it does right."""
    task, seen, said = task_of(request), len(answered(request)), prompt(request)
    if task == "t1":
        return _load(seen, said)
    if task == "t2":
        bad = attempt_of(request) == 1
        return calls(("write", {"x": attempt_of(request)})) if seen == 0 else submit("wrong" if bad else "right")
    if task == "t3":
        return submit(success=False, reason="too big")
    if task == "t3.2":
        return submit("counted", outputs={"n": 3}, plan_change="" if "step 1:" in said else "look at t4 again")
    return submit(success=task == "t3.1", reason="no way")


def _load(seen: int, said: str) -> Reply | LLMFailure:
    if "was no tool call" not in said:
        return text("I shall think first.")
    if "did not arrive whole" not in said:
        return LLMFailure(FailureKind.INCOMPLETE, "the stream broke off")
    if seen == 0:
        return calls(("look", {"x": 1}), ("write", {"x": 2}), ("lok", {}), ("look", "{broken"))
    if seen == 4:
        return calls(("look", {"x": 1}))
    return submit("loaded", outputs={"rows": 9})


def judge(request: Request) -> Reply:
    if task_of(request) == "t2" and "wrong" in prompt(request).split("# What was handed in")[1]:
        return verdict(passed=False, criticism="the figures are off")
    return verdict()


def mend(request: Request) -> Reply:
    task = task_of(request)
    if task == "t2":
        return refine({"op": "modify", "task_id": "t2", "changes": {"goal": "analyse with care"}})
    if task == "t3":
        return refine({"op": "split", "task_id": "t3", "tasks": PARTS})
    if task == "t3.2" and "# What you did in earlier steps of this refinement\n(none yet)" in prompt(request):
        return refine({"op": "modify", "task_id": "t4", "changes": {"priority": 1}})
    return refine()


POLICY = by_role(
    plan_generator=lambda r: FIRST if len(r.messages) > 2 else text("a plan in prose"),
    actor=act,
    critic=judge,
    plan_refiner=mend,
    reflector=lambda r: reflection(f"did {task_of(r)}", [f"lesson of {task_of(r)}"]),
)
OPTIONS = settings(loop={"max_revisions": 1, "max_refinements": 2})


def world() -> World:
    return World(POLICY, options=OPTIONS)


def outcome_of(state: RunState) -> dict[str, Any]:
    """The end as a person sees it: times, costs and positions left out."""
    return {
        "state": state.state,
        "answer": state.answer,
        "reason": state.reason,
        "tasks": [
            (n.definition(), str(n.state), n.attempt, n.result, n.output_values, n.reason, n.reflection)
            for n in state.plan
        ],
        "history": [(h["task_id"], h["from"], h["to"], h["attempt"]) for h in state.history],
        "steps": {key: [s.thought for s in a.steps.values()] for key, a in state.attempts.items()},
    }


async def uninterrupted() -> World:
    whole = world()
    assert (await whole.run()).exit_code == 1  # t4 has no way
    return whole


async def test_the_script_has_every_kind_of_event_that_a_run_in_memory_has() -> None:
    whole = await uninterrupted()
    state = fold(whole.events)
    seen = {e.kind for e in whole.events}
    missing = {str(k) for k in set(EventKind) - seen}
    assert missing == {"run_resumed", "session_opened", "breaker_changed", "note"}
    assert {n.id: str(n.state) for n in state.plan} == {
        "t1": "success",
        "t2": "success",
        "t3": "success",
        "t4": "blocked",
        "t3.1": "success",
        "t3.2": "success",
    }


@pytest.mark.parametrize("before", [False, True], ids=["after_append", "before_append"])
async def test_killed_at_every_position_the_run_comes_to_the_same_end(before: bool) -> None:
    whole = await uninterrupted()
    expected, asked = outcome_of(fold(whole.events)), len(whole.requests)
    for position in range(1, len(whole.events) + 1):
        again = world()
        with pytest.raises(Killed):
            await again.process(die_at=position, before=before).execute()
        await again.run()
        state = fold(again.events)
        where = f"killed at event {position}: {whole.events[position - 1].kind}"
        assert outcome_of(state) == expected, where
        assert len(again.requests) <= asked + 1, where
        assert again.server.effects == whole.server.effects, where
        assert set(again.server.effects.values()) == {1}, where
        settled = [e.data["key"] for e in again.events if e.kind in {EventKind.LLM_REPLIED, EventKind.TOOL_SETTLED}]
        assert len(settled) == len(set(settled)), where


async def test_killed_again_and_again_every_few_events_the_run_still_ends_and_stays_within_its_bound() -> None:
    whole = await uninterrupted()
    for stride in (3, 4, 7):
        again = world()
        processes = 0
        while True:
            processes += 1
            try:
                await again.process(die_at=stride).execute()
                break
            except Killed:
                assert processes <= len(whole.events)
        state = fold(again.events)
        assert outcome_of(state) == outcome_of(fold(whole.events))
        assert set(again.server.effects.values()) == {1}
        assert len(again.requests) <= len(whole.requests) + processes
        assert (
            state.cost.llm_calls
            == len([e for e in again.events if e.kind is EventKind.LLM_REQUESTED])
            <= state.bound.llm_calls
        )


async def test_a_request_that_was_lost_with_its_process_stays_charged() -> None:
    whole = await uninterrupted()
    position = next(e.seq for e in whole.events if e.kind is EventKind.LLM_REPLIED)
    again = world()
    with pytest.raises(Killed):
        await again.process(die_at=position, before=True).execute()
    await again.run()
    reserved = again.kinds(EventKind.LLM_REQUESTED)[0]["reserved"]["tokens"]
    assert fold(again.events).cost.tokens == fold(whole.events).cost.tokens + reserved
