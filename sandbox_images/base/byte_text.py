"""Bytes that programs wrote, as text: never a broken character, never an error."""

from __future__ import annotations

CONTINUATION = range(0x80, 0xC0)  # of UTF-8: no character begins with one


def whole_text(data: bytes, *, at_end: bool) -> bytes:
    """Without the broken character that cutting has left at one end."""
    if at_end:
        for back in range(1, min(4, len(data)) + 1):
            byte = data[-back]
            if byte >= 0xC0:
                needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
                return data[:-back] if needed > back else data
            if byte < 0x80:
                break
        return data
    for skip in range(min(4, len(data))):
        if data[skip] not in CONTINUATION:
            return data[skip:]
    return data


def readable(data: bytes) -> tuple[str, bool]:
    r"""The text of bytes, and whether it says them exactly. Bytes that are no UTF-8, and NUL, become \xNN."""
    try:
        text, exact = data.decode(), True
    except UnicodeDecodeError:
        text, exact = data.decode("utf-8", "backslashreplace"), False
    if "\x00" in text:
        text, exact = text.replace("\x00", "\\x00"), False
    return text, exact
