"""Finds tools by words: for a model that looks for one, and for names that nearly fit. Lexical, no index: catalogs are small."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from difflib import SequenceMatcher

from toolserver.catalog.image import Tool

MAX_QUERY_CHARS = 1_000
MAX_QUERY_WORDS = 40
MAX_RESULTS = 50
NAME_WEIGHT = 3.0

_WORD = re.compile(r"[^\W_]+")
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_EMPTY_WORDS = frozenset(
    ("a", "an", "and", "are", "as", "at", "be", "by", "can", "do", "for", "from", "how", "i", "in", "into", "is", "it", "me", "my", "of", "on",
     "or", "please", "that", "the", "this", "to", "use", "want", "what", "which", "with", "you")
)  # fmt: skip


def rank(tools: Iterable[Tool], query: str, k: int) -> list[Tool]:
    """At most `k` tools that share words with `query`, best first. Takes any text; k is bounded to MAX_RESULTS."""
    wanted = list(dict.fromkeys(_words(query[:MAX_QUERY_CHARS])))[:MAX_QUERY_WORDS]
    texts = [(tool, Counter(_words(tool.name)), Counter(_words(tool.description))) for tool in tools]
    rarity = {
        word: math.log(1 + len(texts) / (1 + sum(_has(name, word) or _has(text, word) for _, name, text in texts)))
        for word in wanted
    }
    scored = []
    for tool, name, text in texts:
        score = sum(rarity[word] * (NAME_WEIGHT * _weight(name, word) + _weight(text, word)) for word in wanted)
        if score > 0:
            scored.append((-score, tool.name, tool))
    scored.sort(key=lambda item: item[:2])
    return [tool for _, _, tool in scored[: max(0, min(k, MAX_RESULTS))]]


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


def _has(words: Counter[str], word: str) -> bool:
    return _weight(words, word) > 0


def _weight(words: Counter[str], word: str) -> float:
    if word in words:
        return 1 + math.log(words[word])
    if len(word) >= 4 and any(
        known.startswith(word) or (len(known) >= 4 and word.startswith(known)) for known in words
    ):
        return 0.5
    return 0.0


def _words(text: str) -> list[str]:
    return [_stem(word) for word in _WORD.findall(_HUMP.sub(" ", text).lower()) if word not in _EMPTY_WORDS]


def _stem(word: str) -> str:
    """Cuts the commonest English endings: enough that "running shells" finds "run a shell"."""
    for ending in ("ing", "ies", "ed", "es", "s"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            stem = word[: -len(ending)]
            return stem[:-1] if ending in ("ing", "ed") and stem[-1] == stem[-2] else stem
    return word[:-1] if word.endswith("e") and len(word) > 4 else word
