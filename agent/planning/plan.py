"""The task tree: its limits and its questions. A plan is a value; a change gives a new plan or is refused as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from agent.planning.draft import TaskDraft
from agent.planning.task import TaskNode, TaskState, may_change
from agent.settings import LoopSettings


class PlanRefused(Exception):  # noqa: N818 - a plan refused is an answer for the model, not a fault
    """`problems` are sentences for the model: all that is wrong at once, each with what to do."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(" ".join(self.problems))


@dataclass(frozen=True)
class PlanLimits:
    max_depth: int = 3
    max_width: int = 5
    min_first_tasks: int = 2
    max_first_tasks: int = 4
    max_tasks: int = 20
    max_revisions: int = 3

    @classmethod
    def of(cls, loop: LoopSettings) -> PlanLimits:
        return cls(
            loop.max_depth, loop.max_width, loop.min_first_tasks, loop.max_first_tasks, loop.max_tasks, loop.max_revisions
        )  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """Nodes by id, in the order they were made. A node that left the plan stays as CANCELLED, so ids are never used twice."""

    nodes: dict[str, TaskNode] = field(default_factory=dict)

    def __iter__(self) -> Iterator[TaskNode]:
        return iter(self.nodes.values())

    def __len__(self) -> int:
        return len(self.nodes)

    def __contains__(self, task_id: object) -> bool:
        return task_id in self.nodes

    def __getitem__(self, task_id: str) -> TaskNode:
        return self.nodes[task_id]

    def children(self, parent: str | None) -> list[TaskNode]:
        return [n for n in self if n.parent == parent]

    def living_children(self, parent: str | None) -> list[TaskNode]:
        return [n for n in self.children(parent) if n.state is not TaskState.CANCELLED]

    def is_leaf(self, task_id: str) -> bool:
        return not self.living_children(task_id)

    def ancestors(self, task_id: str) -> list[TaskNode]:
        """From the parent upwards."""
        found: list[TaskNode] = []
        parent = self.nodes[task_id].parent
        while parent is not None:
            found.append(self.nodes[parent])
            parent = self.nodes[parent].parent
        return found

    def depth(self, task_id: str) -> int:
        """1 for a task at the top."""
        return 1 + len(self.ancestors(task_id))

    def next_id(self, parent: str | None) -> str:
        number = 1 + len(self.children(parent))
        return f"t{number}" if parent is None else f"{parent}.{number}"

    def walk(self) -> Iterator[TaskNode]:
        """Depth first, children after their parent: the order to show a plan in."""
        waiting = self.children(None)[::-1]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(self.children(node.id)[::-1])

    def put(self, node: TaskNode) -> Plan:
        return Plan({**self.nodes, node.id: node})

    def update(self, task_id: str, **changes: Any) -> Plan:
        return self.put(replace(self.nodes[task_id], **changes))

    def move(self, task_id: str, state: TaskState, reason: str) -> Plan:
        """Raises ValueError when the transition table does not allow it: a fault of ours, never of a model."""
        node = self.nodes[task_id]
        if not may_change(node.state, state):
            raise ValueError(f"{task_id} can't go from {node.state} to {state}")
        return self.put(replace(node, state=state, reason=reason))

    def definitions(self) -> list[dict[str, Any]]:
        return [node.definition() for node in self]

    @classmethod
    def from_definitions(cls, tasks: Iterable[dict[str, Any]]) -> Plan:
        nodes = [TaskNode.from_definition(t) for t in tasks]
        return cls({n.id: n for n in nodes})

    def add(self, drafts: Iterable[TaskDraft], parent: str | None) -> Plan:
        """Nodes of `drafts` under the next free ids. Nothing is checked here; see agent.planning.validation."""
        plan = self
        for draft in drafts:
            plan = plan.put(draft.node(plan.next_id(parent), parent))
        return plan
