"""How a call of this image ends, and what that is as an MCP result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

End = Literal["done", "failed", "invalid", "crashed", "deadline", "cancelled", "denied", "oom", "disk_full"]


@dataclass
class Outcome:
    """`message` is None for `done` only. `texts` become one content block each, `blocks` are further ones as MCP has them;
    `structured` is the machine's view. `artifacts` as the protocol has them; `changed`: paths of the workspace. `denied`: what
    policy refused, [{"host", "port", "rule"}].
    """

    end: End
    message: str | None = None
    texts: list[str] = field(default_factory=list)
    structured: dict[str, Any] | None = None
    errors: list[dict[str, str]] = field(default_factory=list)
    blocks: list[dict[str, Any]] = field(default_factory=list)
    artifacts: list[dict[str, Any]] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    denied: list[dict[str, Any]] = field(default_factory=list)

    def as_result(self, wall_ms: int) -> dict[str, Any]:
        texts = [text for text in self.texts if text]
        meta: dict[str, Any] = {
            "end": self.end,
            "message": self.message,
            "state": None,
            "exit_code": None,
            "signal": None,
            "truncated": None,
            "artifacts": self.artifacts,
            "usage": {"wall_ms": wall_ms, "cpu_ms": None, "memory_peak_bytes": None},
            "workspace_changed": sorted(self.changed),
            "workspace_changed_more": False,
        }
        if self.end == "invalid":
            meta["errors"] = self.errors
        if self.denied:
            meta["denied"] = self.denied
        shown = texts or ([self.message] if self.message else [])
        result: dict[str, Any] = {
            "content": [*({"type": "text", "text": text} for text in shown), *self.blocks],
            "isError": self.end != "done",
            "_meta": {"toolcrib/outcome": meta},
        }
        if self.structured is not None:
            result["structuredContent"] = self.structured
        return result


class Ended(Exception):  # noqa: N818 - not an error of ours: how the call ends
    """Ends the call from anywhere inside it."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome


def failed(message: str, *, texts: list[str] | None = None, structured: dict[str, Any] | None = None) -> Ended:
    """The tool tried and could not."""
    return Ended(Outcome("failed", message, texts or [], structured))


def denied(message: str, *what: dict[str, Any]) -> Ended:
    """Policy says no. The message names the rule; `what` is refused, {"host", "port", "rule"} each."""
    return Ended(Outcome("denied", message, denied=list(what)))


def invalid(pointer: str, message: str) -> Ended:
    """Arguments that only the tool can judge."""
    return Ended(
        Outcome("invalid", f"{pointer or 'arguments'}: {message}", errors=[{"pointer": pointer, "message": message}])
    )


def clip_bytes(text: str, limit: int) -> str:
    """The longest beginning of `text` that is at most `limit` bytes of UTF-8."""
    if len(text) * 4 <= limit:
        return text
    data = text.encode("utf-8", "replace")
    return text if len(data) <= limit else data[:limit].decode("utf-8", "ignore")
