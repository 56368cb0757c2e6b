"""Looks at the plan after a task failed, was criticised or asked for a change, and edits what is still to come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agent.llm.model import Message, ToolSpec
from agent.planning.edits import edit
from agent.planning.plan import PlanLimits
from agent.planning.task import TaskNode, TaskState
from agent.roles.context import Room, attempts_text, bullets, plan_outline, task_text, tools_text
from agent.roles.desk import Desk
from agent.roles.fence import RULE
from agent.roles.prompt_file import render
from agent.roles.schemas import REFINE_PLAN
from agent.store.fold import RunState
from agent.trajectory.attempt import Attempt
from agent.trajectory.keys import role_key
from agent.trajectory.printable import clip
from agent.trajectory.working_memory import plan_lessons, tool_lessons

ROLE = "plan_refiner"


@dataclass(frozen=True)
class Turn:
    """Step `step` of at most `of` after an attempt at a task; `attempt` is 0 for a task that was split."""

    task_id: str
    attempt: int
    step: int
    of: int


async def refine(
    desk: Desk, state: RunState, turn: Turn, tools: Sequence[ToolSpec], limits: PlanLimits
) -> tuple[list[dict[str, Any]], str]:
    """Operations that were checked against the plan, and the refiner's reason. Raises NoValidAnswer."""
    task_id = turn.task_id
    node, attempt = state.plan[task_id], state.attempt(task_id, turn.attempt)

    def build(room: Room) -> tuple[Message, ...]:
        system = render("plan_refiner_system", rule=RULE, width=str(limits.max_width), depth=str(limits.max_depth))
        user = render(
            "plan_refiner",
            goal=clip(state.goal, room.goal),
            plan=plan_outline(state.plan, room),
            task=task_text(node),
            happened=_happened(node, attempt, limits, room),
            attempts=attempts_text(state.attempts.values(), task_id, room),
            plan_lessons=bullets(plan_lessons(state.attempts.values()), room),
            tool_lessons=bullets(tool_lessons(state.attempts.values()), room),
            earlier=_earlier(attempt, room),
            room=str(limits.max_tasks - len(state.plan)),
            next_id=state.plan.next_id(None),
            step=str(turn.step),
            max_steps=str(turn.of),
            tools=tools_text(tools, room),
        )
        return Message("system", system), Message("user", user)

    def accept(answer: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
        operations: list[dict[str, Any]] = answer["operations"]
        edit(state.plan, operations, limits, after_task=task_id)
        return operations, str(answer.get("reason") or "")

    return await desk.ask_structured(
        role_key(task_id, attempt.n, "refiner", turn.step), ROLE, build, REFINE_PLAN, accept
    )


def _happened(node: TaskNode, attempt: Attempt, limits: PlanLimits, room: Room) -> str:
    parts = [f"{node.id} is now {node.state}: {clip(node.reason, room.result)}"]
    if attempt.judgement is not None and attempt.judgement.criticism:
        parts.append(f"Criticism: {clip(attempt.judgement.criticism, room.result)}")
    if attempt.submission is not None and attempt.submission.plan_change:
        parts.append(f"It asks for a change of the plan: {clip(attempt.submission.plan_change, room.result)}")
    if node.state is TaskState.FAILED and attempt.n:
        left = limits.max_revisions - (node.attempt - 1)
        parts.append(
            f"Revisions left for it: {left}." if left > 0 else "It has no revisions left: split or replace it."
        )
    return "\n".join(parts)


def _earlier(attempt: Attempt, room: Room) -> str:
    lines = []
    for turn in attempt.refinements:
        done = ", ".join(str(o.get("op")) + " " + str(o.get("task_id") or "") for o in turn.operations)
        lines.append(f"step {turn.step}: {done.strip() or 'nothing'}; {turn.reason or turn.rejected}")
    return bullets(lines, room)
