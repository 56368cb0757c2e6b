"""Goal → first tasks. Sees the goal, the files and the tools that are really there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent.llm.model import Message, ToolSpec
from agent.planning.draft import TaskDraft
from agent.planning.plan import Plan, PlanLimits
from agent.planning.validation import check_first
from agent.roles.context import Room, files_text, tools_text
from agent.roles.desk import Desk
from agent.roles.fence import RULE
from agent.roles.prompt_file import render
from agent.roles.schemas import SUBMIT_PLAN
from agent.trajectory.keys import PLAN
from agent.trajectory.printable import clip

ROLE = "plan_generator"


async def generate(
    desk: Desk, goal: str, files: Sequence[dict[str, Any]], tools: Sequence[ToolSpec], limits: PlanLimits
) -> Plan:
    """Raises NoValidAnswer when no plan within the limits came, and what the desk raises to end the run."""

    def build(room: Room) -> tuple[Message, ...]:
        system = render(
            "plan_generator_system",
            rule=RULE,
            low=str(limits.min_first_tasks),
            high=str(limits.max_first_tasks),
        )
        user = render(
            "plan_generator", goal=clip(goal, room.goal), files=files_text(files), tools=tools_text(tools, room)
        )
        return Message("system", system), Message("user", user)

    def accept(answer: dict[str, Any]) -> Plan:
        return check_first(Plan().add([TaskDraft.of(t) for t in answer["tasks"]], None), limits)

    return await desk.ask_structured(PLAN, ROLE, build, SUBMIT_PLAN, accept)
