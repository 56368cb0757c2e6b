"""What came of a tool call, as a value. The model reads `observation`; the loop reads `kind`; the report reads the rest."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Protocol


class OutcomeKind(StrEnum):
    DONE = "done"  # 200
    FAILED = "failed"  # 500 tool_failed, tool_crashed, oom_killed, disk_full: the tool ran and said no, or died
    INVALID = "invalid"  # arguments that are no JSON, or against the schema: nothing ran
    UNKNOWN_TOOL = "unknown_tool"  # nothing ran
    TIMEOUT = "timeout"  # 450 deadline_exceeded, or still running after all continuations
    DENIED = "denied"  # policy_denied, or the breaker or the operator withholds the tool
    UNAVAILABLE = "unavailable"  # the ToolServer can't be reached or has no room: nothing ran
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"  # it may have run: outcome_unknown


@dataclass(frozen=True)
class Outcome:
    """`code` is the contract's code, or ours (invalid_json, breaker_open, budget). `executed`: none, yes, possible."""

    kind: OutcomeKind
    tool: str
    call_id: str
    code: str
    observation: str  # bounded text for the model
    executed: str = "none"
    content: list[dict[str, Any]] = field(default_factory=list)  # MCP content blocks, images included
    structured: Any = None
    artifacts: list[dict[str, Any]] = field(default_factory=list)  # {"path", "bytes", "media_type"}
    workspace_changed: list[str] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    trace_id: str | None = None

    @property
    def ok(self) -> bool:
        return self.kind is OutcomeKind.DONE

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "kind": str(self.kind)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Outcome:
        return cls(**{**data, "kind": OutcomeKind(data["kind"])})


@dataclass(frozen=True)
class ToolInfo:
    """A tool the agent may call. `effect`: read, idempotent or once: of added images by the operator's word (`retry`), else from
    the annotations (readOnlyHint, idempotentHint).
    """

    name: str
    description: str
    input_schema: dict[str, Any]
    effect: str = "once"


@dataclass(frozen=True)
class Invocation:
    """One call that the model asked for, at its place in the run. `arguments` is the model's text, unparsed."""

    key: str  # such as t2/a1/actor/s3/c0; the call id is derived from the run id and this
    task_id: str
    tool: str
    arguments: str


class Tools(Protocol):
    """What the loops see of FunctionHandler: the only way to a tool."""

    async def catalog(self) -> tuple[ToolInfo, ...]:
        """The live tool list, tools withheld by an open breaker left out. Raises Unreachable when it was never seen."""

    async def call(self, invocation: Invocation) -> Outcome:
        """Never raises for what a tool or the ToolServer does. Raises BudgetExhausted; cancellation passes through.

        Raises Unreachable for a call that an earlier process sent, when this process has never reached the ToolServer:
        to settle it as unknown would throw away an outcome that can still be asked for.
        """

    async def close(self) -> None:
        """End the session. Never raises."""
