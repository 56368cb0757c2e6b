"""Whatever the model says, a run ends within the bound that was told before it began."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import count
from random import Random
from typing import Any

from agent.budget import worst_case
from agent.events import EventKind
from agent.llm.model import FailureKind, LLMFailure, Reply, Request, ToolCall
from agent.settings import LoopSettings
from agent.store.fold import fold
from agent.tools.outcome import Outcome, OutcomeKind
from tests.unit.agent_core.fakes import (
    USAGE,
    Answer,
    FakeServer,
    Killed,
    World,
    attempt_of,
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

SMALL = {
    "max_steps": 4,
    "max_refinements": 2,
    "max_revisions": 2,
    "max_tasks": 6,
    "max_corrections": 1,
    "max_calls_per_step": 3,
}


class Adversary:
    """Answers at random: nonsense, half-valid and valid replies of every kind, leaning to what keeps a run busy."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._sane = self._random.random()

    def __call__(self, request: Request) -> Answer:
        dice = self._random
        if dice.random() > self._sane:
            return self._nonsense()
        tools: dict[str, Callable[[], tuple[str, Any]]] = {
            "plan_generator": self._plan,
            "plan_refiner": self._refine,
            "critic": lambda: (
                "submit_verdict",
                {"verdict": dice.choice(["pass", "fail"]), "criticism": dice.choice(["", "bad"])},
            ),
            "reflector": lambda: ("submit_reflection", {"summary": "s", "plan_lessons": ["a"], "tool_lessons": []}),
        }
        if request.role in tools:
            return calls(tools[request.role]())
        return self._act() if request.role == "actor" else Reply("answer", (), "stop", USAGE, "fake")

    def _nonsense(self) -> Answer:
        dice = self._random
        nonsense: list[Answer] = [
            Reply("", (), "stop", USAGE, "fake"),
            Reply("prose " * dice.randrange(9), (), "stop", USAGE, "fake"),
            Reply("cut", (ToolCall("c0", "look", '{"x": '),), "length", USAGE, "fake"),
            Reply("", (), "content_filter", USAGE, "fake"),
            calls((f"tool_{dice.randrange(99)}", {})),
            calls(("look", "{{{")),
            calls(("subtask_submit", {"wrong": 1})),
            LLMFailure(FailureKind.INCOMPLETE, "broke"),
            LLMFailure(FailureKind.FILTERED, "no"),
            LLMFailure(FailureKind.OVERFLOW, "too long"),
        ]
        return dice.choice(nonsense)

    def _draft(self, ids: int) -> dict[str, Any]:
        dice = self._random
        draft: dict[str, Any] = {"goal": f"g{dice.randrange(99)}", "acceptance": ["ok"]}
        if ids and dice.random() < 0.3:
            draft["depends_on"] = [f"t{dice.randint(1, ids)}"]
        draft["failure_policy"] = dice.choice(["retry", "replan", "replan", "skip", "alternative", "ask"])
        return draft

    def _plan(self) -> tuple[str, Any]:
        return "submit_plan", {"tasks": [self._draft(n) for n in range(self._random.randint(1, 5))]}

    def _refine(self) -> tuple[str, Any]:
        return "refine_plan", {"operations": [self._operation() for _ in range(self._random.randint(1, 3))]}

    def _operation(self) -> dict[str, Any]:
        dice = self._random
        target = f"t{dice.randint(1, 5)}" + (f".{dice.randint(1, 3)}" if dice.random() < 0.3 else "")
        match dice.randrange(6):
            case 0:
                return {"op": "exit"}
            case 1:
                return {"op": "split", "task_id": target, "tasks": [self._draft(0), self._draft(0)]}
            case 2:
                return {"op": "add", "tasks": [self._draft(3)]}
            case 3:
                return {"op": "delete", "task_id": target}
            case _:
                return {"op": "modify", "task_id": target, "changes": {"goal": f"again {dice.randrange(99)}"}}

    def _act(self) -> Answer:
        dice = self._random
        if dice.random() < 0.2:
            return calls(
                (
                    "subtask_submit",
                    {"result": "r", "success": dice.random() < 0.5, "plan_change": dice.choice(["", "x"])},
                )
            )
        names = [dice.choice(["look", "write", "nothing"]) for _ in range(dice.randint(1, 5))]
        return calls(*[(n, json.dumps({"x": dice.randrange(4)})) for n in names])


def check(world: World) -> tuple[int, int]:
    state = fold(world.events)
    used = state.cost
    assert state.state in {"done", "failed", "stopped"}
    assert len(world.requests) <= used.llm_calls == len(world.kinds(EventKind.LLM_REQUESTED))
    assert used.llm_calls <= state.bound.llm_calls
    assert used.tool_calls <= state.bound.tool_calls
    assert len(world.server.effects) <= state.bound.tool_calls
    assert len(state.plan) <= SMALL["max_tasks"]
    return used.llm_calls, state.bound.llm_calls


def misbehaving(seed: int) -> FakeServer:
    dice = Random(seed)

    def behave(tool: str, args: dict[str, Any]) -> Outcome | str:
        kind = dice.choice([*OutcomeKind, OutcomeKind.DONE, OutcomeKind.DONE])
        if kind is OutcomeKind.UNAVAILABLE:
            return "fine"
        return Outcome(kind, tool, "", "code", dice.choice(["same", f"new {dice.random()}"]), "yes")

    return FakeServer(behave=behave)


async def test_an_adversarial_model_never_exceeds_the_bound() -> None:
    most = 0.0
    for seed in range(300):
        world = World(Adversary(seed), options=settings(loop=SMALL), server=misbehaving(seed))
        await world.run()
        used, bound = check(world)
        most = max(most, used / bound)
    assert most > 0.1  # the dice do reach far


async def test_nor_when_it_is_killed_and_resumed_all_the_time() -> None:
    for seed in range(60):
        world = World(Adversary(seed), options=settings(loop=SMALL), server=misbehaving(seed))
        dice = Random(seed)
        for _ in range(40):
            try:
                await world.process(die_at=dice.randint(2, 60), before=dice.random() < 0.5).execute()
                break
            except Killed:
                continue
        else:
            await world.run()
        check(world)


class Worst:
    """Wastes every allowance there is, then does the one thing that keeps the run going; fails every attempt at its end."""

    def __init__(self) -> None:
        self._fresh = count()
        self._turns: dict[str, Iterator[Answer]] = {}

    def __call__(self, request: Request) -> Answer:
        if request.role != "actor":
            return self._structured(request)
        place = f"{task_of(request)}/{attempt_of(request)}"
        return next(self._turns.setdefault(place, self._wasteful()))

    def _wasteful(self) -> Iterator[Answer]:
        broken, overflow = LLMFailure(FailureKind.INCOMPLETE, "broke"), LLMFailure(FailureKind.OVERFLOW, "long")
        for useless in (text("hm"), text(""), Reply("cu", (), "length", USAGE, "fake"), broken):
            yield from (useless, useless, self._calls())
        yield overflow
        yield submit()

    def _calls(self) -> Reply:
        return calls(*[("look", {"x": next(self._fresh)}) for _ in range(3)])

    def _structured(self, request: Request) -> Answer:
        corrected = any(m.role == "assistant" for m in request.messages)
        if not corrected or request.role == "summariser":
            return text("no") if request.role != "summariser" else text("")
        if request.role == "plan_generator":
            return plan(*[{"goal": f"g{n}"} for n in range(4)])
        if request.role == "critic":
            return verdict(passed=False, criticism="no")
        if request.role == "reflector":
            return reflection()
        other = next((n for n in ("t4", "t3", "t2") if f"- {n} [pending]" in prompt(request)), None)
        if "step 1:" in prompt(request) or other is None:
            return refine({"op": "modify", "task_id": task_of(request), "changes": {"goal": "again"}})
        return refine({"op": "modify", "task_id": other, "changes": {"priority": 0}})


async def test_the_worst_model_there_is_comes_close_to_the_bound_and_not_over_it() -> None:
    loop = {
        "max_steps": 5,
        "max_refinements": 2,
        "max_revisions": 2,
        "max_tasks": 4,
        "max_corrections": 1,
        "max_calls_per_step": 3,
    }
    world = World(Worst(), options=settings(loop=loop))
    await world.run()
    state = fold(world.events)
    assert [n.attempt for n in state.plan] == [3, 3, 3, 3]
    assert 0.8 * state.bound.llm_calls < state.cost.llm_calls <= state.bound.llm_calls
    assert state.cost.tool_calls == state.bound.tool_calls


def test_the_bound_grows_with_each_limit() -> None:
    base = worst_case(LoopSettings(**SMALL))
    for name in ("max_steps", "max_refinements", "max_revisions", "max_tasks", "max_corrections"):
        assert worst_case(LoopSettings(**{**SMALL, name: SMALL[name] + 1})).llm_calls > base.llm_calls
    assert worst_case(LoopSettings(**{**SMALL, "max_calls_per_step": 4})).tool_calls > base.tool_calls


def test_the_default_bound_is_what_the_documentation_says() -> None:
    bound = worst_case(LoopSettings())
    assert (bound.llm_calls, bound.tool_calls) == (3146, 8960)
