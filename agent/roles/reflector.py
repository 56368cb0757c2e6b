"""Once an attempt: what was done, and what later tasks should know. Later prompts of planner and actor read it."""

from __future__ import annotations

from typing import Any

from agent.llm.model import Message
from agent.planning.task import TaskNode
from agent.roles.context import Room, plan_outline, steps_text, submission_text, task_text
from agent.roles.desk import Desk
from agent.roles.fence import RULE
from agent.roles.prompt_file import render
from agent.roles.schemas import SUBMIT_REFLECTION
from agent.store.fold import RunState
from agent.trajectory.attempt import Attempt
from agent.trajectory.keys import role_key
from agent.trajectory.printable import clip
from agent.trajectory.step import Reflection

ROLE = "reflector"
_STEPS_SHOWN = 10


async def reflect(desk: Desk, state: RunState, node: TaskNode, attempt: Attempt) -> Reflection:
    """Raises NoValidAnswer, and what the desk raises to end the run."""

    def build(room: Room) -> tuple[Message, ...]:
        user = render(
            "reflector",
            goal=clip(state.goal, room.goal),
            plan=plan_outline(state.plan, room),
            task=task_text(node),
            submission=submission_text(attempt.submission, room),
            verdict=_verdict(attempt, room.result),
            steps=steps_text(list(attempt.steps.values()), room, last=_STEPS_SHOWN),
        )
        return Message("system", render("reflector_system", rule=RULE)), Message("user", user)

    def accept(answer: dict[str, Any]) -> Reflection:
        return Reflection(answer["summary"], tuple(answer["plan_lessons"]), tuple(answer["tool_lessons"]))

    return await desk.ask_structured(role_key(node.id, attempt.n, "reflector"), ROLE, build, SUBMIT_REFLECTION, accept)


def _verdict(attempt: Attempt, limit: int) -> str:
    if attempt.judgement is None:
        return "It was not judged."
    passed = "It passed." if attempt.judgement.passed else "It did not pass."
    return f"{passed} {clip(attempt.judgement.criticism, limit)}".strip()


def without_model(attempt: Attempt) -> Reflection:
    """What is known when the reflector gives no answer."""
    submission = attempt.submission
    told = (submission.result or submission.reason) if submission is not None else ""
    return Reflection(f"{clip(told, 600) or 'Nothing was handed in.'} {_verdict(attempt, 600)}")
