"""The plan under any sequence of edits and changes of state: its limits hold, ids stay, and refused edits change nothing."""

from __future__ import annotations

from typing import Any

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agent.planning.dependencies import LOST, OVER, blocked, ready, roll_up
from agent.planning.draft import TaskDraft
from agent.planning.edits import apply_operations, edit
from agent.planning.plan import Plan, PlanLimits, PlanRefused
from agent.planning.task import TRANSITIONS, TaskNode, TaskState
from agent.planning.validation import check, check_first, waits_for

LIMITS = PlanLimits(max_tasks=12, max_revisions=2)
NAMES = st.sampled_from(["t1", "t2", "t3", "t4", "t5", "t1.1", "t2.1", "t2.2", "t1.1.1", "t9"])
DRAFTS = st.fixed_dictionaries(
    {"goal": st.sampled_from(["a", "b"]), "acceptance": st.just(["ok"])},
    optional={
        "depends_on": st.lists(NAMES, max_size=2),
        "inputs": st.dictionaries(st.just("n"), NAMES.map(lambda t: f"{t}.n"), max_size=1),
        "outputs": st.dictionaries(st.just("n"), st.just("a count"), max_size=1),
        "priority": st.integers(-1, 1),
    },
)
OPERATIONS = st.one_of(
    st.builds(lambda: {"op": "exit"}),
    st.builds(lambda t, d: {"op": "split", "task_id": t, "tasks": d}, NAMES, st.lists(DRAFTS, min_size=1, max_size=3)),
    st.builds(
        lambda p, d: {"op": "add", "tasks": d} | ({"parent_id": p} if p else {}),
        st.one_of(st.none(), NAMES),
        st.lists(DRAFTS, max_size=2),
    ),
    st.builds(lambda t: {"op": "delete", "task_id": t}, NAMES),
    st.builds(
        lambda t, d: {"op": "modify", "task_id": t, "changes": {k: v for k, v in d.items() if k != "acceptance"}},
        NAMES,
        DRAFTS,
    ),
)


class PlanMachine(RuleBasedStateMachine):
    plan: Plan

    @initialize(
        drafts=st.lists(
            st.builds(lambda g: {"goal": g, "acceptance": ["ok"]}, st.sampled_from("abc")), min_size=2, max_size=4
        )
    )
    def begin(self, drafts: list[dict[str, Any]]) -> None:
        self.plan = check_first(Plan().add([TaskDraft.of(d) for d in drafts], None), LIMITS)
        self.ended: str | None = None
        self.seen: dict[str, str | None] = {}

    @rule(operations=st.lists(OPERATIONS, min_size=1, max_size=3))
    def refine(self, operations: list[dict[str, Any]]) -> None:
        before = self.plan
        frozen = {n.id: n for n in before if n.state is not TaskState.PENDING and n.id != self.ended}
        try:
            after = edit(before, operations, LIMITS, after_task=self.ended)
        except PlanRefused:
            assert self.plan is before
            return
        assert after == apply_operations(before, operations)
        for task_id, node in frozen.items():
            assert after[task_id] == node, "a task that is not to come was changed"
        self.plan = after

    @precondition(lambda self: bool(ready(self.plan)))
    @rule(success=st.booleans())
    def run_one(self, success: bool) -> None:
        node = ready(self.plan)[0]
        assert all(self.plan[d].state in OVER for d in node.depends_on)
        self.plan = self.plan.move(node.id, TaskState.EXECUTING, "").update(node.id, attempt=node.attempt + 1)
        after = TaskState.SUCCESS if success else TaskState.FAILED
        self.plan = self.plan.move(node.id, after, "boom").update(node.id, output_values=dict.fromkeys(node.outputs, 1))
        self.ended = node.id

    @rule()
    def settle(self) -> None:
        """What the loop does between two tasks."""
        for node in list(self.plan):
            if node.state is TaskState.REVISED:
                self.plan = self.plan.move(node.id, TaskState.PENDING, "")
            elif node.state is TaskState.FAILED:
                self.plan = self.plan.move(node.id, TaskState.BLOCKED, node.reason)
        while (lost := blocked(self.plan)) is not None:
            self.plan = self.plan.move(lost.task_id, TaskState.BLOCKED, lost.reason)
        for node in sorted(self.plan, key=lambda n: -self.plan.depth(n.id)):
            if (
                node.state is TaskState.PENDING
                and not self.plan.is_leaf(node.id)
                and (told := roll_up(self.plan, node.id))
            ):
                after = TaskState.SUCCESS if told.success else TaskState.FAILED
                self.plan = self.plan.move(node.id, TaskState.EXECUTING, "").move(node.id, after, told.reason)
                self.plan = self.plan.update(node.id, output_values=told.outputs)
        self.ended = None

    @invariant()
    def limits_hold(self) -> None:
        if hasattr(self, "plan"):
            check(self.plan, LIMITS)

    @invariant()
    def ids_and_parents_never_change(self) -> None:
        if hasattr(self, "plan"):
            for task_id, parent in self.seen.items():
                assert self.plan[task_id].parent == parent
            self.seen = {n.id: n.parent for n in self.plan}

    @invariant()
    def nothing_waits_for_ever(self) -> None:
        """A pending task that is not ready waits for something that can still happen, or is found to be blocked."""
        if not hasattr(self, "plan") or ready(self.plan) or blocked(self.plan):
            return
        for node in self.plan:
            if node.state is TaskState.PENDING:
                waiting = [self.plan[w].state for w in waits_for(self.plan, node.id)]
                assert any(s not in OVER | LOST for s in waiting) or roll_up(self.plan, node.id)

    @invariant()
    def definitions_survive_the_journal(self) -> None:
        if hasattr(self, "plan"):
            for node in self.plan:
                again = TaskNode.from_definition(node.definition())
                assert again.definition() == node.definition()


PlanMachine.TestCase.settings = hypothesis_settings(max_examples=60, stateful_step_count=20, deadline=None)
TestPlan = PlanMachine.TestCase


def test_no_state_leads_to_itself_and_the_ends_lead_nowhere() -> None:
    assert set(TRANSITIONS) == set(TaskState)
    for before, after in TRANSITIONS.items():
        assert before not in after
    for end in (TaskState.BLOCKED, TaskState.SKIPPED, TaskState.CANCELLED):
        assert not TRANSITIONS[end]
