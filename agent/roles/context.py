"""Parts of prompts: the plan, a task, results, lessons, tools and files as bounded text.

`Room` is how many characters each part may take. A smaller room is the same prompt with less in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from agent.llm.model import ToolSpec
from agent.planning.plan import Plan
from agent.planning.task import TaskNode, TaskState
from agent.roles.fence import fence
from agent.trajectory.attempt import Attempt
from agent.trajectory.printable import clip, printable
from agent.trajectory.step import Step, Submission
from agent.trajectory.working_memory import earlier_attempts

MAX_SQUEEZE = 3


@dataclass(frozen=True)
class Room:
    """Characters of a goal, one result, one observation and one line of a list."""

    goal: int = 20_000
    result: int = 4_000
    observation: int = 1_500
    line: int = 400

    @classmethod
    def squeezed(cls, level: int) -> Room:
        """Level 0 is everything; each level has a quarter of the one before."""
        factor = 4**level
        full = cls()
        return cls(full.goal // factor, full.result // factor, full.observation // factor, max(60, full.line // factor))


def plan_outline(plan: Plan, room: Room) -> str:
    """The tree, one line a task with its state and, when it has ended, what came of it."""
    lines = []
    for node in plan.walk():
        indent = "  " * (plan.depth(node.id) - 1)
        needs = f" (after {', '.join(node.depends_on)})" if node.depends_on else ""
        lines.append(f"{indent}- {node.id} [{node.state}] {_line(node.goal, room.line)}{needs}")
        if node.outputs:
            lines.append(f"{indent}  outputs: {', '.join(node.outputs)}")
        if node.state not in {TaskState.PENDING, TaskState.EXECUTING} and (
            node.reflection or node.result or node.reason
        ):
            lines.append(f"{indent}  came of it: {_line(node.reflection or node.result or node.reason, room.line)}")
    return "\n".join(lines) or "(no tasks yet)"


def task_text(node: TaskNode) -> str:
    parts = [f"Task {node.id}: {node.goal}", "Acceptance criteria:"]
    parts += [f"- {criterion}" for criterion in node.acceptance] or ["- the task's goal is reached"]
    if node.outputs:
        parts.append("Outputs to hand over:")
        parts += [f"- {name}: {what}" for name, what in node.outputs.items()]
    if node.artifacts:
        parts.append(f"Files that must exist in the end: {', '.join(node.artifacts)}")
    return "\n".join(parts)


def inputs_text(plan: Plan, node: TaskNode, room: Room) -> str:
    """Values of the named inputs, and the results of the tasks that this one comes after."""
    parts = []
    for name, source in node.inputs.items():
        task_id, _, output = source.rpartition(".")
        value = plan[task_id].output_values.get(output)
        parts.append(fence(f"input {name} from {source}", as_text(value), room.result))
    chain = [node, *plan.ancestors(node.id)]
    for task_id in dict.fromkeys(d for n in chain for d in n.depends_on):
        other = plan[task_id]
        if other.result:
            parts.append(fence(f"result of {other.id}: {clip(other.goal, 80)}", other.result, room.result))
        else:
            parts.append(f"{other.id} is {other.state}: {other.reason or 'it left no result'}")
    return "\n".join(parts) or "(none)"


def attempts_text(attempts: Iterable[Attempt], task_id: str, room: Room) -> str:
    """What earlier attempts at this task did and why they were not good enough."""
    lines = []
    for attempt in earlier_attempts(attempts, task_id):
        submission, judgement, reflection = attempt.submission, attempt.judgement, attempt.reflection
        told = reflection.summary if reflection else (submission.result if submission else "")
        lines.append(f"- attempt {attempt.n}: {_line(told, room.line)}")
        if judgement is not None and judgement.criticism:
            lines.append(f"  judged: {clip(judgement.criticism, room.result)}")
    return "\n".join(lines) or "(this is the first)"


def bullets(lines: Sequence[str], room: Room) -> str:
    return "\n".join(f"- {_line(line, room.line)}" for line in lines) or "(none yet)"


def tools_text(tools: Sequence[ToolSpec], room: Room) -> str:
    """Names, the first paragraph of each description, and the parameters."""
    lines = []
    for tool in tools:
        about = clip(tool.description.strip().split("\n\n")[0].replace("\n", " "), room.line)
        lines.append(f"- {tool.name}({', '.join(tool.parameters.get('properties') or {})}): {about}")
    return "\n".join(lines) or "(none)"


def files_text(files: Sequence[dict[str, Any]]) -> str:
    lines = [f"- {f.get('path')} ({f.get('bytes', '?')} bytes)" for f in files[:100]]
    if len(files) > 100:
        lines.append(f"- and {len(files) - 100} more")
    return "\n".join(lines) or "(none)"


def submission_text(submission: Submission | None, room: Room) -> str:
    if submission is None:
        return "(nothing was handed in)"
    parts = [f"It says: {'success' if submission.success else 'no success'}."]
    if submission.reason:
        parts.append(f"Its reason: {clip(submission.reason, room.result)}")
    parts.append(fence("submitted result", submission.result, room.result))
    if submission.outputs:
        parts.append(fence("submitted outputs", as_text(submission.outputs), room.result))
    return "\n".join(parts)


def steps_text(steps: Sequence[Step], room: Room, *, last: int) -> str:
    """The last steps with what was called and what was seen; the ones before only counted."""
    lines = [f"({len(steps) - last} earlier steps are left out)"] if len(steps) > last else []
    for step in steps[-last:]:
        lines.append(f"Step {step.n}: {clip(step.thought, room.line) or step.problem or '(no thought)'}")
        for call in step.calls:
            lines.append(f"called {call.tool} with {clip(call.arguments, room.observation)}")
            if call.outcome is not None:
                lines.append(fence(f"{call.tool}, {call.outcome.get('kind')}", call.observation, room.observation))
    return "\n".join(lines) or "(no steps)"


def _line(text: str, limit: int) -> str:
    """`text` as one line: what it holds can't pass for another line of a list."""
    return clip(" ".join(printable(text).split()), limit).replace("\n", " ")


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str, indent=1)
