"""The conversation of one attempt, as much of it as fits: the newest exchanges whole, older ones clipped, then left out.

What is dropped here is dropped from the prompt alone; the journal keeps all of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

from agent.llm.model import Message, ToolCall
from agent.trajectory.printable import clip

LEVELS = 4
_WHOLE = 3  # newest exchanges that level 1 leaves as they are
_SAID = 2000  # characters of a thought, of the arguments of a call and of a provider's field that are always kept


@dataclass(frozen=True)
class Exchange:
    """What the model said and what it got back: an answer to each call, or a remark of ours when it called nothing."""

    said: Message | None
    back: tuple[Message, ...]

    def clipped(self, limit: int) -> Exchange:
        """With at most `limit` characters of each answer, and a bounded share of what the model said itself."""
        said = None if self.said is None else _said_less(self.said, max(limit, _SAID))
        return replace(self, said=said, back=tuple(replace(m, content=clip(m.content, limit)) for m in self.back))


@dataclass
class Transcript:
    exchanges: list[Exchange] = field(default_factory=list)

    def add(self, said: Message | None, *back: Message) -> None:
        self.exchanges.append(Exchange(said, back))

    def messages(self, level: int) -> tuple[Message, ...]:
        """Level 0 is everything. 1 clips older answers, 2 all answers, 3 keeps two exchanges and says how many went before."""
        kept, note = self.exchanges, None
        if level == 1:
            old = max(0, len(kept) - _WHOLE)
            kept = [e.clipped(600) if place < old else e for place, e in enumerate(kept)]
        elif level == 2:
            old = max(0, len(kept) - 1)
            kept = [e.clipped(200 if place < old else 2000) for place, e in enumerate(kept)]
        elif level >= 3:
            gone = kept[:-2]
            kept = [e.clipped(800) for e in kept[-2:]]
            if gone:
                note = Message(
                    "user", f"({len(gone)} earlier exchanges no longer fit and are left out: {_names(gone)}.)"
                )
        flat = [m for e in kept for m in (*((e.said,) if e.said else ()), *e.back)]
        return (note, *flat) if note else tuple(flat)


def _said_less(said: Message, limit: int) -> Message:
    calls = tuple(replace(call, arguments=_arguments_less(call, limit)) for call in said.tool_calls)
    return replace(said, content=clip(said.content, limit), tool_calls=calls, extra=_texts_less(said.extra, limit))


def _arguments_less(call: ToolCall, limit: int) -> str:
    """Still a JSON object: several servers read the arguments of past calls."""
    if len(call.arguments) <= limit:
        return call.arguments
    return json.dumps({"left_out": f"{len(call.arguments)} characters of arguments", "start": call.arguments[:200]})


def _texts_less(value: Any, limit: int) -> Any:
    if isinstance(value, str):
        return clip(value, limit)
    if isinstance(value, dict):
        return {name: _texts_less(item, limit) for name, item in value.items()}
    return [_texts_less(item, limit) for item in value] if isinstance(value, list | tuple) else value


def _names(exchanges: list[Exchange]) -> str:
    calls = [call.name for e in exchanges if e.said for call in e.said.tool_calls]
    counted = [f"{name} ({calls.count(name)} times)" for name in dict.fromkeys(calls)]
    return f"called {', '.join(counted)}" if counted else "nothing was called"
