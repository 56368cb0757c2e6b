"""Characters that a person does not see and a model reads: a way to put orders into a description that was looked at."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

_USUAL = frozenset("\n\t\r")
_JOINER, _EMOJI_STYLE = "\u200d", "\ufe0f"
_FAR_AWAY = re.compile(r"[ \t]{60,}\S|\n{12,}")
_ORDERS = re.compile(
    r"<\s*(important|system|secret|instructions?)\s*>|ignore (all |any )?(previous|prior|other) (instructions|tools)|"
    r"(do not|don't|never) (tell|mention|inform|reveal)[^.]{0,40}\buser|before (using|calling) (this|any)[^.]{0,40}\b(read|send|call)\b",
    re.IGNORECASE,
)


def hidden_characters(text: str) -> list[str]:
    """Those that can't be seen, each once, as `U+200B`; joined emoji are left alone."""
    found: dict[str, None] = {}
    for at, sign in enumerate(text):
        if sign in _USUAL or (sign.isascii() and sign.isprintable()):
            continue
        if sign in (_JOINER, _EMOJI_STYLE) and at and unicodedata.category(text[at - 1]) in ("So", "Sk", "Mn", "Po"):
            continue
        if unicodedata.category(sign) in ("Cc", "Cf", "Co", "Cs", "Cn", "Zl", "Zp"):
            found[f"U+{ord(sign):04X}"] = None
    return list(found)


def escaped(text: str) -> str:
    """The text with what can't be seen written out, and so safe for a terminal."""
    return "".join(sign if sign in "\n\t" or not hidden_characters(sign) else f"\\u{{{ord(sign):X}}}" for sign in text)


def texts(value: Any) -> list[str]:
    """All texts in a JSON value, names included. Without recursion: the value comes from an image."""
    found: list[str] = []
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, str):
            found.append(one)
        elif isinstance(one, dict):
            found += [str(name) for name in one]
            pending.extend(one.values())
        elif isinstance(one, list):
            pending.extend(one)
    return found


def suspicions(text: str) -> list[str]:
    """What in a text that can be seen reads as if it were meant for a model and not for a person. Never more than a hint."""
    told = []
    if (order := _ORDERS.search(text)) is not None:
        told.append(f"it gives orders: {escaped(order[0])[:80]!r}")
    if _FAR_AWAY.search(text):
        told.append("it moves text out of sight with blanks")
    return told
