"""Chunks of a streamed completion into one whole, however a server cuts, numbers and names them.

Servers disagree: the index of a call is missing or the same for all, ids are null, repeated or new in each chunk, arguments
arrive as an object. A fragment belongs to the call that its id, index and name point to, and a name after complete
arguments starts a new call. Nothing is judged here: `normalise` decides what is a call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agent.llm.json_ladder import too_deep

MAX_CALLS = (
    256  # of one reply: no loop runs so many, and to tell more of them apart takes time that grows with the square
)

_KNOWN_DELTA = frozenset({"role", "content", "tool_calls", "function_call", "refusal", "annotations", "audio"})
_KNOWN_CALL = frozenset({"index", "id", "type", "function"})


@dataclass
class RawCall:
    """A call as the server sent it. `id` may be empty or not unique, `name` empty, `arguments` any text."""

    index: int | None = None
    id: str = ""
    name: str = ""
    arguments: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return is_object(self.arguments)


@dataclass
class Completion:
    """What the server said, assembled. `finish_reason` is empty as long as none was seen."""

    text: str = ""
    calls: list[RawCall] = field(default_factory=list)
    finish_reason: str = ""
    usage: Any = None
    model: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


class Assembler:
    """Feed it each chunk, as a mapping, then read `completion()`. `tool_names` helps to join names sent in pieces."""

    def __init__(self, tool_names: Collection[str] = ()) -> None:
        self.chars = 0  # of text, arguments and names so far: what the caller bounds
        self.finish_reason = ""
        self.too_many_calls = False  # more than MAX_CALLS: the rest is passed over, so the reply is not whole
        self._tool_names = frozenset(tool_names)
        self._text: list[str] = []
        self._calls: list[RawCall] = []
        self._touched: RawCall | None = None
        self._extra: dict[str, Any] = {}
        self._usage: Any = None
        self._model = ""

    def feed(self, chunk: Any) -> None:
        """Take a chunk; fields of unknown shape are passed over."""
        if not isinstance(chunk, Mapping):
            return
        if chunk.get("usage") is not None:
            self._usage = chunk["usage"]
        if isinstance(chunk.get("model"), str):
            self._model = chunk["model"]
        choice = _first_choice(chunk.get("choices"))
        delta = choice.get("delta") or choice.get("message") or {}
        if isinstance(delta, Mapping):
            self._take_delta(delta)
        if isinstance(choice.get("finish_reason"), str) and choice["finish_reason"]:
            self.finish_reason = choice["finish_reason"]

    def completion(self) -> Completion:
        return Completion(
            "".join(self._text), list(self._calls), self.finish_reason, self._usage, self._model, dict(self._extra)
        )

    def _take_delta(self, delta: Mapping[str, Any]) -> None:
        # A refusal is what the model says instead of an answer: text for the loop.
        for text in (_text_of(delta.get("content")), _text_of(delta.get("refusal"))):
            self.chars += len(text)
            self._text.append(text)
        fragments = delta.get("tool_calls")
        for fragment in fragments if isinstance(fragments, list) else ():
            if isinstance(fragment, Mapping) and not self.too_many_calls:
                self._take_fragment(fragment)
        if isinstance(delta.get("function_call"), Mapping):
            self._take_fragment({"function": delta["function_call"]})
        for key, value in delta.items():
            if key not in _KNOWN_DELTA:
                self.chars += _merge(self._extra, key, value)

    def _take_fragment(self, fragment: Mapping[str, Any]) -> None:
        function = fragment.get("function")
        function = function if isinstance(function, Mapping) else {}
        index = fragment.get("index")
        index = index if isinstance(index, int) else None
        id_ = "" if fragment.get("id") is None else str(fragment["id"])
        name = function["name"] if isinstance(function.get("name"), str) else ""
        arguments = function.get("arguments")
        call = self._owner(index, id_, name)
        if call is None:
            if len(self._calls) >= MAX_CALLS:
                self.too_many_calls = True
                return
            call = RawCall(index)
            self._calls.append(call)
        self._touched = call
        call.id = call.id or id_
        if name and name != call.name:
            call.name += name
        if arguments is not None:
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            call.arguments += text
            self.chars += len(text)
        self.chars += len(name)
        for key, value in fragment.items():
            if key not in _KNOWN_CALL:
                self.chars += _merge(call.extra, key, value)

    def _owner(self, index: int | None, id_: str, name: str) -> RawCall | None:
        """The call that a fragment goes on with; None when it starts a new one."""
        if id_ and (same := self._last(lambda call: call.id == id_)):
            # Two parallel calls can carry one id: another index, or a name after complete arguments, tells them apart.
            other = index is not None and same.index is not None and index != same.index
            return None if name and (other or self._starts_anew(same, name)) else self._by_index(index, id_) or same
        candidate = self._touched if index is None else self._last(lambda call: call.index == index)
        if candidate is None:
            # An index that was never announced, and no name: it can only go on with what is open.
            return None if name or id_ or not self._calls else self._touched
        if name and (self._starts_anew(candidate, name) or (id_ and candidate.id)):
            return None
        return candidate

    def _by_index(self, index: int | None, id_: str) -> RawCall | None:
        return self._last(lambda call: call.id == id_ and call.index == index)

    def _starts_anew(self, call: RawCall, name: str) -> bool:
        """Whether `name` begins another call rather than repeating or going on with the name of `call`."""
        if not call.name:
            return False
        if call.name == name:
            return call.complete
        return bool(call.arguments) or call.name in self._tool_names or call.name + name not in self._tool_names

    def _last(self, matches: Callable[[RawCall], bool]) -> RawCall | None:
        return next((call for call in reversed(self._calls) if matches(call)), None)


def assemble(chunks: Iterable[Any], tool_names: Collection[str] = ()) -> Completion:
    """All chunks at once; an answer that was not streamed is one chunk."""
    assembler = Assembler(tool_names)
    for chunk in chunks:
        assembler.feed(chunk)
    return assembler.completion()


def is_object(text: str) -> bool:
    """Whether `text` is one complete JSON object."""
    body = text.strip()
    if not (body.startswith("{") and body.endswith("}")) or too_deep(body):
        return False
    try:
        return isinstance(json.loads(body, strict=False), dict)
    except (ValueError, RecursionError):
        return False


def _first_choice(choices: Any) -> Mapping[str, Any]:
    """The choice with index 0, or the first without an index; we never ask for more than one."""
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, Mapping) and choice.get("index") in (0, None):
            return choice
    return {}


def _text_of(content: Any) -> str:
    """Content as text, or as a list of parts of which some are text."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else ()
    return "".join(p["text"] for p in parts if isinstance(p, Mapping) and isinstance(p.get("text"), str))


def _merge(into: dict[str, Any], key: str, value: Any) -> int:
    """Join a provider's own field across chunks; returns the characters it brought."""
    if value is None or value in ("", []):
        return 0
    old = into.get(key)
    if isinstance(old, str) and isinstance(value, str):
        into[key] = old + value
    elif isinstance(old, list) and isinstance(value, list):
        into[key] = [*old, *value]
    elif isinstance(old, dict) and isinstance(value, Mapping):
        into[key] = {**old, **value}
    else:
        into[key] = value
    return len(value) if isinstance(value, str) else len(json.dumps(value, default=str))
