"""Text of tools made safe and short for a model: no terminal controls, no hidden direction marks, head and tail of what is long."""

from __future__ import annotations

import re
import unicodedata

_ESCAPES = re.compile(
    r"\x1b\][^\x07\x1b\x9c\n]{0,2048}(?:\x07|\x1b\\|\x9c)"  # OSC: titles, links; one without an end hides nothing
    r"|\x1b[PX^_][^\x1b\x9c\n]{0,2048}(?:\x1b\\|\x9c)"  # DCS, SOS, PM, APC
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # CSI: colours, cursor
    r"|\x1b[ -/]*[0-~]?"
)
_HIDDEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_TAIL_SHARE = 0.4


def clean(text: str) -> str:
    """Escape sequences are dropped, other controls and direction marks shown by number; a progress bar keeps its last state."""
    text = _ESCAPES.sub("", text).replace("\r\n", "\n")
    if "\r" in text:
        text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return _HIDDEN.sub(_shown, text.encode("utf-8", "replace").decode())


def cut(text: str, max_chars: int, where: str = "") -> str:
    """At most `max_chars`: head, a marker that says how much is left out (and `where` the whole is), tail."""
    if len(text) <= max_chars:
        return text
    marker = f"\n[… {len(text):,} characters in all, the middle is left out{where} …]\n"
    room = max_chars - len(marker)
    if room < 2:
        return text[:max_chars]
    tail = int(room * _TAIL_SHARE)
    return text[: room - tail] + marker + text[len(text) - tail :]


def size(count: int) -> str:
    """Bytes for people: 512 bytes, 1.5 KiB, 20.0 MiB."""
    if count < 1024:
        return f"{count} bytes"
    return f"{count / 1024:.1f} KiB" if count < 1 << 20 else f"{count / (1 << 20):.1f} MiB"


def _shown(found: re.Match[str]) -> str:
    char = found.group()
    if unicodedata.category(char) == "Cc" and ord(char) < 0x20:
        return chr(0x2400 + ord(char))  # the picture of the control character
    return f"<U+{ord(char):04X}>"
