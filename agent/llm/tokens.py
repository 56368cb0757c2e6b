"""Tokens without a tokenizer or network: upper estimates for reservations, and the server's own counts when it sends any.

Byte-pair tokenizers of today make of prose and code less than one token for three letters, for one and a half digits or
punctuation marks, and for one and a half bytes of other scripts. The estimate takes these bounds: a text made to defeat
them (random letters, say) can still cost more.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from typing import Any

from agent.llm.model import Message, Request, Usage

_PER_MESSAGE = 8
_PER_REQUEST = 16
_LETTERS = (string.ascii_letters + " ").encode()


def estimate_text(text: str) -> int:
    """Upper estimate of the tokens of `text`."""
    raw = text.encode("utf-8", "replace")
    dense = len(raw.translate(None, _LETTERS))
    return -(-(len(raw) - dense) // 3) + -(-dense * 2 // 3)


def estimate_request(request: Request) -> int:
    """Upper estimate of the prompt's tokens, tools included."""
    tools = sum(
        estimate_text(json.dumps([t.name, t.description, t.parameters], default=str)) + 12 for t in request.tools
    )
    return _PER_REQUEST + tools + sum(_estimate_message(message) for message in request.messages)


def _estimate_message(message: Message) -> int:
    total = _PER_MESSAGE + estimate_text(message.content)
    total += sum(_PER_MESSAGE + estimate_text(call.name) + estimate_text(call.arguments) for call in message.tool_calls)
    return total + (estimate_text(json.dumps(message.extra, default=str)) if message.extra else 0)


def read_usage(raw: Any, *, prompt_estimate: int, completion_estimate: int) -> Usage:
    """The server's usage; what it left out or sent as another type is our estimate, and `estimated` says so."""
    fields = raw if isinstance(raw, Mapping) else {}
    prompt, completion = _count(fields.get("prompt_tokens")), _count(fields.get("completion_tokens"))
    cached = _count(_nested(fields, "prompt_tokens_details", "cached_tokens"))
    if cached is None:
        cached = _count(fields.get("prompt_cache_hit_tokens"))
    reasoning = _count(_nested(fields, "completion_tokens_details", "reasoning_tokens"))
    estimated = prompt is None or completion is None
    prompt = prompt_estimate if prompt is None else prompt
    completion = completion_estimate if completion is None else completion
    return Usage(prompt, completion, min(cached or 0, prompt), min(reasoning or 0, completion), estimated)


def add_usage(first: Usage | None, second: Usage | None) -> Usage | None:
    """The sum; estimated when a part is."""
    if first is None or second is None:
        return first or second
    return Usage(
        first.prompt_tokens + second.prompt_tokens,
        first.completion_tokens + second.completion_tokens,
        first.cached_tokens + second.cached_tokens,
        first.reasoning_tokens + second.reasoning_tokens,
        first.estimated or second.estimated,
    )


def _nested(fields: Mapping[str, Any], outer: str, inner: str) -> Any:
    details = fields.get(outer)
    return details.get(inner) if isinstance(details, Mapping) else None


def _count(value: Any) -> int | None:
    """A number of tokens, also as float or digits; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 16:
        return int(value)
    if isinstance(value, int | float) and 0 <= value < 1e15:
        return int(value)
    return None
