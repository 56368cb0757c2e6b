"""A Request as the JSON of `POST /chat/completions`: no null, no lone surrogate, no number that JSON lacks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from agent.llm.dialect import Dialect
from agent.llm.model import Message, Request
from agent.llm.normalise import CALL_EXTRAS
from agent.llm.tool_names import sent_names

_OURS = frozenset({"role", "content", "tool_calls", "tool_call_id", CALL_EXTRAS})


def payload(request: Request, messages: Sequence[Message], model: str, dialect: Dialect) -> dict[str, Any]:
    """The body, from `messages` as the linter left them. The temperature is sent only when one is asked for."""
    names = sent_names(tool.name for tool in request.tools)
    body: dict[str, Any] = {
        "model": model,
        "messages": [_message(message, dialect) for message in messages],
        dialect.max_tokens_field: request.max_tokens,
    }
    if request.temperature is not None and dialect.temperature:
        body["temperature"] = request.temperature
    if request.tools:
        body["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": names[tool.name],
                    "description": tool.description,
                    "parameters": tool.parameters or {"type": "object", "properties": {}},
                },
            }
            for tool in request.tools
        ]
        if request.tool_choice == "none" or (request.tool_choice == "required" and dialect.required_choice):
            body["tool_choice"] = request.tool_choice
    if dialect.streaming:
        body["stream"] = True
        if dialect.stream_options:
            body["stream_options"] = {"include_usage": True}
    return {key: clean(value) for key, value in body.items()}


def extra_fields(messages: Sequence[Message]) -> frozenset[str]:
    """Names of the provider fields that these messages echo."""
    names = {name for message in messages for name in message.extra if name not in _OURS}
    for message in messages:
        extras = message.extra.get(CALL_EXTRAS)
        names |= {name for fields in extras.values() for name in fields} if isinstance(extras, dict) else set()
    return frozenset(names)


def clean(value: Any) -> Any:
    """`value` as strict JSON in UTF-8: nulls inside of objects are left out, what UTF-8 or JSON can't hold is replaced."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {clean(str(key)): clean(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _message(message: Message, dialect: Dialect) -> dict[str, Any]:
    # Several servers insist on `content` in each message, and none refuses an empty one beside tool calls.
    body: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_call_id is not None:
        body["tool_call_id"] = message.tool_call_id
    extras: Any = message.extra.get(CALL_EXTRAS) if dialect.echo_extra else None
    if message.tool_calls:
        body["tool_calls"] = [
            {
                **(extras.get(call.id, {}) if isinstance(extras, dict) else {}),
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.role == "assistant" and dialect.echo_extra:
        body |= {key: value for key, value in message.extra.items() if key not in _OURS}
    return body
