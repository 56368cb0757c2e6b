"""A structured answer from a model: one function whose parameters are the schema, or the same JSON in the text.

Pure: who asks, how often, and with what journal and budget, is the caller's.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry

from agent.llm.json_ladder import JsonProblem, parse_arguments, parse_json, too_deep
from agent.llm.model import Message, Reply, ToolSpec

MAX_ERRORS = 10
_PREVIEW_CHARS = 300
_FENCED = re.compile(r"```[A-Za-z0-9_+-]*[ \t]*\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Answer:
    """A value that matches the schema, and the lossless repairs that were needed."""

    value: dict[str, Any]
    repairs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Problem:
    """Why a reply is no answer. `message` is meant for the model, `call_id` names the call it answers."""

    message: str
    call_id: str | None = None


def parse_reply(reply: Reply, tool: ToolSpec) -> Answer | Problem:
    """The first call of `tool`, else a JSON object in the text, checked against `tool.parameters`."""
    for call in reply.tool_calls:
        if call.name == tool.name:
            parsed = parse_arguments(call.arguments)
            if isinstance(parsed, JsonProblem):
                return Problem(parsed.message, call.id)
            return _checked(parsed.value, parsed.repairs, tool, call.id)
    if reply.tool_calls:
        return Problem(
            f"There is no tool named {reply.tool_calls[0].name!r} here. Call {tool.name}.", reply.tool_calls[0].id
        )
    if reply.finish_reason == "length":
        return Problem(f"The reply was cut at the token limit. Call {tool.name} at once, with a shorter answer.")
    for candidate in _candidates(reply.text):
        parsed = parse_json(candidate)
        if not isinstance(parsed, JsonProblem) and isinstance(parsed.value, dict):
            return _checked(parsed.value, parsed.repairs, tool, None)
    return Problem(f"The reply has no call of {tool.name}. Call it, with arguments that match its schema.")


def corrective_messages(reply: Reply, problem: Problem, tool: ToolSpec) -> tuple[Message, ...]:
    """What the model said, and what is wrong with it: each call is answered, so that the history stays valid."""
    said = Message("assistant", reply.text, reply.tool_calls, extra=reply.extra)
    demand = f"{problem.message}\nCall {tool.name} once, with arguments that match its schema."
    if reply.tool_calls:
        wrong = problem.call_id or reply.tool_calls[0].id
        answers = (
            Message("tool", demand if call.id == wrong else "Not run.", tool_call_id=call.id)
            for call in reply.tool_calls
        )
        return (said, *answers)
    if reply.empty:
        return (Message("user", demand),)
    clipped = replace(said, content=_clip(reply.text, 4000))
    return (clipped, Message("user", demand))


def schema_errors(value: Any, schema: dict[str, Any]) -> tuple[str, ...]:
    """Where and how `value` breaks `schema`, at most MAX_ERRORS lines such as `/tasks/0/goal: 3 is not of type 'string'`.

    A remote `$ref` is never fetched: it raises referencing.exceptions.Unresolvable, as a dangling one does.
    """
    validator = Draft202012Validator(schema, registry=Registry())
    lines: list[str] = []
    try:
        for error in validator.iter_errors(value):
            pointer = "/" + "/".join(str(part) for part in error.absolute_path)
            lines.append(f"{pointer if pointer != '/' else '(root)'}: {_clip(error.message, _PREVIEW_CHARS)}")
            if len(lines) == MAX_ERRORS:
                break
    except RecursionError:
        lines.append("(root): nested too deeply to be checked")
    return tuple(lines)


def _checked(value: Any, repairs: tuple[str, ...], tool: ToolSpec, call_id: str | None) -> Answer | Problem:
    errors = schema_errors(value, tool.parameters)
    if errors:
        listed = "\n".join(f"- {line}" for line in errors)
        return Problem(f"The arguments of {tool.name} break its schema:\n{listed}", call_id)
    return Answer(value, repairs)


def _candidates(text: str) -> list[str]:
    """Texts that may be the JSON of an answer: all of it, the last fenced block, the one object between prose."""
    found = [text] if text.lstrip()[:1] in ("{", "[", '"', "`") else []
    fenced = _FENCED.findall(text)
    if fenced:
        found.append(fenced[-1])
    elif (span := _only_object(text)) is not None:
        found.append(span)
    return found


def _only_object(text: str) -> str | None:
    """The single JSON object in a text of prose; None when there is none, or more than one."""
    start = text.find("{")
    if start < 0 or too_deep(text[start:]):
        return None
    try:
        _, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return None if "{" in text[end:] else text[start:end]


def _clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[:limit] + f" … ({len(text) - limit:,} more characters)"
