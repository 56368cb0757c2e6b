"""The outer loop: look at the folded journal, do what comes next, journal what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from agent.budget import Budget
from agent.events import Event, EventKind
from agent.loops.agenda import (
    Finish,
    Generate,
    HandOver,
    Judge,
    Move,
    Refine,
    Reflect,
    Work,
    next_action,
)
from agent.loops.observation import specs
from agent.loops.react_loop import ReactLoop
from agent.loops.review import review
from agent.planning.plan import PlanLimits
from agent.planning.task import TaskNode
from agent.roles import plan_generator, plan_refiner, reflector, summariser
from agent.roles.desk import Desk, NoValidAnswer
from agent.settings import LoopSettings, Settings
from agent.store.base import Journal
from agent.store.fold import RunState
from agent.tools.outcome import Tools
from agent.trajectory.attempt import Attempt
from agent.trajectory.keys import PLAN, role_key
from agent.trajectory.printable import clip

Emit = Callable[[EventKind, dict[str, Any]], Event]


class PlanLoop:
    """`emit` appends an event and folds it into `state`, so that `state` is always what the journal says."""

    def __init__(
        self,
        *,
        state: RunState,
        emit: Emit,
        journal: Journal,
        desk: Desk,
        budget: Budget,
        tools: Tools,
        settings: Settings,
    ) -> None:
        """`settings.loop` are the limits that the run began with."""
        self._state, self._emit, self._journal, self._desk = state, emit, journal, desk
        self._budget, self._tools, self._settings = budget, tools, settings

    @property
    def _loop(self) -> LoopSettings:
        return self._settings.loop

    async def run(self) -> tuple[Finish, str]:
        """How it ended, and the answer. Raises BudgetExhausted, Unreachable and ModelRefused, which stop the run."""
        while True:
            action = next_action(self._state, self._loop)
            match action:
                case Generate():
                    failed = await self._generate()
                    if failed is not None:
                        return failed, ""
                case Work():
                    await self._work(self._state.plan[action.task_id])
                case Judge():
                    await self._judge(self._state.plan[action.task_id])
                case Reflect():
                    await self._reflect(self._state.plan[action.task_id])
                case Refine():
                    await self._refine(action)
                case HandOver():
                    self._hand_over(action)
                case Move():
                    self._move(action)
                case Finish():
                    return action, await self._answer(action)

    async def _generate(self) -> Finish | None:
        tools = specs(await self._tools.catalog())
        try:
            plan = await plan_generator.generate(
                self._desk, self._state.goal, self._state.files, tools, PlanLimits.of(self._loop)
            )
        except NoValidAnswer as problem:
            return Finish("failed", f"there is no plan: {problem}")
        self._emit(EventKind.PLAN_GENERATED, {"tasks": plan.definitions(), "reason": "first plan", "key": PLAN})
        return None

    async def _work(self, node: TaskNode) -> None:
        loop = ReactLoop(
            desk=self._desk,
            tools=self._tools,
            journal=self._journal,
            budget=self._budget,
            settings=self._settings,
            state=self._state,
            node=node,
        )
        submission = await loop.work()
        self._emit(EventKind.TASK_SUBMITTED, {"task_id": node.id, "attempt": node.attempt, **asdict(submission)})

    def _attempt(self, node: TaskNode) -> Attempt:
        return self._state.attempt(node.id, node.attempt)

    async def _judge(self, node: TaskNode) -> None:
        attempt = self._attempt(node)
        judgement = await review(self._desk, self._state, node, attempt)
        self._emit(
            EventKind.TASK_JUDGED,
            {
                "task_id": node.id,
                "attempt": attempt.n,
                "verdict": "pass" if judgement.passed else "fail",
                "criticism": judgement.criticism,
                "by": judgement.by,
                "key": role_key(node.id, attempt.n, "critic"),
            },
        )

    async def _reflect(self, node: TaskNode) -> None:
        attempt = self._attempt(node)
        try:
            told = await reflector.reflect(self._desk, self._state, node, attempt)
        except NoValidAnswer:
            told = reflector.without_model(attempt)
        place = {"task_id": node.id, "attempt": attempt.n, "key": role_key(node.id, attempt.n, "reflector")}
        self._emit(EventKind.TASK_REFLECTED, {**place, **asdict(told)})

    async def _refine(self, action: Refine) -> None:
        tools = specs(await self._tools.catalog())
        limits, rejected = PlanLimits.of(self._loop), ""
        turn = plan_refiner.Turn(action.task_id, action.attempt, action.step, self._loop.max_refinements)
        operations: list[dict[str, Any]] = []
        reason = ""
        try:
            operations, reason = await plan_refiner.refine(self._desk, self._state, turn, tools, limits)
        except NoValidAnswer as problem:
            rejected = str(problem)
        self._emit(
            EventKind.PLAN_EDITED,
            {
                "operations": operations,
                "reason": reason,
                "rejected": rejected,
                "after_task": action.task_id,
                "attempt": action.attempt,
                "step": action.step,
                "key": role_key(action.task_id, action.attempt, "refiner", action.step),
            },
        )

    def _hand_over(self, action: HandOver) -> None:
        told = action.told
        data = {
            "success": told.success,
            "result": clip(told.result, 20_000),
            "outputs": told.outputs,
            "reason": told.reason,
        }
        self._emit(EventKind.TASK_SUBMITTED, {"task_id": action.task_id, "attempt": 0, "key": "", **data})

    def _move(self, action: Move) -> None:
        before = self._state.plan[action.task_id].state
        self._emit(
            EventKind.TASK_CHANGED,
            {
                "task_id": action.task_id,
                "from": str(before),
                "to": str(action.to),
                "role": action.role,
                "reason": action.reason,
                "attempt": action.attempt,
            },
        )

    async def _answer(self, ending: Finish) -> str:
        if ending.state == "stopped":
            return summariser.partial_answer(self._state.plan, ending.reason)
        try:
            return await summariser.summarise(
                self._desk, self._state, turns=1 + self._loop.max_corrections, complete=ending.state == "done"
            )
        except NoValidAnswer as problem:
            self._emit(EventKind.NOTE, {"text": f"the answer was put together without a model: {problem}"})
            return summariser.partial_answer(self._state.plan, "" if ending.state == "done" else ending.reason)
