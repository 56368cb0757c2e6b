"""Edits and their refusals, in the words that the model reads."""

from __future__ import annotations

from typing import Any

import pytest

from agent.planning.dependencies import blocked, ready
from agent.planning.draft import TaskDraft
from agent.planning.edits import edit
from agent.planning.plan import Plan, PlanLimits, PlanRefused
from agent.planning.task import TaskState
from agent.planning.validation import check, check_first

LIMITS = PlanLimits()


def made(*tasks: dict[str, Any]) -> Plan:
    return Plan().add([TaskDraft.of({"acceptance": [], "goal": "g", **t}) for t in tasks], None)


def draft(**more: Any) -> dict[str, Any]:
    return {"goal": "new", "acceptance": [], **more}


CHAIN = made({}, {"depends_on": ["t1"]}, {"depends_on": ["t2"]})


def ended(plan: Plan, task_id: str, state: TaskState, attempt: int = 1) -> Plan:
    return plan.move(task_id, TaskState.EXECUTING, "").move(task_id, state, "boom").update(task_id, attempt=attempt)


@pytest.mark.parametrize(
    ("operations", "told"),
    [
        ([{"op": "modify", "task_id": "t9", "changes": {"goal": "x"}}], "task_id must name a task of the plan: t1, t2, t3."),
        ([{"op": "modify", "task_id": "t1"}], "changes is missing"),
        ([{"op": "add", "tasks": []}], "tasks is missing"),
        ([{"op": "add", "parent_id": "t1", "tasks": [draft()]}], "use split on it"),
        ([{"op": "add", "parent_id": "t8", "tasks": [draft()]}], "t8 is no task of the plan"),
        ([{"op": "split", "task_id": "t1", "tasks": [draft()]}], "a split into one is a modify"),
        ([{"op": "delete", "task_id": "t1"}], "t2 depends on t1, which is no task of the plan"),
        ([{"op": "modify", "task_id": "t1", "changes": {"depends_on": ["t3"]}}], "in a circle: t1 waits for t3 waits for t2 waits for t1"),
        ([{"op": "modify", "task_id": "t1", "changes": {"depends_on": ["t1"]}}], "t1 depends on itself"),
        ([{"op": "modify", "task_id": "t2", "changes": {"inputs": {"n": "t1.n"}}}], "takes output n of t1, which declares: none"),
        ([{"op": "modify", "task_id": "t2", "changes": {"inputs": {"n": "rows"}}}], 'write it as "task.output"'),
        ([{"op": "modify", "task_id": "t2", "changes": {"goal": " "}}], "t2 has no goal"),
        ([{"op": "add", "tasks": [draft()] * 3}], "At the top there may be 5 tasks, this would make 6"),
        ([{"op": "split", "task_id": "t1", "tasks": [draft(depends_on=["t1"]), draft()]}], "in a circle"),
        ([{"op": "turn", "task_id": "t1"}], "there is no operation turn"),
    ],
)  # fmt: skip
def test_an_edit_that_does_not_hold_is_refused_with_its_reason(operations: list[dict[str, Any]], told: str) -> None:
    with pytest.raises(PlanRefused) as refused:
        edit(CHAIN, operations, LIMITS)
    assert told in str(refused.value)


def test_all_operations_hold_together_or_none() -> None:
    with pytest.raises(PlanRefused) as refused:
        edit(
            CHAIN,
            [{"op": "delete", "task_id": "t3"}, {"op": "modify", "task_id": "t9", "changes": {"goal": "x"}}],
            LIMITS,
        )
    assert "Operation 2 (modify)" in str(refused.value)
    assert "Nothing was changed." in str(refused.value)
    assert CHAIN["t3"].state is TaskState.PENDING


def test_a_task_is_deleted_together_with_what_needed_it_changed() -> None:
    after = edit(
        CHAIN,
        [{"op": "delete", "task_id": "t2"}, {"op": "modify", "task_id": "t3", "changes": {"depends_on": ["t1"]}}],
        LIMITS,
    )
    assert after["t2"].state is TaskState.CANCELLED
    assert after.next_id(None) == "t4"


@pytest.mark.parametrize("state", [TaskState.SUCCESS, TaskState.FAILED])
def test_only_the_task_that_just_ended_may_be_changed_and_becomes_revised(state: TaskState) -> None:
    plan = ended(CHAIN, "t1", state)
    change = [{"op": "modify", "task_id": "t1", "changes": {"goal": "otherwise"}}]
    with pytest.raises(PlanRefused, match="can be edited"):
        edit(plan, change, LIMITS)
    after = edit(plan, change, LIMITS, after_task="t1")
    assert (after["t1"].state, after["t1"].goal) == (TaskState.REVISED, "otherwise")


def test_a_task_without_revisions_left_can_be_split_but_not_modified() -> None:
    plan = ended(CHAIN, "t1", TaskState.FAILED, attempt=4)
    with pytest.raises(PlanRefused, match="has used its 3 revisions"):
        edit(plan, [{"op": "modify", "task_id": "t1", "changes": {"goal": "x"}}], LIMITS, after_task="t1")
    after = edit(
        plan,
        [{"op": "split", "task_id": "t1", "tasks": [draft(), draft(depends_on=["t1.1"])]}],
        LIMITS,
        after_task="t1",
    )
    assert [n.id for n in after.walk()] == ["t1", "t1.1", "t1.2", "t2", "t3"]


def test_a_split_task_must_still_hand_over_its_outputs() -> None:
    plan = made({"outputs": {"n": "count"}}, {"inputs": {"n": "t1.n"}})
    with pytest.raises(PlanRefused, match=r"t1 declares n as output, but none of its tasks t1\.1, t1\.2 does"):
        edit(plan, [{"op": "split", "task_id": "t1", "tasks": [draft(), draft()]}], LIMITS)


def test_the_last_task_below_one_that_has_begun_stays() -> None:
    plan = edit(made({}, {}), [{"op": "split", "task_id": "t1", "tasks": [draft(), draft()]}], LIMITS)
    plan = ended(plan.move("t1", TaskState.EXECUTING, ""), "t1.1", TaskState.FAILED)
    both = [{"op": "delete", "task_id": "t1.1"}, {"op": "delete", "task_id": "t1.2"}]
    with pytest.raises(PlanRefused, match="last task below t1"):
        edit(plan, both, LIMITS, after_task="t1.1")


def test_a_whole_goes_only_when_nothing_below_it_at_any_depth_has_begun_or_is_blocked() -> None:
    plan = edit(made({}, {}), [{"op": "split", "task_id": "t2", "tasks": [draft(), draft()]}], LIMITS)
    plan = edit(plan, [{"op": "split", "task_id": "t2.1", "tasks": [draft(depends_on=["t1"]), draft()]}], LIMITS)
    plan = plan.move("t2.1.1", TaskState.BLOCKED, "t1 failed")
    with pytest.raises(PlanRefused) as refused:
        edit(plan, [{"op": "delete", "task_id": "t2"}], LIMITS)
    assert "t2.1.1 below it can't be deleted any more" in str(refused.value)


def test_the_tree_is_three_levels_deep_at_most() -> None:
    plan = made({}, {})
    for task_id in ("t1", "t1.1"):
        plan = edit(plan, [{"op": "split", "task_id": task_id, "tasks": [draft(), draft()]}], LIMITS)
    with pytest.raises(PlanRefused, match=r"t1.1.1.1 would lie 4 levels deep"):
        edit(plan, [{"op": "split", "task_id": "t1.1.1", "tasks": [draft(), draft()]}], LIMITS)


@pytest.mark.parametrize("count", [1, 5])
def test_a_first_plan_has_two_to_four_tasks(count: int) -> None:
    with pytest.raises(PlanRefused, match="2 to 4 tasks"):
        check_first(made(*[{}] * count), LIMITS)


def test_an_input_makes_its_source_a_dependency() -> None:
    plan = check(made({"outputs": {"n": "x"}}, {"inputs": {"m": "t1.n"}}), LIMITS)
    assert plan["t2"].depends_on == ("t1",)


def test_urgent_tasks_run_first_and_parts_wait_for_what_the_whole_needs() -> None:
    plan = made({}, {"priority": 5}, {"depends_on": ["t1"]})
    plan = edit(plan, [{"op": "split", "task_id": "t3", "tasks": [draft(), draft()]}], LIMITS)
    assert [n.id for n in ready(plan)] == ["t2", "t1"]
    plan = ended(plan, "t1", TaskState.SUCCESS)
    assert [n.id for n in ready(plan)] == ["t2", "t3.1", "t3.2"]


def test_an_input_from_a_skipped_task_blocks_who_takes_it() -> None:
    plan = made({"outputs": {"n": "x"}}, {"inputs": {"m": "t1.n"}}, {"depends_on": ["t1"]})
    plan = ended(plan, "t1", TaskState.FAILED).move("t1", TaskState.SKIPPED, "not needed")
    assert [n.id for n in ready(plan)] == ["t3"]
    lost = blocked(plan)
    assert lost is not None
    assert (lost.task_id, lost.reason) == ("t2", "nobody made its input m from t1.n")


def test_a_task_that_is_deleted_takes_its_wrong_references_with_it() -> None:
    changes = {"goal": "a", "inputs": {"n": "t99.n"}}
    after = edit(
        CHAIN, [{"op": "modify", "task_id": "t3", "changes": changes}, {"op": "delete", "task_id": "t3"}], LIMITS
    )
    assert after["t3"].state is TaskState.CANCELLED
