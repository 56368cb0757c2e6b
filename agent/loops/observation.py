"""What the model is told of a tool call: first in our own words what became of it, then what the tool said, marked as data."""

from __future__ import annotations

from collections.abc import Sequence

from agent.llm.model import ToolSpec
from agent.roles.fence import fence
from agent.tools.outcome import Outcome, OutcomeKind, ToolInfo
from agent.trajectory.printable import clip, printable

_TOLD = {
    OutcomeKind.DONE: "Done.",
    OutcomeKind.FAILED: "It failed ({code}).",
    OutcomeKind.INVALID: "Not run: the call is not valid.",
    OutcomeKind.UNKNOWN_TOOL: "Not run: there is no such tool.",
    OutcomeKind.TIMEOUT: "It took too long ({code}); what it did until then stands.",
    OutcomeKind.DENIED: "Not allowed ({code}).",
    OutcomeKind.UNAVAILABLE: "Not run: the ToolServer can't be reached at the moment ({code}).",
    OutcomeKind.CANCELLED: "It was cancelled; what it did until then stands.",
    OutcomeKind.UNKNOWN: "It is not known whether this ran ({code}). Look at what is there before you repeat it.",
}
# in these the text is the handler's own, not a tool's
_OURS = frozenset({OutcomeKind.INVALID, OutcomeKind.UNKNOWN_TOOL, OutcomeKind.UNAVAILABLE})


def observation_text(outcome: Outcome, limit: int) -> str:
    told = _TOLD[outcome.kind].format(code=outcome.code)
    if outcome.kind in _OURS:
        return f"{told} {clip(printable(outcome.observation), limit)}".strip()
    return f"{told}\n{fence(f'output of {outcome.tool}', outcome.observation, limit)}"


def specs(tools: Sequence[ToolInfo]) -> tuple[ToolSpec, ...]:
    """The tools as a model sees them."""
    return tuple(ToolSpec(t.name, t.description, t.input_schema) for t in tools)
