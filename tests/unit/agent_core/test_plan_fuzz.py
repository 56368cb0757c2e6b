"""Whatever a refiner asks for, on whatever plan: it is taken and the plan is sound, or it is refused in words. Nothing else."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from agent.planning.dependencies import blocked, ready, roll_up
from agent.planning.draft import TaskDraft
from agent.planning.edits import apply_operations, edit
from agent.planning.plan import Plan, PlanLimits, PlanRefused
from agent.planning.task import TRANSITIONS, TaskState
from agent.planning.validation import check
from agent.roles.schemas import REFINE_PLAN

LIMITS = PlanLimits()
IDS = st.sampled_from(
    ["t1", "t2", "t3", "t4", "t1.1", "t1.2", "t2.1", "t2.2", "t2.1.1", "t2.1.2", "t9", "", "t1.1.1.1"]
)
OUTPUTS = st.dictionaries(st.sampled_from(["a", "b"]), st.just("x"), max_size=2)
INPUTS = st.dictionaries(
    st.sampled_from(["in"]), st.sampled_from(["t1.a", "t2.b", "t2.1.a", "a", ".a", "t1."]), max_size=1
)
DRAFT = st.fixed_dictionaries(
    {"goal": st.sampled_from(["go", " "]), "acceptance": st.just([])},
    optional={
        "depends_on": st.lists(IDS, max_size=2),
        "inputs": INPUTS,
        "outputs": OUTPUTS,
        "priority": st.integers(-2, 2),
    },
)
CHANGES = st.fixed_dictionaries(
    {}, optional={"goal": st.just("new"), "depends_on": st.lists(IDS, max_size=2), "inputs": INPUTS, "outputs": OUTPUTS, "failure_policy": st.just("skip")}
)  # fmt: skip
OPERATION = st.fixed_dictionaries(
    {"op": st.sampled_from(["split", "add", "modify", "delete", "exit"])},
    optional={"task_id": IDS, "parent_id": IDS, "tasks": st.lists(DRAFT, max_size=3), "changes": CHANGES},
)
MOVE = st.tuples(IDS, st.sampled_from(list(TaskState)))


def moved(plan: Plan, task_id: str, state: TaskState) -> Plan:
    """As far as the transition table allows."""
    if task_id in plan and state in TRANSITIONS[plan[task_id].state]:
        return plan.move(task_id, state, "so it went")
    return plan


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(st.lists(OPERATION, min_size=1, max_size=3), st.lists(MOVE, max_size=3), IDS), max_size=5))
def test_an_edit_is_taken_or_refused(
    rounds: list[tuple[list[dict[str, Any]], list[tuple[str, TaskState]], str]],
) -> None:
    plan = Plan().add([TaskDraft.of({"goal": "g", "acceptance": [], "outputs": {"a": "x"}}) for _ in range(3)], None)
    for operations, moves, after in rounds:
        assert Draft202012Validator(REFINE_PLAN.parameters).is_valid({"operations": operations})
        try:
            edited = edit(plan, operations, LIMITS, after_task=after if after in plan else None)
        except PlanRefused:
            pass
        else:
            assert edited == apply_operations(plan, operations)
            plan = edited
            assert check(plan, LIMITS) is plan
        for task_id, state in moves:
            plan = moved(plan, task_id, state)
        ready(plan)
        blocked(plan)
        for task_id in plan.nodes:
            roll_up(plan, task_id)
