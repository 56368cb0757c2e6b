"""JSON Schemas of tools: judged when they are loaded, compiled once, and safe to run on hostile arguments.

Draft 2020-12, or draft 7 when `$schema` says so. Nothing is ever fetched: a reference has to point into its own schema.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from jsonschema import Draft7Validator, Draft202012Validator, SchemaError, validators
from jsonschema.protocols import Validator
from referencing.jsonschema import EMPTY_REGISTRY

from toolserver.catalog.keywords import KEYWORDS
from toolserver.catalog.schema_graph import graph_problem

MAX_SCHEMA_NODES = 20_000
MAX_SCHEMA_DEPTH = 60
_REMEMBERED_CHARS = 16_384

_extend: Any = validators.extend
_CHECKERS: dict[str, Any] = {
    "2020-12": _extend(Draft202012Validator, KEYWORDS),
    "draft-07": _extend(Draft7Validator, KEYWORDS),
}


def schema_problem(schema: Any) -> str | None:
    """Why `schema` can't be used to check arguments, in a sentence; None when it can."""
    if not isinstance(schema, dict):
        return "the schema is not an object"
    problem = _size_problem(schema)
    if problem is not None:
        return problem
    text = json.dumps(schema, default=repr)
    return _judged(text) if len(text) <= _REMEMBERED_CHARS else _judge(schema)


@lru_cache(maxsize=1024)
def _judged(text: str) -> str | None:
    """As `_judge`: the same schemas are read again with each look at the catalog."""
    return _judge(json.loads(text))


def _judge(schema: dict[str, Any]) -> str | None:
    draft = _draft(schema)
    if draft is None:
        return f"its $schema {_short(schema.get('$schema'))} is not one that is known: use draft 2020-12 or draft 7"
    try:
        _CHECKERS[draft].check_schema(schema)
    except SchemaError as error:
        place = "/".join(str(part) for part in error.absolute_path)
        return f"it is not valid JSON Schema at /{_short(place, 120)}: {_short(error.message, 200)}"
    except RecursionError:
        return "it is nested too deeply"
    return graph_problem(schema)


def compile_schema(schema: dict[str, Any]) -> Validator:
    """The validator of a schema for which `schema_problem` found nothing. Share it: it holds no state of a check."""
    checker = _CHECKERS[_draft(schema) or "2020-12"]
    compiled: Validator = checker(schema, registry=EMPTY_REGISTRY)  # which fetches nothing
    return compiled


def _draft(schema: dict[str, Any]) -> str | None:
    named = schema.get("$schema", "2020-12")
    if not isinstance(named, str):
        return None
    return next((draft for draft in _CHECKERS if draft in named), None)


def _size_problem(schema: dict[str, Any]) -> str | None:
    """Bounds size and depth without recursion, so that what follows may recurse."""
    pending: list[tuple[Any, int]] = [(schema, 1)]
    nodes = 0
    while pending:
        value, depth = pending.pop()
        nodes += 1
        if nodes > MAX_SCHEMA_NODES:
            return f"it has more than {MAX_SCHEMA_NODES} parts"
        if depth > MAX_SCHEMA_DEPTH:
            return f"it is nested more than {MAX_SCHEMA_DEPTH} levels deep"
        if isinstance(value, dict):
            pending.extend((item, depth + 1) for item in value.values())
        elif isinstance(value, list):
            pending.extend((item, depth + 1) for item in value)
    return None


def _short(value: Any, limit: int = 80) -> str:
    text = str(value)
    return text if len(text) <= limit else text[:limit] + "…"
