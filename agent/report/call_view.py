"""A tool call as the report shows it: program apart from the other arguments, output bounded, pictures beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agent.report.pictures import Album, Picture
from agent.report.plain_text import clipped
from agent.trajectory.step import CallRecord

MAX_TEXT = 20_000  # characters of one text that the page shows
_PROGRAMS = {"python_execute": "code", "shell_execute": "command"}


def pretty(value: Any) -> str:
    """JSON with indents, whether it comes as a value or as text; other text, and what is nested too deep, as it is."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
        shown = json.dumps(parsed, ensure_ascii=False, indent=2, default=str)
    except (ValueError, RecursionError):
        return clipped(str(value), MAX_TEXT)
    return clipped(shown if isinstance(parsed, dict | list) else str(value), MAX_TEXT)


@dataclass(frozen=True)
class CallView:
    """A tool call as the page shows it. `program` is the code in its arguments, `arguments` what else there is."""

    tool: str
    label: str
    level: str
    ms: float
    program: str
    arguments: str
    output: str
    pictures: tuple[Picture, ...]
    changed: tuple[str, ...]


def call_view(album: Album) -> Callable[[CallRecord], CallView]:
    def view(call: CallRecord) -> CallView:
        outcome = call.outcome or {}
        program, rest = _split_arguments(call)
        kind, code = str(outcome.get("kind") or "not finished"), str(outcome.get("code") or "")
        label = kind if call.ok or code in {"", kind} else f"{kind} · {code}"
        level = "good" if call.ok else "bad" if outcome else ""
        changed = tuple(str(path) for path in outcome.get("workspace_changed") or ())
        shown = _call_pictures(call, outcome, album)
        return CallView(call.tool, label, level, call.ms, program, rest, _output(outcome), shown, changed)

    return view


def _split_arguments(call: CallRecord) -> tuple[str, str]:
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return "", clipped(call.arguments, MAX_TEXT)
    name = _PROGRAMS.get(call.tool, "")
    if not isinstance(arguments, dict) or not isinstance(arguments.get(name), str):
        return "", pretty(call.arguments) if arguments else ""
    rest = {key: value for key, value in arguments.items() if key != name}
    return clipped(arguments[name].strip("\n"), MAX_TEXT), pretty(rest) if rest else ""


def _output(outcome: dict[str, Any]) -> str:
    """The text that the tool gave, else what the model was told about the call."""
    texts = [str(block.get("text", "")) for block in outcome.get("content") or [] if block.get("type") == "text"]
    text = "\n".join(texts) if any(texts) else str(outcome.get("observation") or "")
    return clipped(text.rstrip("\n"), MAX_TEXT)


def _call_pictures(call: CallRecord, outcome: dict[str, Any], album: Album) -> tuple[Picture, ...]:
    blocks = [block for block in outcome.get("content") or [] if block.get("type") == "image"]
    found = [album.from_base64(f"picture of {call.tool}", str(block.get("data", ""))) for block in blocks]
    return tuple(picture for picture in found if picture is not None)
