"""One turn of the ReACT loop, as it is kept: plain values that the report and the prompts read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class CallRecord:
    """One tool call. `outcome` is agent.tools.outcome.Outcome as JSON, None while it runs or when it never ended."""

    key: str
    tool: str
    arguments: str
    call_id: str = ""
    effect: str = "once"
    outcome: dict[str, Any] | None = None
    ms: float = 0.0

    @property
    def observation(self) -> str:
        return "" if self.outcome is None else str(self.outcome.get("observation", ""))

    @property
    def ok(self) -> bool:
        return self.outcome is not None and self.outcome.get("kind") == "done"


@dataclass(frozen=True)
class Step:
    """`n` counts the steps of an attempt from 1; `again` is above 0 when the same step was asked again."""

    key: str
    task_id: str
    attempt: int
    n: int
    again: int
    thought: str
    calls: tuple[CallRecord, ...] = ()
    finish_reason: str = ""
    model: str = ""
    tokens: int = 0
    usd: float = 0.0
    ms: float = 0.0
    at: float = 0.0
    problem: str = ""  # why the model gave no usable reply, from LLM_FAILED


@dataclass(frozen=True)
class Submission:
    """What `subtask_submit` said, or what the loop says when nothing was submitted (`key` is empty then)."""

    success: bool
    result: str
    outputs: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    plan_change: str = ""
    key: str = ""


@dataclass(frozen=True)
class Judgement:
    passed: bool
    criticism: str
    by: str = "critic"  # checks, when code alone judged


@dataclass(frozen=True)
class Reflection:
    summary: str
    plan_lessons: tuple[str, ...] = ()
    tool_lessons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refinement:
    """One turn of the refiner. `operations` is empty when it was refused; `rejected` says why."""

    step: int
    operations: tuple[dict[str, Any], ...]
    reason: str
    rejected: str = ""

    @property
    def exits(self) -> bool:
        return not self.operations or any(o.get("op") == "exit" for o in self.operations)
