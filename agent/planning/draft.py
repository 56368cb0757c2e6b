"""A task as a model writes it, before it has an id. The JSON Schema is what the model is shown and held to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agent.planning.task import FailurePolicy, TaskNode

_TEXTS = {"type": "array", "items": {"type": "string"}}
_NAMED_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}

FIELD_SCHEMAS: dict[str, Any] = {
    "goal": {
        "type": "string",
        "minLength": 1,
        "description": "What is to be achieved, complete enough to work from alone",
    },
    "acceptance": {**_TEXTS, "description": "Checkable criteria: when all hold, the task is done"},
    "depends_on": {**_TEXTS, "description": "Ids of tasks that must have succeeded before, such as t1"},
    "inputs": {**_NAMED_TEXTS, "description": 'Name to source: {"rows": "t1.rows"} takes the output rows of task t1'},
    "outputs": {**_NAMED_TEXTS, "description": "Name to description of each value that the task hands over"},
    "artifacts": {**_TEXTS, "description": "Paths of files that must exist in the workspace when the task is done"},
    "failure_policy": {
        "type": "string",
        "enum": [p.value for p in FailurePolicy],
        "description": "If it fails; usually replan",
    },
    "priority": {"type": "integer", "description": "Higher runs first among ready tasks; usually 0"},
}

DRAFT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": FIELD_SCHEMAS,
    "required": ["goal", "acceptance"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class TaskDraft:
    goal: str
    acceptance: tuple[str, ...] = ()
    depends_on: tuple[str, ...] = ()
    inputs: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    artifacts: tuple[str, ...] = ()
    failure_policy: FailurePolicy = FailurePolicy.REPLAN
    priority: int = 0

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> TaskDraft:
        """`data` is valid against DRAFT_SCHEMA. An input's source is a dependency, whether or not it is named as one."""
        inputs = dict(data.get("inputs") or {})
        return cls(
            goal=data["goal"].strip(),
            acceptance=tuple(data.get("acceptance") or ()),
            depends_on=with_sources(data.get("depends_on") or (), inputs),
            inputs=inputs,
            outputs=dict(data.get("outputs") or {}),
            artifacts=tuple(data.get("artifacts") or ()),
            failure_policy=FailurePolicy(data.get("failure_policy") or FailurePolicy.REPLAN),
            priority=int(data.get("priority") or 0),
        )

    def node(self, task_id: str, parent: str | None) -> TaskNode:
        return TaskNode(
            id=task_id,
            parent=parent,
            goal=self.goal,
            acceptance=self.acceptance,
            depends_on=self.depends_on,
            inputs=self.inputs,
            outputs=self.outputs,
            artifacts=self.artifacts,
            failure_policy=self.failure_policy,
            priority=self.priority,
        )


def with_sources(depends_on: Any, inputs: Mapping[str, str]) -> tuple[str, ...]:
    """`depends_on` and the tasks that `inputs` take from, each once, in order."""
    sources = [source.rpartition(".")[0] for source in inputs.values()]
    return tuple(dict.fromkeys([*depends_on, *(s for s in sources if s)]))
