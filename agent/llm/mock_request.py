"""A chat completion request as a scripted model sees it, and the templates that read values out of it."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any

_TEMPLATE = re.compile(
    r"\{\{\s*(tool|user|system|assistant|last|any):/((?:[^/\\\n]|\\.)+)/([ism]*)(?:\|(int|float|json))?\s*\}\}"
)
_COUNTERS = re.compile(r"\{\{\s*(turn|role|model)\s*\}\}")
_FLAGS = {"i": re.IGNORECASE, "s": re.DOTALL, "m": re.MULTILINE}


class ScriptProblem(Exception):  # noqa: N818
    """The script has no answer to a request. The message says what was asked and what to write."""


@dataclass(frozen=True)
class Asked:
    """`turn` is the number of assistant messages so far: it comes from the conversation, not from memory."""

    role: str
    model: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    stream: bool
    include_usage: bool
    fingerprint: str
    body: dict[str, Any] = field(repr=False)
    key: str = field(default="", repr=False)  # as sent in Authorization

    @classmethod
    def from_body(cls, body: dict[str, Any], role: str, key: str = "") -> Asked:
        """Raises ValueError for a body that is no chat completion request."""
        messages, tools = body.get("messages"), body.get("tools") or []
        if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
            raise ValueError("'messages' must be a list of at least one message")
        if not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
            raise ValueError("'tools' must be a list")
        options = body.get("stream_options") or {}
        basis = json.dumps([role, messages, tools], sort_keys=True).encode()
        return cls(
            role, str(body.get("model", "")), tuple(messages), tuple(tools), bool(body.get("stream")),
            bool(options.get("include_usage")), hashlib.sha256(basis).hexdigest(), body, key,
        )  # fmt: skip

    @property
    def turn(self) -> int:
        return sum(message.get("role") == "assistant" for message in self.messages)

    @property
    def tool_names(self) -> tuple[str, ...]:
        return tuple(str(tool.get("function", {}).get("name", "")) for tool in self.tools)

    @property
    def last(self) -> str:
        return content_text(self.messages[-1])

    def texts(self, role: str) -> list[str]:
        """The texts of a role's messages, newest first; `any` for all roles, `last` for the last message alone."""
        if role == "last":
            return [self.last]
        return [content_text(m) for m in reversed(self.messages) if role in ("any", m.get("role"))]

    def describe(self) -> str:
        last = self.last
        shown = last if len(last) <= 400 else f"{last[:250]} … {last[-150:]}"
        return (
            f"role {self.role!r}, turn {self.turn}, {len(self.messages)} messages, tools {list(self.tool_names)}, "
            f"last message ({self.messages[-1].get('role')}): {shown!r}"
        )


def content_text(message: dict[str, Any]) -> str:
    """The text of a message, of its parts, and of the calls it makes."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    text = (
        content if isinstance(content, str) else "".join(str(p.get("text", "")) for p in parts if isinstance(p, dict))
    )
    calls = message.get("tool_calls") or []
    return "\n".join([text, *(json.dumps(call.get("function", {}), ensure_ascii=False) for call in calls)]).strip()


def render(value: Any, asked: Asked) -> Any:
    """`value` with each template filled in, in texts at any depth. Raises ScriptProblem when one finds nothing."""
    if isinstance(value, dict):
        return {key: render(item, asked) for key, item in value.items()}
    if isinstance(value, list):
        return [render(item, asked) for item in value]
    if not isinstance(value, str):
        return value
    whole = _TEMPLATE.fullmatch(value.strip())
    if whole and whole.group(4):
        return _typed(_found(whole, asked), whole.group(4))
    counted = _COUNTERS.sub(lambda match: str(getattr(asked, match.group(1))), value)
    return _TEMPLATE.sub(lambda match: _found(match, asked), counted)


def _found(match: re.Match[str], asked: Asked) -> str:
    flags = re.NOFLAG
    for letter in match.group(3):
        flags |= _FLAGS[letter]
    pattern = re.compile(match.group(2).replace("\\/", "/"), flags)
    for text in asked.texts(match.group(1)):
        if hit := pattern.search(text):
            return str(hit.group(1) if pattern.groups else hit.group())
    raise ScriptProblem(f"the template {match.group()} finds nothing. Asked: {asked.describe()}")


def _typed(text: str, kind: str) -> Any:
    try:
        return int(text) if kind == "int" else float(text) if kind == "float" else json.loads(text)
    except ValueError as error:
        raise ScriptProblem(f"a template was to give {kind}, but found {text[:200]!r}") from error
