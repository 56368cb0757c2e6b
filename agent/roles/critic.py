"""Judges a finished task against its acceptance criteria, after the checks that need no model have passed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent.llm.model import Message
from agent.planning.task import TaskNode
from agent.roles.context import Room, steps_text, submission_text, task_text
from agent.roles.desk import Desk
from agent.roles.fence import RULE
from agent.roles.prompt_file import render
from agent.roles.schemas import SUBMIT_VERDICT
from agent.store.fold import RunState
from agent.trajectory.attempt import Attempt
from agent.trajectory.keys import role_key
from agent.trajectory.printable import clip
from agent.trajectory.step import Judgement

ROLE = "critic"
_STEPS_SHOWN = 8


async def judge(desk: Desk, state: RunState, node: TaskNode, attempt: Attempt, files: Sequence[str]) -> Judgement:
    """`files` are paths that were written so far. Raises NoValidAnswer, and what the desk raises to end the run."""

    def build(room: Room) -> tuple[Message, ...]:
        user = render(
            "critic",
            goal=clip(state.goal, room.goal),
            task=task_text(node),
            submission=submission_text(attempt.submission, room),
            files=", ".join(files[:50]) or "(none)",
            steps=steps_text(list(attempt.steps.values()), room, last=_STEPS_SHOWN),
        )
        return Message("system", render("critic_system", rule=RULE)), Message("user", user)

    def accept(answer: dict[str, Any]) -> Judgement:
        return Judgement(answer["verdict"] == "pass", answer["criticism"].strip())

    return await desk.ask_structured(role_key(node.id, attempt.n, "critic"), ROLE, build, SUBMIT_VERDICT, accept)
