"""Which tasks can run now, which never will, and what a task gets from the ones before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agent.planning.plan import Plan
from agent.planning.task import TaskNode, TaskState

# a dependency in one of these never brings a result; a FAILED one may still be revised
LOST = frozenset({TaskState.BLOCKED, TaskState.CANCELLED})
_BECAUSE = "needs a task that did not succeed: "
OVER = frozenset({TaskState.SUCCESS, TaskState.SKIPPED})


def _needed(plan: Plan, task_id: str) -> list[str]:
    """Its own dependencies and those of the tasks it is part of."""
    chain = [plan[task_id], *plan.ancestors(task_id)]
    return list(dict.fromkeys(d for node in chain for d in node.depends_on))


def ready(plan: Plan) -> list[TaskNode]:
    """Leaves that are PENDING with all dependencies over, the most urgent first, else in the order of the plan."""
    order = {node.id: place for place, node in enumerate(plan.walk())}
    found = [
        node
        for node in plan
        if node.state is TaskState.PENDING
        and plan.is_leaf(node.id)
        and all(plan[d].state in OVER for d in _needed(plan, node.id))
        and not _missing_inputs(plan, node)
    ]
    return sorted(found, key=lambda node: (-node.priority, order[node.id]))


def _missing_inputs(plan: Plan, node: TaskNode) -> list[str]:
    """Inputs whose source task was skipped and so never made them."""
    missing = []
    for name, source in node.inputs.items():
        task_id, _, output = source.rpartition(".")
        if plan[task_id].state in OVER and output not in plan[task_id].output_values:
            missing.append(f"{name} from {source}")
    return missing


@dataclass(frozen=True)
class Blocked:
    task_id: str
    reason: str


def blocked(plan: Plan) -> Blocked | None:
    """One PENDING task that can never run, with the reason.

    Called until it finds none, it reaches the dependants of dependants; tasks that need nothing of the failed one go on.
    """
    for node in plan.walk():
        if node.state is not TaskState.PENDING:
            continue
        needed = _needed(plan, node.id)
        lost = next((n for n in needed if plan[n].state in LOST), None)
        if lost is not None:
            return Blocked(node.id, _why_lost(plan[lost]))
        if plan.is_leaf(node.id) and all(plan[d].state in OVER for d in needed):
            missing = _missing_inputs(plan, node)
            if missing:
                return Blocked(node.id, f"nobody made its input {', '.join(missing)}")
    return None


def _why_lost(node: TaskNode) -> str:
    if node.state is TaskState.CANCELLED:
        return f"{node.id} was cancelled"
    if node.attempt == 0 and node.reason.startswith(_BECAUSE):
        return node.reason  # the failure at the start of the chain
    return f"{_BECAUSE}{node.id} failed: {node.reason or node.criticism or 'no reason was given'}"


@dataclass(frozen=True)
class RollUp:
    """What a split task hands over when all tasks below it are over."""

    success: bool
    result: str
    outputs: dict[str, Any]
    reason: str


def roll_up(plan: Plan, task_id: str) -> RollUp | None:
    """None while a task below still runs or may run."""
    children = plan.living_children(task_id)
    if not all(c.state in OVER | LOST for c in children):
        return None
    outputs: dict[str, Any] = {}
    for child in children:
        outputs.update({name: value for name, value in child.output_values.items() if name in plan[task_id].outputs})
    result = "\n".join(f"{c.id} ({c.state}): {c.result or c.reason}" for c in children)
    bad = [c.id for c in children if c.state not in OVER]
    missing = [name for name in plan[task_id].outputs if name not in outputs]
    if bad:
        return RollUp(False, result, outputs, f"{', '.join(bad)} below it did not succeed")
    if missing:
        return RollUp(False, result, outputs, f"no task below it made {', '.join(missing)}")
    return RollUp(True, result, outputs, "all tasks below it are done")
