"""Text of models and tools made safe to look at: nothing in it can steer a terminal or turn a line around."""

from __future__ import annotations

_KEPT = "\n\t"
_VISIBLE = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in _KEPT}
_VISIBLE |= {0x7F: "\u2421", **dict.fromkeys(range(0x80, 0xA0), "\ufffd")}  # DEL; the C1 controls, which terminals obey
_VISIBLE |= dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A)], "\ufffd")  # these turn a text's direction
_VISIBLE |= dict.fromkeys(range(0xD800, 0xE000), "\ufffd")  # half a character, not valid in UTF-8


def visible(text: str) -> str:
    """`text` with a sign in place of each control character. Line ends become newlines; all else stays as it is."""
    return text.replace("\r\n", "\n").translate(_VISIBLE)


def one_line(text: str, limit: int) -> str:
    """`visible(text)` on one line of at most `limit` characters."""
    line = " ".join(visible(text).split())
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


def clipped(text: str, limit: int) -> str:
    """`visible(text)`, or its head and tail around a line that says how much is left out."""
    if len(text) <= limit:
        return visible(text)
    head, tail = text[: limit * 2 // 3], text[-(limit // 3) :]
    left_out = len(text) - len(head) - len(tail)
    return f"{visible(head)}\n[… {left_out:,} characters left out here …]\n{visible(tail)}"
