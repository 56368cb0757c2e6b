"""What a server sent into what the agent acts on: complete calls with unique ids, one of four finish reasons, honest notes.

Nothing is invented. A call without a name, or cut by the token limit, is no call; a text in an unknown notation stays text;
arguments are passed on as the model wrote them, for the handler to parse and check.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Literal

from agent.llm.model import Request, ToolCall
from agent.llm.stream import Completion, RawCall, is_object
from agent.llm.text_calls import find_calls
from agent.llm.tool_names import sent_names

FinishReason = Literal["stop", "tool_calls", "length", "content_filter"]

CALL_EXTRAS = "tool_call_extras"
"""Key in Reply.extra of the fields that providers hang on single calls: {call id: fields}. Sent back inside the calls."""

_REASONS: dict[str, FinishReason] = {
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "tool_use": "tool_calls",
    "length": "length",
    "max_tokens": "length",
    "model_length": "length",
    "content_filter": "content_filter",
    "safety": "content_filter",
    "recitation": "content_filter",
}
BROKEN_OFF = frozenset({"error", "abort", "aborted", "cancelled", "insufficient_system_resource"})
"""Finish reasons that say that the server gave up: the reply is not whole."""


@dataclass(frozen=True)
class Normalised:
    text: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    extra: dict[str, Any]
    notes: tuple[str, ...]


def normalise(completion: Completion, request: Request) -> Normalised:
    """`completion` must have a finish reason. Ids are unique among themselves and in the request's history."""
    notes: list[str] = []
    reason = _REASONS.get(completion.finish_reason.lower(), "stop")
    sent = sent_names(tool.name for tool in request.tools)
    meant = {name: original for original, name in sent.items()}
    raw = [call for call in completion.calls if _is_whole(call, reason, notes)]
    text = completion.text
    if not completion.calls:
        written, text = find_calls(text, {*sent, *meant})
        raw = [RawCall(name=call.name, arguments=call.arguments) for call in written]
        if raw:
            notes.append(f"{len(raw)} call(s) were written as text")
    taken = {call.id for message in request.messages for call in message.tool_calls}
    calls, extras = _with_ids(raw, taken, notes)
    calls = tuple(replace(call, name=meant.get(call.name, call.name)) for call in calls)
    if reason in ("stop", "tool_calls"):
        reason = "tool_calls" if calls else "stop"
    if not calls and not text.strip():
        notes.append("the reply is empty")
    extra = {**completion.extra, **({CALL_EXTRAS: extras} if extras else {})}
    return Normalised(text, calls, reason, extra, tuple(notes))


def _is_whole(call: RawCall, reason: FinishReason, notes: list[str]) -> bool:
    if not call.name.strip():
        notes.append("a call without a name was dropped")
        return False
    if reason == "length" and not is_object(call.arguments):
        notes.append(f"a call of {call.name[:80]} was dropped: its arguments were cut at the token limit")
        return False
    return True


def _with_ids(
    raw: list[RawCall], taken: Collection[str], notes: list[str]
) -> tuple[tuple[ToolCall, ...], dict[str, dict[str, Any]]]:
    used = set(taken)
    calls: list[ToolCall] = []
    extras: dict[str, dict[str, Any]] = {}
    for call in raw:
        id_ = call.id.strip()
        if not id_ or id_ in used:
            notes.append(f"a call of {call.name[:80]} had {'an id in use' if id_ else 'no id'} and was given one")
            id_ = f"call_{secrets.token_hex(12)}"
        used.add(id_)
        calls.append(ToolCall(id_, call.name.strip(), call.arguments))
        if call.extra:
            extras[id_] = call.extra
    return tuple(calls), extras
