"""JSON as the contract takes it: what Python's reader lets through, or chokes on, is refused with its place.

NaN and the infinities, numbers beyond a double, integers of absurd length, names that occur twice, lone surrogates, deep
nesting and bytes that are not UTF-8 are all the caller's mistakes (422), all of them told at once where they can be.
"""

from __future__ import annotations

import json
import math
from typing import Any

from toolserver.errors import invalid, invalid_all

MAX_DEPTH = 100
_MAX_ERRORS = 50
_MAX_DIGITS = 308  # of an integer: what a double can hold


class _Bad:
    """Stands where a value can't be taken, until its place is known."""

    def __init__(self, message: str) -> None:
        self.message = message


class _Reader:
    def __init__(self) -> None:
        self.bad = False

    def read(self, text: str) -> Any:
        return json.loads(
            text,
            object_pairs_hook=self._object,
            parse_constant=self._constant,
            parse_float=self._float,
            parse_int=self._int,
        )

    def _mark(self, message: str) -> _Bad:
        self.bad = True
        return _Bad(message)

    def _constant(self, name: str) -> _Bad:
        return self._mark(f"{name} is no JSON number")

    def _float(self, digits: str) -> float | _Bad:
        value = float(digits)
        return value if math.isfinite(value) else self._mark("the number is too large")

    def _int(self, digits: str) -> int | _Bad:
        return int(digits) if len(digits) <= _MAX_DIGITS else self._mark("the number has too many digits")

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            seen: set[str] = set()
            for name, _ in pairs:
                if name in seen:
                    value[name] = self._mark("the name occurs twice")
                seen.add(name)
        return value


def read_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in a request body; an empty body is an empty object. Raises invalid_arguments."""
    if not raw.strip():
        return {}
    value = read_value(raw)
    if not isinstance(value, dict):
        raise invalid("", "the body must be a JSON object")
    return value


def read_value(raw: bytes) -> Any:
    """The JSON value in a request body. Raises invalid_arguments."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise invalid("", f"the body is not UTF-8 (byte {problem.start})") from problem
    reader = _Reader()
    try:
        value = reader.read(text)
    except json.JSONDecodeError as problem:
        raise invalid("", f"the body is not JSON: {problem.msg} at character {problem.pos}") from problem
    except RecursionError as problem:
        raise invalid("", f"the body is nested more than {MAX_DEPTH} levels deep") from problem
    suspicious = reader.bad or "\\u" in text or text.count("[") + text.count("{") > MAX_DEPTH
    if suspicious and (errors := _errors(value)):
        raise invalid_all(errors)
    return value


def _errors(value: Any) -> list[dict[str, str]]:
    """All that is wrong below `value`, with pointers; without recursion, since depth is one of the things."""
    errors: list[dict[str, str]] = []
    waiting: list[tuple[str, int, Any]] = [("", 0, value)]
    while waiting and len(errors) < _MAX_ERRORS:
        pointer, depth, item = waiting.pop()
        message = _problem(item, depth)
        if message is not None:
            errors.append({"pointer": pointer, "message": message})
        elif isinstance(item, dict):
            for name, inner in reversed(item.items()):
                if _has_surrogate(name):
                    errors.append({"pointer": pointer, "message": "a name has a lone surrogate"})
                else:
                    waiting.append((pointer + "/" + escape(name), depth + 1, inner))
        elif isinstance(item, list):
            waiting += [(f"{pointer}/{place}", depth + 1, inner) for place, inner in reversed(list(enumerate(item)))]
    return errors


def _problem(item: Any, depth: int) -> str | None:
    if isinstance(item, _Bad):
        return item.message
    if isinstance(item, str):
        return "the text has a lone surrogate" if _has_surrogate(item) else None
    if depth > MAX_DEPTH and isinstance(item, dict | list):
        return f"nested more than {MAX_DEPTH} levels deep"
    return None


def _has_surrogate(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text)


def escape(name: str) -> str:
    """A name as one part of a JSON Pointer."""
    return name.replace("~", "~0").replace("/", "~1")[:200]
