"""The conversation of one attempt, as much of it as fits: the newest exchanges whole, older ones clipped, then left out.

What is dropped here is dropped from the prompt alone; the journal keeps all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from agent.llm.model import Message
from agent.trajectory.printable import clip

LEVELS = 4
_WHOLE = 3  # newest exchanges that level 1 leaves as they are


@dataclass(frozen=True)
class Exchange:
    """What the model said and what it got back: an answer to each call, or a remark of ours when it called nothing."""

    said: Message | None
    back: tuple[Message, ...]

    def clipped(self, limit: int) -> Exchange:
        return replace(self, back=tuple(replace(m, content=clip(m.content, limit)) for m in self.back))


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


def _names(exchanges: list[Exchange]) -> str:
    calls = [call.name for e in exchanges if e.said for call in e.said.tool_calls]
    counted = [f"{name} ({calls.count(name)} times)" for name in dict.fromkeys(calls)]
    return f"called {', '.join(counted)}" if counted else "nothing was called"
