"""Names that nearly fit: for a model that asked for a tool that is not there."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher

_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def nearest(names: Iterable[str], wrong: str, limit: int = 5) -> list[str]:
    """The names that `wrong` may have been meant for, nearest first; none when nothing is near."""
    asked = _plain(wrong[:128])
    scored = [(-_likeness(asked, _plain(name)), name) for name in names]
    return [name for score, name in sorted(scored) if score <= -0.6][:limit]


def _likeness(asked: str, name: str) -> float:
    """1 for the same, 0 for nothing in common. A part that fits well counts nearly as much as the whole."""
    whole = SequenceMatcher(None, asked, name).ratio()
    parts = [SequenceMatcher(None, asked, part).ratio() for part in name.split("_")]
    shared = set(asked.split("_")) & set(name.split("_"))
    return max(whole, 0.9 * max(parts), 0.75 if shared else 0.0)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", _HUMP.sub("_", name).lower()).strip("_")
