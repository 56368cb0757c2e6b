"""From what a model wrote to a JSON value: strict first, then repairs that lose nothing, then a problem to tell the model.

Lossless repairs, and nothing else: code fences around the value, raw control characters inside strings, a comma before a
closing bracket, single quotes, Python's True, False and None, and a JSON text encoded once more as a string. A missing
bracket, a bare key or cut text is never guessed. Every path is linear in the length of the text and bounded in depth.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any, NoReturn

MAX_CHARS = 4_000_000
MAX_DEPTH = 100
_MAX_ENCODINGS = 2

_FENCE = re.compile(r"\A```[A-Za-z0-9_+-]*[ \t]*\n(.*?)\n?```\Z", re.DOTALL)
# A string that never closes matches up to the end of the text: each character is read once, whatever comes.
_SCAN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|[\[{]|[\]}]', re.DOTALL)
_TOKEN = re.compile(
    r"""\s+|"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|'[^'\\]*(?:\\.[^'\\]*)*(?:'|\\?\Z)"""
    r"""|[{}\[\],:]|[A-Za-z_]+|-?\d[0-9eE.+-]*|.""",
    re.DOTALL,
)
_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}


@dataclass(frozen=True)
class JsonValue:
    """A value, and the names of the repairs that led to it (empty: it was strict JSON)."""

    value: Any
    repairs: tuple[str, ...] = ()


@dataclass(frozen=True)
class JsonProblem:
    """Why the text is no JSON, in words that help a model to write it again."""

    message: str


def parse_arguments(text: str) -> JsonValue | JsonProblem:
    """The arguments of a call, always an object. Empty text and `null` mean no arguments."""
    if text.strip() in ("", "null", "None"):
        return JsonValue({})
    parsed = parse_json(text)
    if isinstance(parsed, JsonProblem):
        return parsed
    if parsed.value is None:
        return JsonValue({}, parsed.repairs)
    if not isinstance(parsed.value, dict):
        return JsonProblem(f"The arguments must be a JSON object, not {_kind(parsed.value)}.")
    return parsed


def parse_json(text: str) -> JsonValue | JsonProblem:
    """Any JSON value but a bare string that holds JSON, which is decoded as what it holds."""
    if len(text) > MAX_CHARS:
        return JsonProblem(f"The JSON is {len(text):,} characters long; the limit is {MAX_CHARS:,}.")
    repairs: list[str] = []
    parsed = _parse_once(text, repairs)
    for _ in range(_MAX_ENCODINGS):
        if isinstance(parsed, JsonProblem):
            return parsed
        if not (isinstance(parsed.value, str) and parsed.value.lstrip()[:1] in ("{", "[", '"')):
            break
        repairs.append("double-encoded")
        parsed = _parse_once(parsed.value, repairs)
    return parsed if isinstance(parsed, JsonProblem) else JsonValue(parsed.value, tuple(dict.fromkeys(repairs)))


def _parse_once(text: str, repairs: list[str]) -> JsonValue | JsonProblem:
    body = text.strip().removeprefix("\ufeff")
    if fenced := _FENCE.match(body):
        repairs.append("code fence")
        body = fenced.group(1).strip()
    if not body:
        return JsonProblem("The JSON is empty.")
    if too_deep(body):
        return JsonProblem(f"The JSON is nested more than {MAX_DEPTH} levels deep.")
    try:
        return JsonValue(_loads(body, strict=True))
    except ValueError as problem:
        first = problem
    rewritten = _rewrite(body, repairs)
    try:
        return JsonValue(_loads(rewritten if rewritten is not None else body, strict=False))
    except ValueError:
        return JsonProblem(f"This is no valid JSON: {first}.{_near(body, first)}")
    except RecursionError:  # quotes that the scan above reads otherwise can hide depth
        return JsonProblem(f"The JSON is nested more than {MAX_DEPTH} levels deep.")


def too_deep(text: str, limit: int = MAX_DEPTH) -> bool:
    """Whether brackets outside of strings nest deeper than `limit`."""
    depth = 0
    for token in _SCAN.finditer(text):
        mark = text[token.start()]
        if mark in "[{":
            depth += 1
            if depth > limit:
                return True
        elif mark in "]}":
            depth -= 1
    return False


def _loads(text: str, *, strict: bool) -> Any:
    return json.loads(
        text, strict=strict, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_no_conflict
    )


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text[:40]} is too large")
    return number


def _no_conflict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: dict[str, Any] = {}
        for key, item in pairs:
            if key in seen and seen[key] != item:
                raise ValueError(f"the key {key[:80]!r} stands twice with different values")
            seen[key] = item
    return value


def _rewrite(text: str, repairs: list[str]) -> str | None:
    """The same value in strict JSON but for control characters, or None when a token is not known for certain."""
    out: list[str] = []
    last_comma = -1  # where in `out` a comma waits for the next value
    for match in _TOKEN.finditer(text):
        token, head = match.group(), text[match.start()]
        if token.isspace():
            continue
        if head == "'":
            if len(token) < 2 or token[-1] != "'":
                return None
            token = '"' + _swap_quotes(token[1:-1]) + '"'
            repairs.append("single quotes")
        elif head.isalpha() or head == "_":
            if token not in _PYTHON_LITERALS:
                return None
            if token[0].isupper():
                repairs.append("Python literal")
            token = _PYTHON_LITERALS[token]
        elif token in ("}", "]"):
            if last_comma == len(out) - 1 and last_comma > 0 and out[last_comma - 1] not in "[{,:":
                out.pop()
                repairs.append("trailing comma")
        elif head == ",":
            last_comma = len(out)
        elif len(token) == 1 and head not in "{[:0123456789":
            return None
        elif head == '"' and any(char < " " for char in token):
            repairs.append("control characters")
        out.append(token)
    return "".join(out)


def _swap_quotes(inner: str) -> str:
    """The inside of a single-quoted string as the inside of a double-quoted one. Unknown escapes stay, and fail to parse."""
    return re.sub(r"\\'|\\.|\"", lambda m: {"\\'": "'", '"': '\\"'}.get(m.group(), m.group()), inner, flags=re.DOTALL)


def _near(text: str, problem: ValueError) -> str:
    if not isinstance(problem, json.JSONDecodeError):
        return ""
    return f" The text there: {text[max(0, problem.pos - 30) : problem.pos + 30]!r}"


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)
