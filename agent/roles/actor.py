"""The tool agent: works on one task, one thought and tool call(s) a step, until it submits."""

from __future__ import annotations

from collections.abc import Sequence

from agent.llm.model import Message, Request, ToolSpec
from agent.planning.task import TaskNode
from agent.roles.context import (
    Room,
    attempts_text,
    bullets,
    files_text,
    inputs_text,
    plan_outline,
    task_text,
)
from agent.roles.desk import Desk
from agent.roles.fence import RULE
from agent.roles.prompt_file import render
from agent.roles.schemas import SUBTASK_SUBMIT
from agent.roles.transcript import LEVELS, Transcript
from agent.store.fold import RunState
from agent.trajectory.printable import clip
from agent.trajectory.working_memory import plan_lessons, tool_lessons

ROLE = "actor"
LAST_STEP = (
    "This is the last step of this task. Call subtask_submit now with what you have; say honestly if it is not all."
)


def request(
    desk: Desk,
    state: RunState,
    node: TaskNode,
    tools: Sequence[ToolSpec],
    transcript: Transcript,
    *,
    steps_left: int,
    must_submit: bool,
    level: int,
) -> tuple[Request, int] | None:
    """The request of one step and the level it was clipped to, at least `level`; None when no level fits the context."""
    offered = (SUBTASK_SUBMIT,) if must_submit else (*tools, SUBTASK_SUBMIT)
    for chosen in range(level, LEVELS):
        start = _start(state, node, Room.squeezed(max(0, chosen - 1)), steps_left)
        end = (Message("user", LAST_STEP),) if must_submit else ()
        asked = desk.request(ROLE, (*start, *transcript.messages(chosen), *end), offered, required=must_submit)
        if desk.fits(asked):
            return asked, chosen
    return None


def _start(state: RunState, node: TaskNode, room: Room, steps_left: int) -> tuple[Message, ...]:
    user = render(
        "actor",
        goal=clip(state.goal, room.goal),
        plan=plan_outline(state.plan, room),
        task=task_text(node),
        inputs=inputs_text(state.plan, node, room),
        files=files_text(state.files),
        attempts=attempts_text(state.attempts.values(), node.id, room),
        plan_lessons=bullets(plan_lessons(state.attempts.values()), room),
        tool_lessons=bullets(tool_lessons(state.attempts.values()), room),
        steps_left=str(steps_left),
    )
    return Message("system", render("actor_system", rule=RULE)), Message("user", user)
