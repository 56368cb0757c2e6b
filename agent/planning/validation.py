"""Is this plan sound? All that is wrong is found at once and said in words a model can act on."""

from __future__ import annotations

from collections.abc import Iterator

from agent.planning.plan import Plan, PlanLimits, PlanRefused
from agent.planning.task import TaskNode, TaskState

_LEFT = frozenset({TaskState.CANCELLED})
# what these depended on is history: a later edit may take it away
_OVER = frozenset({TaskState.SUCCESS, TaskState.SKIPPED, TaskState.BLOCKED})


def check(plan: Plan, limits: PlanLimits) -> Plan:
    """The plan itself when it is sound. Raises PlanRefused with every problem."""
    problems = [*_sizes(plan, limits), *_references(plan)]
    if not problems:  # a cycle is told only among ids that exist
        problems = [*_cycles(plan), *_handed_over(plan)]
    if problems:
        raise PlanRefused(problems)
    return plan


def check_first(plan: Plan, limits: PlanLimits) -> Plan:
    """The same for a plan that was just made, whose number of tasks is limited too."""
    count, low, high = len(plan), limits.min_first_tasks, limits.max_first_tasks
    if not low <= count <= high:
        raise PlanRefused(
            [
                f"A first plan has {low} to {high} tasks, this one has {count}: {'join' if count > high else 'divide'} some."
            ]
        )
    return check(plan, limits)


def _sizes(plan: Plan, limits: PlanLimits) -> Iterator[str]:
    if len(plan) > limits.max_tasks:
        yield f"A run may have {limits.max_tasks} tasks in all, cancelled ones counted; this would make {len(plan)}: use fewer."
    for parent in (None, *plan.nodes):
        width = len(plan.living_children(parent))
        if width > limits.max_width:
            place = "At the top" if parent is None else f"Under {parent}"
            yield f"{place} there may be {limits.max_width} tasks, this would make {width}: join some or put them deeper."
    for node in plan:
        if plan.depth(node.id) > limits.max_depth:
            yield f"{node.id} would lie {plan.depth(node.id)} levels deep, {limits.max_depth} are allowed: add it higher up."
        if not node.goal.strip():
            yield f"{node.id} has no goal: say what is to be achieved."


def _living(plan: Plan) -> Iterator[TaskNode]:
    return (n for n in plan if n.state not in _LEFT)


def _references(plan: Plan) -> Iterator[str]:
    for node in _living(plan):
        if node.state in _OVER:
            continue
        for other in node.depends_on:
            if other == node.id:
                yield f"{node.id} depends on itself: take that out of depends_on."
            elif other not in plan or plan[other].state in _LEFT:
                known = ", ".join(n.id for n in _living(plan) if n.id != node.id)
                yield f"{node.id} depends on {other}, which is no task of the plan (there are: {known})."
        for name, source in node.inputs.items():
            task_id, _, output = source.rpartition(".")
            if not task_id or task_id not in plan or plan[task_id].state in _LEFT:
                yield f'Input {name} of {node.id} comes from "{source}": write it as "task.output", such as "t1.rows".'
            elif output not in plan[task_id].outputs:
                declared = ", ".join(plan[task_id].outputs) or "none"
                yield f"Input {name} of {node.id} takes output {output} of {task_id}, which declares: {declared}."


def waits_for(plan: Plan, task_id: str) -> list[str]:
    """What must be over before the node can be: its dependencies, its ancestors' dependencies and its children."""
    node = plan[task_id]
    inherited = [d for ancestor in plan.ancestors(task_id) for d in ancestor.depends_on]
    return [*node.depends_on, *inherited, *(c.id for c in plan.living_children(task_id))]


def _cycles(plan: Plan) -> Iterator[str]:
    done: set[str] = set()
    for start in [n.id for n in _living(plan)]:  # one that left the plan may name tasks that never were
        path: list[str] = []
        trail: list[Iterator[str]] = [iter([start])]
        while trail:
            following = next(trail[-1], None)
            if following is None:
                trail.pop()
                if path:
                    done.add(path.pop())
            elif following in path:
                circle = [*path[path.index(following) :], following]
                yield f"Tasks wait for each other in a circle: {' waits for '.join(circle)}. Take one dependency out."
                return
            elif following not in done:
                path.append(following)
                trail.append(iter(waits_for(plan, following)))


def _handed_over(plan: Plan) -> Iterator[str]:
    """A task that was split hands over what its children do."""
    for node in _living(plan):
        children = plan.living_children(node.id)
        made = {name for child in children for name in child.outputs}
        missing = [name for name in node.outputs if name not in made]
        if children and missing and node.state not in _OVER:
            yield f"{node.id} declares {', '.join(missing)} as output, but none of its tasks {', '.join(c.id for c in children)} does."
