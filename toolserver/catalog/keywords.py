"""Keywords of JSON Schema that the library runs without bound, written so that a check ends.

A check has a time budget. It is looked at where work can multiply: at each reference and at each pattern. What is left
is bounded by the size of the schema and of the arguments, both of which are bounded.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from jsonschema.exceptions import ValidationError

from toolserver.catalog.patterns import text_limit

deadline: ContextVar[float] = ContextVar("deadline")  # time.monotonic() at which the running check gives up


class CheckTooLong(Exception):  # noqa: N818 - reads as what it names
    """The check used up its time."""


def _tick() -> None:
    if time.monotonic() > deadline.get():
        raise CheckTooLong


def _reference(validator: Any, reference: str, instance: Any, _schema: Any) -> Iterator[ValidationError]:
    _tick()
    yield from validator._validate_reference(ref=reference, instance=instance)  # noqa: SLF001 - as the library's own keyword does


def _pattern(_validator: Any, pattern: str, instance: Any, _schema: Any) -> Iterator[ValidationError]:
    if not isinstance(instance, str):
        return
    _tick()
    limit = text_limit(pattern)
    if len(instance) > limit:
        yield ValidationError(f"is longer than the {limit} characters that can be matched against its pattern")
    elif not re.search(pattern, instance):
        yield ValidationError("pattern")


def _pattern_properties(
    validator: Any, patterns: dict[str, Any], instance: Any, _schema: Any
) -> Iterator[ValidationError]:
    if not isinstance(instance, dict):
        return
    for pattern, part in patterns.items():
        for name, value in instance.items():
            _tick()
            if len(name) <= text_limit(pattern) and re.search(pattern, name):
                yield from validator.descend(value, part, path=name, schema_path=pattern)


def _additional_properties(validator: Any, allowed: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if not isinstance(instance, dict):
        return
    for name in extra_names(instance, schema):
        if allowed is False:
            error = ValidationError("additionalProperties")
            error.path.append(name)
            yield error
        elif isinstance(allowed, dict):
            yield from validator.descend(instance[name], allowed, path=name)


def extra_names(instance: dict[str, Any], schema: dict[str, Any]) -> Iterator[str]:
    """The names that neither `properties` nor `patternProperties` cover."""
    known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for name in instance:
        if name in known:
            continue
        if patterns:
            _tick()
            if any(len(name) <= text_limit(pattern) and re.search(pattern, name) for pattern in patterns):
                continue
        yield name


def _unique_items(_validator: Any, wanted: Any, instance: Any, _schema: Any) -> Iterator[ValidationError]:
    if not wanted or not isinstance(instance, list):
        return
    seen: dict[Any, int] = {}
    for index, item in enumerate(instance):
        first = seen.setdefault(_identity(item), index)
        if first != index:
            yield ValidationError(f"items {first} and {index} are equal, but all must differ")
            return


def _identity(value: Any) -> Any:
    """Equal for values that JSON Schema calls equal (1 and 1.0), and for no others (1 and true); hashable."""
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, list):
        return ("list", tuple(_identity(item) for item in value))
    if isinstance(value, dict):
        return ("dict", frozenset((name, _identity(item)) for name, item in value.items()))
    return value


KEYWORDS: dict[str, Callable[[Any, Any, Any, Any], Iterator[ValidationError]]] = {
    "$ref": _reference,
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "uniqueItems": _unique_items,
}
