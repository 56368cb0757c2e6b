"""The chain that makes a journal tell-tale: each event's hash covers the one before and its own canonical JSON."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from typing import Any

from agent.errors import JournalBroken
from agent.events import Event, EventKind

GENESIS = "0" * 64


def canonical(value: Any) -> str:
    """One text for one value: sorted keys, no spaces, ASCII. Infinities and NaN, which JSON has not, become null."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def seal(
    run_id: str, seq: int, at: float, kind: EventKind, data: dict[str, Any], *, prev_hash: str
) -> tuple[Event, str]:
    """The event and its data as canonical JSON. `data` is copied, as it will be read back."""
    text = canonical(data)
    return Event(
        run_id, seq, at, kind, json.loads(text), prev_hash, _digest([run_id, seq, at, str(kind)], text, prev_hash)
    ), text


def _digest(head: list[Any], text: str, prev_hash: str) -> str:
    return hashlib.sha256(f"{prev_hash}\n{canonical(head)}\n{text}".encode()).hexdigest()


def verified(events: Iterable[Event]) -> Iterator[Event]:
    """The events, each checked as it passes. Raises JournalBroken at the first that does not fit."""
    expected = GENESIS
    for seq, event in enumerate(events, start=1):
        head = [event.run_id, event.seq, event.at, str(event.kind)]
        digest = _digest(head, canonical(event.data), event.prev_hash)
        if event.seq != seq or event.prev_hash != expected or event.hash != digest:
            raise JournalBroken(
                f"the journal of run {event.run_id} was changed or is damaged at event {seq}: its hash chain does not fit. "
                "Restore the store from a copy, or start the goal again with `agent run`."
            )
        expected = event.hash
        yield event
