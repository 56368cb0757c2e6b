"""Changes of a plan by typed operations: split, add, modify, delete, exit. All of an edit is taken, or nothing.

Only future tasks can be edited: those that are PENDING, and the one task that has just ended and is looked at again.
Changing that one makes it REVISED; a task that is deleted becomes CANCELLED and keeps its id.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from agent.planning.draft import TaskDraft, with_sources
from agent.planning.plan import Plan, PlanLimits, PlanRefused
from agent.planning.task import FailurePolicy, TaskNode, TaskState
from agent.planning.validation import check

Operation = Mapping[str, Any]  # as in the schema of refine_plan

_ENDED = frozenset({TaskState.FAILED, TaskState.SUCCESS})


def edit(plan: Plan, operations: Iterable[Operation], limits: PlanLimits, *, after_task: str | None = None) -> Plan:
    """The plan after `operations`. `after_task` has just ended and may be changed too. Raises PlanRefused with all problems."""
    problems: list[str] = []
    for position, operation in enumerate(operations, start=1):
        problem = _refusal(plan, operation, limits, after_task)
        if problem is None:
            plan = _apply(plan, operation)
        else:
            problems.append(f"Operation {position} ({operation['op']}): {problem}")
    if problems:
        raise PlanRefused([*problems, "Nothing was changed."])
    return check(plan, limits)


def apply_operations(plan: Plan, operations: Iterable[Operation]) -> Plan:
    """The same without checks, for operations that were checked before they were journalled."""
    for operation in operations:
        plan = _apply(plan, operation)
    return plan


def _refusal(plan: Plan, operation: Operation, limits: PlanLimits, after_task: str | None) -> str | None:
    match operation["op"]:
        case "exit":
            return None
        case "add":
            return _refuse_add(plan, operation)
        case "split":
            return _refuse_target(plan, operation, after_task) or _refuse_split(plan, operation)
        case "modify":
            return _refuse_target(plan, operation, after_task) or _refuse_modify(plan, operation, limits)
        case "delete":
            return _refuse_target(plan, operation, after_task) or _refuse_delete(plan, operation)
        case other:
            return f"there is no operation {other}; use split, add, modify, delete or exit."


def _refuse_target(plan: Plan, operation: Operation, after_task: str | None) -> str | None:
    task_id = str(operation.get("task_id") or "")
    if task_id not in plan:
        return f"task_id must name a task of the plan: {', '.join(plan.nodes) or 'there is none'}."
    state = plan[task_id].state
    if state is TaskState.PENDING or (task_id == after_task and state in _ENDED and plan.is_leaf(task_id)):
        return None
    return f"{task_id} is {state}; only pending tasks{f' and {after_task}' if after_task else ''} can be edited."


def _refuse_add(plan: Plan, operation: Operation) -> str | None:
    parent = operation.get("parent_id")
    if not operation.get("tasks"):
        return "tasks is missing: list the new tasks."
    if parent is None:
        return None
    if parent not in plan:
        return f"parent_id {parent} is no task of the plan; leave it out to add at the top."
    if plan.is_leaf(parent):
        return f"{parent} has no tasks below it: use split on it, or leave parent_id out."
    if plan[parent].state not in {TaskState.PENDING, TaskState.EXECUTING}:
        return f"{parent} is {plan[parent].state}: add the tasks somewhere else."
    return None


def _refuse_split(plan: Plan, operation: Operation) -> str | None:
    task_id = operation["task_id"]
    if len(operation.get("tasks") or ()) < 2:
        return "tasks must list at least two: a split into one is a modify."
    if not plan.is_leaf(task_id):
        return f"{task_id} is split already: add tasks with parent_id {task_id}, or edit the tasks below it."
    return None


def _refuse_modify(plan: Plan, operation: Operation, limits: PlanLimits) -> str | None:
    task_id, changes = operation["task_id"], operation.get("changes")
    if not changes:
        return "changes is missing: name the fields that change."
    if plan[task_id].state in _ENDED and plan[task_id].attempt > limits.max_revisions:
        return f"{task_id} has used its {limits.max_revisions} revisions: split it, or delete it and add another way."
    return None


def _refuse_delete(plan: Plan, operation: Operation) -> str | None:
    task_id = operation["task_id"]
    if plan[task_id].state is TaskState.SUCCESS:
        return f"{task_id} has succeeded: it stays."
    parent = plan[task_id].parent
    if parent is not None and plan[parent].state is TaskState.EXECUTING and len(plan.living_children(parent)) == 1:
        return f"it is the last task below {parent}, which has begun: add another one to {parent} first."
    busy = [c.id for c in _below(plan, task_id) if c.state is not TaskState.PENDING]
    return f"{', '.join(busy)} below it can't be deleted any more." if busy else None


def _below(plan: Plan, task_id: str) -> Iterator[TaskNode]:
    """All living tasks below one, at any depth."""
    for child in plan.living_children(task_id):
        yield child
        yield from _below(plan, child.id)


def _apply(plan: Plan, operation: Operation) -> Plan:
    match operation["op"]:
        case "add":
            return plan.add(_drafts(operation), operation.get("parent_id"))
        case "split":
            return _revise(plan, operation["task_id"]).add(_drafts(operation), operation["task_id"])
        case "modify":
            task_id = operation["task_id"]
            return _revise(plan, task_id).put(_changed(_revise(plan, task_id)[task_id], operation["changes"]))
        case "delete":
            return _cancel(plan, operation["task_id"])
        case _:
            return plan


def _drafts(operation: Operation) -> list[TaskDraft]:
    return [TaskDraft.of(t) for t in operation["tasks"]]


def _revise(plan: Plan, task_id: str) -> Plan:
    if plan[task_id].state in _ENDED:
        return plan.move(task_id, TaskState.REVISED, "changed by the refiner")
    return plan


def _cancel(plan: Plan, task_id: str) -> Plan:
    for child in plan.living_children(task_id):
        plan = _cancel(plan, child.id)
    return plan.move(task_id, TaskState.CANCELLED, "deleted by the refiner")


def _changed(node: TaskNode, changes: Mapping[str, Any]) -> TaskNode:
    values: dict[str, Any] = {}
    for name, value in changes.items():
        if name in {"acceptance", "depends_on", "artifacts"}:
            values[name] = tuple(value)
        elif name == "failure_policy":
            values[name] = FailurePolicy(value)
        elif name in {"inputs", "outputs"}:
            values[name] = dict(value)
        else:
            values[name] = value
    node = replace(node, **values)
    return replace(node, depends_on=with_sources(node.depends_on, node.inputs))
