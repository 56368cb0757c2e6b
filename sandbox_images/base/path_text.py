r"""File names as text that always can be said and always finds the file again.

The kernel's names are bytes, JSON's texts are not. A byte that is no UTF-8 is spelled `\xNN`, with small letters; a
backslash before something that would be read as such is spelled `\x5c`. All other names are spelled as they are.
"""

from __future__ import annotations

import codecs
import os
import re

_MEANT = re.compile(r"\\x(5c|[89a-f][0-9a-f])")
_TO_SPELL = re.compile(r"[\udc80-\udcff]|\\(?=x(?:5c|[89a-f][0-9a-f]))")
ERRORS = "toolcrib.spelled"  # an error handler for `encode`: what is no Unicode text is spelled, or replaced


def spell(path: str) -> str:
    """A path as Python's os functions have it, for a message."""
    return _TO_SPELL.sub(_spelled, path)


def read(text: str) -> str:
    """A path out of a message, for Python's os functions."""
    if "\\x" not in text:
        return text
    return os.fsdecode(os.fsencode(_MEANT.sub(_byte, text)))


def _spelled(found: re.Match[str]) -> str:
    return "\\x5c" if found[0] == "\\" else f"\\x{ord(found[0]) - 0xDC00:02x}"


def _byte(found: re.Match[str]) -> str:
    return "\\" if found[1] == "5c" else chr(0xDC00 + int(found[1], 16))


def _in_json(problem: UnicodeError) -> tuple[str, int]:
    if not isinstance(problem, UnicodeEncodeError):
        raise problem
    kept = (ord(character) - 0xDC00 for character in problem.object[problem.start : problem.end])
    return "".join(f"\\\\x{byte:02x}" if 0x80 <= byte <= 0xFF else "?" for byte in kept), problem.end


codecs.register_error(ERRORS, _in_json)
