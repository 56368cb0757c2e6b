"""What a call's arguments may look like: all that is wrong with them, at once.

The answer is for a model that will try again: each error has the JSON Pointer (RFC 6901) of the value at fault and says
what was wanted. Errors never repeat the arguments at length.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from itertools import islice
from typing import Any

from jsonschema.exceptions import ValidationError
from jsonschema.protocols import Validator

from toolserver.catalog.image import Tool
from toolserver.catalog.keywords import CheckTooLong, deadline

MAX_ERRORS = 100
MAX_DEPTH = 64
MAX_NAME_CHARS = 1_000
MAX_CHECK_S = 0.5
_LARGEST = 1.7e308  # past it an integer is no JSON number that other programs can read

Errors = list[dict[str, str]]


def check(tool: Tool, arguments: Any) -> Errors:
    """Everything wrong with `arguments` for `tool`, as `{"pointer", "message"}`; empty when they may be sent to it.

    Takes any value, never raises for one, and gives up on arguments that can't be checked within MAX_CHECK_S.
    """
    if not isinstance(arguments, dict):
        return [{"pointer": "", "message": f"must be an object of named arguments, not {_kind(arguments)}"}]
    return _value_problems(arguments) or _checked(tool.validator, arguments)


def output_errors(tool: Tool, result: dict[str, Any]) -> Errors:
    """Everything in an MCP result that its tool's output schema forbids; empty without such a schema."""
    if tool.output_validator is None:
        return []
    if "structuredContent" not in result:
        return [{"pointer": "", "message": "there is none, though the tool's output_schema promises one"}]
    return _checked(tool.output_validator, result["structuredContent"])


def _checked(validator: Validator, arguments: Any) -> Errors:
    mark = deadline.set(time.monotonic() + MAX_CHECK_S)
    try:
        found = list(islice(validator.iter_errors(arguments), MAX_ERRORS + 1))
        errors = [entry for error in found[:MAX_ERRORS] for entry in _entries(error)]
    except CheckTooLong:
        return [
            {
                "pointer": "",
                "message": "the arguments are too large to be checked; send less, or put the data into a file",
            }
        ]
    except RecursionError:
        return [{"pointer": "", "message": "the arguments are nested too deeply to be checked"}]
    finally:
        deadline.reset(mark)
    if len(found) > MAX_ERRORS:
        errors.append({"pointer": "", "message": f"there are more than these {MAX_ERRORS} errors"})
    return errors


def pointer(path: Iterable[str | int]) -> str:
    """The JSON Pointer of a path, clipped where a name is absurdly long."""
    return "".join("/" + _clip(str(part), 200).replace("~", "~0").replace("/", "~1") for part in path)


def _value_problems(arguments: dict[str, Any]) -> Errors:
    """What no schema sees: numbers and texts that JSON does not have, and depth. Without recursion."""
    problems: Errors = []
    pending: list[tuple[Any, tuple[str | int, ...]]] = [(arguments, ())]
    while pending and len(problems) < MAX_ERRORS:
        value, path = pending.pop()
        message = None
        if isinstance(value, str):
            message = (
                None if value.isascii() or _is_unicode(value) else "holds a lone surrogate, which is not Unicode text"
            )
        elif isinstance(value, float):
            message = None if math.isfinite(value) else "must be a finite number"
        elif isinstance(value, int):
            message = None if -_LARGEST < value < _LARGEST else "is too large a number"
        elif isinstance(value, dict):
            message = _name_problem(value)
            pending.extend((item, (*path, name)) for name, item in value.items())
        elif isinstance(value, list):
            pending.extend((item, (*path, index)) for index, item in enumerate(value))
        if len(path) > MAX_DEPTH:
            return [{"pointer": pointer(path[:8]), "message": f"is nested more than {MAX_DEPTH} levels deep"}]
        if message is not None:
            problems.append({"pointer": pointer(path), "message": message})
    return problems


def _name_problem(value: dict[str, Any]) -> str | None:
    for name in value:
        if len(name) > MAX_NAME_CHARS:
            return f"has a name of more than {MAX_NAME_CHARS} characters"
        if not name.isascii() and not _is_unicode(name):
            return "has a name with a lone surrogate, which is not Unicode text"
    return None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _entries(error: ValidationError) -> Errors:
    return [{"pointer": pointer(error.absolute_path), "message": _message(error)}]


def _message(error: ValidationError) -> str:
    keyword: Any = error.validator
    wanted: Any = error.validator_value
    value = error.instance
    if keyword == "type":
        kinds = wanted if isinstance(wanted, list) else [wanted]
        return f"must be {' or '.join(_article(kind) for kind in kinds)}, not {_kind(value)}"
    if keyword == "required":
        missing = error.message.removesuffix(" is a required property")
        return f"needs {_clip(missing, 200)}, which is missing"
    if keyword == "additionalProperties":
        return _unknown_name(error)
    if keyword == "enum":
        return f"must be one of {_clip(', '.join(_json(option) for option in wanted), 300)}"
    if keyword == "const":
        return f"must be {_json(wanted)}"
    if keyword == "pattern":
        return (
            _clip(error.message, 200)
            if error.message != "pattern"
            else f"must match the pattern {_clip(str(wanted), 200)}"
        )
    if keyword in ("anyOf", "oneOf"):
        return _no_branch(error)
    if keyword is None:
        return "is not allowed"
    phrase = _PHRASES.get(str(keyword))
    return (
        phrase.format(_json(wanted))
        if phrase
        else _clip(
            error.message if keyword == "uniqueItems" else f"breaks the rule {keyword} of the tool's schema", 200
        )
    )


_PHRASES = {
    "minimum": "must be at least {}",
    "maximum": "must be at most {}",
    "exclusiveMinimum": "must be more than {}",
    "exclusiveMaximum": "must be less than {}",
    "multipleOf": "must be a multiple of {}",
    "minLength": "must have at least {} characters",
    "maxLength": "must have at most {} characters",
    "minItems": "must have at least {} items",
    "maxItems": "must have at most {} items",
    "minProperties": "must have at least {} members",
    "maxProperties": "must have at most {} members",
    "contains": "must contain an item that fits {}",
    "not": "must not fit {}",
    "dependentRequired": "needs other arguments beside those given: {}",
}


def _unknown_name(error: ValidationError) -> str:
    known = error.schema.get("properties", {}) if isinstance(error.schema, dict) else {}
    name = _clip(str(error.absolute_path[-1]), 100) if error.absolute_path else "?"
    hint = f"; known are {_clip(', '.join(known), 300)}" if known else ""
    return f"there is no argument {name!r}{hint}"


def _no_branch(error: ValidationError) -> str:
    reasons: list[str] = []
    for inner in error.context or ():
        reason = f"{pointer(inner.relative_path)} {_message(inner)}".strip()
        if reason not in reasons:
            reasons.append(reason)
        if len(reasons) == 4:
            break
    if not reasons:
        return "fits several of the allowed forms, but must fit exactly one"
    return _clip("fits none of the allowed forms: " + "; or ".join(reasons), 600)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    kinds = ((str, "a string"), (int, "an integer"), (float, "a number"), (list, "an array"), (dict, "an object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "no JSON value")


def _article(kind: str) -> str:
    return kind if kind == "null" else f"an {kind}" if kind[0] in "aio" else f"a {kind}"


def _json(value: Any) -> str:
    return _clip(repr(value) if not isinstance(value, str) else f'"{_clip(value, 80)}"', 120)


def _clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[:limit] + "…"
