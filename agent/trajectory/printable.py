"""Text that came from a tool or a model, made safe to show: no terminal escapes, no control characters."""

from __future__ import annotations

import re

_ESCAPES = re.compile(
    r"\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)?"  # OSC: titles, links
    r"|\x1b[PX^_][^\x1b\n]*(?:\x1b\\)?"  # DCS, SOS, PM, APC
    r"|\x9b[0-?]*[ -/]*[@-~]|\x1b\[[0-?]*[ -/]*[@-~]|\x1b[ -/]*[0-~]"  # CSI and shorter escapes
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """`text` without ANSI escapes, control characters (line feed and tab stay) and marks that turn the direction of writing."""
    return _CONTROLS.sub("", _ESCAPES.sub("", text.replace("\r\n", "\n").replace("\r", "\n")))


def clip(text: str, limit: int) -> str:
    """Head and tail of `text` around a mark that says how much is left out; at most `limit` characters and the mark."""
    if len(text) <= limit:
        return text
    head = limit * 2 // 3
    tail = limit - head
    return (
        f"{text[:head]}\n[... {len(text) - limit} characters left out ...]\n{text[len(text) - tail :] if tail else ''}"
    )
