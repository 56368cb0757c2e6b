"""What the model reads of an outcome: what happened, what to do about it, and the output, bounded."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from agent.llm.model import LLMFailure
from agent.tools.image_facts import dimensions, extension
from agent.tools.outcome import OutcomeKind
from agent.tools.text import clean, cut, size
from agent.toolserver_client.wire import RemoteOutcome

Summariser = Callable[[str, int], Awaitable[str]]
"""Shortens a long text to about so many characters. May raise LLMFailure, and BudgetExhausted, which ends the run."""

_CLIP = 5  # what a summariser is given is at most so many times as long as what is kept
_MAX_HEAD, _MAX_LISTED, _MAX_ERRORS = 2_000, 20, 10
_MIN_OUTPUT = 200

_DID: dict[OutcomeKind, str] = {
    OutcomeKind.FAILED: "The tool ran and failed",
    OutcomeKind.INVALID: "Nothing was run: the arguments were refused",
    OutcomeKind.UNKNOWN_TOOL: "Nothing was run: there is no such tool",
    OutcomeKind.TIMEOUT: "The call was stopped: it took too long",
    OutcomeKind.DENIED: "It was denied",
    OutcomeKind.UNAVAILABLE: "Nothing was run: the tool can't be used now",
    OutcomeKind.CANCELLED: "The call was cancelled; it may have had effects up to then",
    OutcomeKind.UNKNOWN: "Nobody can say how this call ended. It may have had all, some or none of its effects",
}
_ADVICE: dict[OutcomeKind, str] = {
    OutcomeKind.FAILED: "Read the output, then change the call. The same call would fail in the same way.",
    OutcomeKind.INVALID: "Correct the arguments and call again.",
    OutcomeKind.TIMEOUT: "Do less in one call, or start it in the background and look at it later.",
    OutcomeKind.DENIED: "Do it in another way; asking again changes nothing.",
    OutcomeKind.UNAVAILABLE: "Go on without it, or try again later.",
    OutcomeKind.UNKNOWN: "Check its effects, for example by reading what it should have changed, before doing it again.",
}


@dataclass(frozen=True)
class Picture:
    """A picture that came inline. `path` is where the workspace has it, None when nowhere."""

    media_type: str
    data: bytes
    path: str | None = None


@dataclass(frozen=True)
class Report:
    """All that an observation is made of. `notices` come first: what the model must know beside this call."""

    kind: OutcomeKind
    code: str = ""
    message: str = ""
    advice: str = ""
    known: RemoteOutcome = field(default_factory=RemoteOutcome)
    detail: dict[str, Any] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()


async def observation(report: Report, max_chars: int, summarise: Summariser | None = None) -> str:
    """At most `max_chars`. Raises what the summariser raises, but for LLMFailure: then the text is cut instead."""
    head, tail = cut(_head(report), _MAX_HEAD), cut(_tail(report.known), _MAX_HEAD)
    room = max(max_chars - len(head) - len(tail) - 2, _MIN_OUTPUT)
    body = clean(_output(report))
    if len(body) > room:
        body = await _shortened(body, room, _where(report.known), summarise)
    return cut("\n".join(part for part in (head, body, tail) if part) or "[done, without output]", max_chars)


def pictures_in(content: list[dict[str, Any]]) -> list[Picture]:
    """The inline pictures of an outcome; data that is no base64 is left out."""
    found = []
    for block in content:
        if block.get("type") == "image" and isinstance(block.get("data"), str):
            try:
                data = base64.b64decode(block["data"], validate=True)
            except (binascii.Error, ValueError):
                continue
            found.append(Picture(str(block.get("mimeType") or "image"), data))
    return found


def picture_name(picture: Picture, call_id: str, number: int) -> str:
    return f"pictures/{call_id[-12:]}-{number}.{extension(picture.media_type)}"


async def _shortened(body: str, room: int, where: str, summarise: Summariser | None) -> str:
    if summarise is not None:
        lead = f"[Summary of {len(body):,} characters of output{where}]\n"
        try:
            summary = clean((await summarise(cut(body, room * _CLIP), max(room - len(lead), 1))).strip())
        except LLMFailure:
            summary = ""
        if summary:
            return cut(lead + summary, room)
    return cut(body, room, where or "; print less, or write it to a file and read parts of that")


def _head(report: Report) -> str:
    lines = [*report.notices]
    if report.kind is not OutcomeKind.DONE:
        code = f" ({report.code})" if report.code else ""
        lines.append(f"{_DID[report.kind]}{code}. {clean(report.message)}".strip())
        errors = report.detail.get("errors")
        if isinstance(errors, list):
            lines += [
                f"- {clean(str(error.get('pointer') or '/'))}: {clean(str(error.get('message')))}"
                for error in errors[:_MAX_ERRORS]
                if isinstance(error, dict)
            ]
        if fault := report.detail.get("fault"):
            lines.append(f"Fault: {fault}.")
        lines.append(report.advice or _ADVICE.get(report.kind, ""))
    known = report.known
    if known.exit_code:
        lines.append(f"Exit code: {known.exit_code}")
    if known.signal:
        lines.append(f"Signal: {known.signal}")
    if known.state == "lost":
        lines.append("The interpreter's state is lost: variables and imports are gone, files are kept.")
    return "\n".join(line for line in lines if line)


def _output(report: Report) -> str:
    pictures = iter(report.pictures)
    parts = [_block(block, pictures) for block in report.known.content]
    text = "\n".join(part for part in parts if part)
    if not text and report.known.structured is not None:
        text = json.dumps(report.known.structured, ensure_ascii=False, indent=1, default=str)
    return text


def _block(block: dict[str, Any], pictures: Any) -> str:
    match block.get("type"):
        case "text":
            return str(block.get("text", ""))
        case "image":
            return _picture(block, next(pictures, None))
        case "audio":
            return f"[{block.get('mimeType') or 'audio'}, not shown]"
        case "resource_link":
            return f"[link to {block.get('uri')}]"
        case "resource":
            inner = block.get("resource")
            inner = inner if isinstance(inner, dict) else {}
            return str(inner.get("text") or f"[resource {inner.get('uri')}, {inner.get('mimeType') or 'binary'}]")
        case other:
            return f"[content of type {str(other)[:40]}, not shown]"


def _picture(block: dict[str, Any], picture: Picture | None) -> str:
    if picture is None:
        return f"[{block.get('mimeType') or 'image'}, not readable]"
    pixels = dimensions(picture.data)
    sides = f"{pixels[0]}x{pixels[1]}" if pixels else size(len(picture.data))
    return f"[{picture.media_type}, {sides}, {f'saved as {picture.path}' if picture.path else 'not saved'}]"


def _tail(known: RemoteOutcome) -> str:
    lines = []
    if known.artifacts:
        shown = [_artifact(artifact) for artifact in known.artifacts[:_MAX_LISTED]]
        lines.append(f"[Artifacts: {_listed(shown, len(known.artifacts))}]")
    if known.workspace_changed:
        lines.append(f"[Files changed: {_listed(known.workspace_changed[:_MAX_LISTED], len(known.workspace_changed))}]")
    return clean("\n".join(lines))


def _artifact(artifact: dict[str, Any]) -> str:
    count = artifact.get("bytes")
    facts = [size(count)] if isinstance(count, int) else []
    facts += [str(artifact["media_type"])] if artifact.get("media_type") else []
    return f"{artifact.get('path')}" + (f" ({', '.join(facts)})" if facts else "")


def _listed(shown: list[str], count: int) -> str:
    return ", ".join(shown) + (f" and {count - len(shown)} more" if count > len(shown) else "")


def _where(known: RemoteOutcome) -> str:
    artifact = (known.truncated or {}).get("artifact")
    return f"; the whole is the file {artifact}, read parts of it" if artifact else ""
