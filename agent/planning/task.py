"""A node of the plan: what is to be done, how it is judged, and how far it got. States change by one table alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from agent.budget import Cost


class TaskState(StrEnum):
    PENDING = "pending"
    EXECUTING = "executing"
    SUCCESS = "success"
    FAILED = "failed"
    REVISED = "revised"  # changed after it ended; goes back to PENDING with a new attempt to come
    BLOCKED = "blocked"  # can't run any more: a dependency failed, or all revisions are used
    SKIPPED = "skipped"  # failed, and not needed
    CANCELLED = "cancelled"  # taken out of the plan
    WAITING = "waiting"  # for a person


_S = TaskState
TRANSITIONS: Mapping[TaskState, frozenset[TaskState]] = MappingProxyType(
    {
        _S.PENDING: frozenset({_S.EXECUTING, _S.BLOCKED, _S.SKIPPED, _S.CANCELLED}),
        _S.EXECUTING: frozenset({_S.SUCCESS, _S.FAILED}),
        _S.SUCCESS: frozenset({_S.REVISED}),
        _S.FAILED: frozenset({_S.REVISED, _S.BLOCKED, _S.SKIPPED, _S.CANCELLED, _S.WAITING}),
        _S.REVISED: frozenset({_S.PENDING}),
        _S.WAITING: frozenset({_S.REVISED, _S.CANCELLED}),
        _S.BLOCKED: frozenset(),
        _S.SKIPPED: frozenset(),
        _S.CANCELLED: frozenset(),
    }
)


class FailurePolicy(StrEnum):
    """What happens when a task failed.

    `alternative` is carried out as `replan`. `ask` stops the run until a person resumes it, which tries the task once more.
    """

    RETRY = "retry"
    SKIP = "skip"
    ALTERNATIVE = "alternative"
    REPLAN = "replan"
    ASK = "ask"
    STOP = "stop"


@dataclass(frozen=True)
class TaskNode:
    """`id` never changes. `inputs` name → "t1.output"; `outputs` name → what it is; `artifacts` are files that must exist.

    From `state` on the fields are progress, filled from the journal; `attempt` counts the attempts begun.
    """

    id: str
    goal: str
    acceptance: tuple[str, ...] = ()
    depends_on: tuple[str, ...] = ()
    inputs: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    artifacts: tuple[str, ...] = ()
    failure_policy: FailurePolicy = FailurePolicy.REPLAN
    priority: int = 0  # higher first
    parent: str | None = None
    state: TaskState = TaskState.PENDING
    reason: str = ""  # of the last change of state
    attempt: int = 0
    result: str = ""
    output_values: dict[str, Any] = field(default_factory=dict)
    criticism: str = ""
    reflection: str = ""
    cost: Cost = field(default_factory=Cost)

    def definition(self) -> dict[str, Any]:
        """The node without its progress, as JSON."""
        return {name: value for name, value in asdict(self).items() if name in _DEFINITION}

    @classmethod
    def from_definition(cls, data: Mapping[str, Any]) -> TaskNode:
        """Of a definition that `definition` made; drafts of a model go through agent.planning.draft."""
        return cls(
            id=data["id"],
            goal=data["goal"],
            acceptance=tuple(data["acceptance"]),
            depends_on=tuple(data["depends_on"]),
            inputs=dict(data["inputs"]),
            outputs=dict(data["outputs"]),
            artifacts=tuple(data["artifacts"]),
            failure_policy=FailurePolicy(data["failure_policy"]),
            priority=int(data["priority"]),
            parent=data["parent"],
        )


_DEFINITION = frozenset(
    {
        "id",
        "goal",
        "acceptance",
        "depends_on",
        "inputs",
        "outputs",
        "artifacts",
        "failure_policy",
        "priority",
        "parent",
    }
)


def may_change(before: TaskState, after: TaskState) -> bool:
    return after in TRANSITIONS[before]
