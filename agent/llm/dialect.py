"""How one model's server wants to be asked. It starts as OpenAI's own and is adapted, once for each field, when a server refuses it.

Each adaptation gives something up for good, so there are at most as many as there are fields.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Dialect:
    streaming: bool = True
    stream_options: bool = True
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    temperature: bool = True
    required_choice: bool = True  # tool_choice "required"; without it the model is left free
    echo_extra: bool = True  # provider fields of past replies, such as reasoning_content


_STREAMING = re.compile(r"\bstream(?:ing)?\b(?!_options)", re.IGNORECASE)
_NO = re.compile(
    r"not support|unsupported|unknown|unrecognized|unexpected|not allowed|not permitted|extra (?:inputs|fields)|invalid"
    r"|does not support|must be|only supported|additional properties|not available|disabled",
    re.IGNORECASE,
)


def adapt(dialect: Dialect, message: str, sent_extra: frozenset[str]) -> Dialect | None:
    """The dialect to try next after a 400, 404 or 422 with this text; None when it complains about something else.

    `sent_extra` are the names of the provider fields that the refused request carried.
    """
    if not _NO.search(message):
        return None
    text = message.lower()
    if dialect.stream_options and dialect.streaming and ("stream_options" in text or "include_usage" in text):
        return replace(dialect, stream_options=False)
    if dialect.max_tokens_field == "max_tokens" and "max_completion_tokens" in text:
        return replace(dialect, max_tokens_field="max_completion_tokens")
    if dialect.temperature and "temperature" in text:
        return replace(dialect, temperature=False)
    if dialect.required_choice and "tool_choice" in text:
        return replace(dialect, required_choice=False)
    if dialect.echo_extra and any(name.lower() in text for name in sent_extra):
        return replace(dialect, echo_extra=False)
    if dialect.streaming and _STREAMING.search(text):
        return replace(dialect, streaming=False)
    return None
