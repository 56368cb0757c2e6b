"""The outcome of a call out of what its sandbox answered: the body of a 200, and the same fields in an error's detail."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from toolserver.runtime.base import SandboxEnd

ENDS = frozenset({"done", "failed", "invalid", "crashed", "deadline", "cancelled", "oom", "disk_full", "denied"})
_META = "toolcrib/outcome"


@dataclass(frozen=True)
class Outcome:
    """`end` as in docs/reference/sandbox-protocol.md. `fields` are those of the HTTP contract, but for the call's id."""

    end: str
    message: str
    errors: list[dict[str, str]]
    fields: dict[str, Any]


def empty_fields(content: list[dict[str, Any]] | None = None, wall_ms: float | None = None) -> dict[str, Any]:
    """For a call whose sandbox could not tell: nothing is claimed."""
    usage = {"wall_ms": wall_ms, "cpu_ms": None, "memory_peak_bytes": None}
    return {"content": content or [], "artifacts": [], "usage": usage, "workspace_changed": []}


def from_worker(result: dict[str, Any]) -> Outcome | None:
    """Of a result with the worker's own word on how it ended; None without it."""
    meta = result.get("_meta")
    told = meta.get(_META) if isinstance(meta, dict) else None
    if not isinstance(told, dict) or told.get("end") not in ENDS:
        return None
    fields: dict[str, Any] = {"content": _blocks(result)}
    if "structuredContent" in result:
        fields["structured"] = result["structuredContent"]
    if told.get("truncated") is not None:
        fields["truncated"] = told["truncated"]
    fields["artifacts"] = told.get("artifacts") or []
    fields["usage"] = told.get("usage") or empty_fields()["usage"]
    fields["workspace_changed"] = told.get("workspace_changed") or []
    if told.get("workspace_changed_more"):
        fields["workspace_changed_more"] = True
    fields.update({name: told[name] for name in ("state", "exit_code", "signal") if told.get(name) is not None})
    if told.get("limits_hit"):
        fields["limits_hit"] = told["limits_hit"]
    errors = told.get("errors")
    return Outcome(
        told["end"], str(told.get("message") or "")[:4000], errors if isinstance(errors, list) else [], fields
    )


def from_foreign(
    result: dict[str, Any], content: list[dict[str, Any]], truncated: dict[str, Any] | None, wall_ms: float
) -> Outcome:
    """Of an image without the extension: only what MCP says. `content` and `truncated` are its content, bounded."""
    fields = empty_fields(content, wall_ms)
    if "structuredContent" in result:
        fields["structured"] = result["structuredContent"]
    if truncated is not None:
        fields["truncated"] = truncated
    failed = result.get("isError") is True
    said = next(
        (block["text"] for block in content if block.get("type") == "text" and isinstance(block.get("text"), str)), ""
    )
    return Outcome("failed" if failed else "done", said[:500] if failed else "", [], fields)


def _blocks(result: dict[str, Any]) -> list[dict[str, Any]]:
    content = result.get("content")
    return [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []


def blocks_of(result: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The content blocks of a result; None when it has none that MCP knows. Of one that is structured only: its JSON as text."""
    content = result.get("content")
    if content is None and "structuredContent" in result:
        return [{"type": "text", "text": json.dumps(result["structuredContent"], ensure_ascii=False)}]
    if not isinstance(content, list) or not all(
        isinstance(b, dict) and isinstance(b.get("type"), str) for b in content
    ):
        return None
    return content


def tell_loss(fields: dict[str, Any], lost: SandboxEnd) -> None:
    """Say in an outcome that the sandbox is a fresh one: first in its content, where a model reads it."""
    how = _LOSSES.get(lost.cause, "ended")
    note = (
        f"[The sandbox {how} before this call and was replaced: interpreter state, background processes and /tmp are lost; "
        "the files of the workspace are kept.]"
    )
    fields["content"] = [{"type": "text", "text": note}, *fields["content"]]
    fields["sandbox_reset"] = True


_LOSSES = {
    "oom": "ran out of memory",
    "killed": "was killed",
    "exited": "exited by itself",
    "removed": "was removed from outside",
    "runtime_lost": "was lost with its container engine",
}
