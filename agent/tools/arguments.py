"""From the text a model wrote to arguments that the tool's schema accepts, or to what the model should be told."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from referencing import Registry
from referencing.exceptions import Unresolvable

from agent.llm.json_ladder import JsonProblem, parse_arguments
from agent.tools.outcome import ToolInfo
from agent.tools.text import cut

MAX_ERRORS = 10
MAX_SCHEMA_CHARS = 4_000
_MAX_MESSAGE_CHARS = 300


@dataclass(frozen=True)
class Arguments:
    value: dict[str, Any]
    repairs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refused:
    """`code` is invalid_json or invalid_arguments; `message` is for the model, with the schema."""

    code: str
    message: str


def read_arguments(text: str, tool: ToolInfo) -> Arguments | Refused:
    """Strict JSON or a lossless repair of it, checked against the live schema: nothing that was guessed ever runs."""
    parsed = parse_arguments(text)
    if isinstance(parsed, JsonProblem):
        return Refused(
            "invalid_json", f"The arguments of {tool.name} could not be read. {parsed.message}\n{_schema_of(tool)}"
        )
    if _has_surrogates(parsed.value):
        return Refused(
            "invalid_json",
            f"The arguments of {tool.name} hold half of a character (a lone surrogate such as \\ud800). Leave it out.",
        )
    errors = schema_errors(parsed.value, tool.input_schema)
    if errors:
        listed = "\n".join(f"- {error}" for error in errors)
        return Refused(
            "invalid_arguments", f"The arguments of {tool.name} do not match its schema:\n{listed}\n{_schema_of(tool)}"
        )
    return Arguments(parsed.value, parsed.repairs)


def schema_errors(value: Any, schema: dict[str, Any]) -> list[str]:
    """Each error as `/pointer: message`, at most MAX_ERRORS.

    A schema that can't be used here (not valid, a reference that leads out of it or nowhere) finds no error: the
    ToolServer, which refuses what does not match, has the last word.
    """
    try:
        found = []
        for error in _validator(json.dumps(schema)).iter_errors(value):
            pointer = "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in error.absolute_path)
            found.append(f"{pointer or '/'}: {error.message[:_MAX_MESSAGE_CHARS]}")
            if len(found) == MAX_ERRORS:
                break
    except (SchemaError, Unresolvable, RecursionError):
        return []
    return sorted(found)


@lru_cache(maxsize=256)
def _validator(schema: str) -> Draft202012Validator:
    """Checking a schema against the metaschema takes milliseconds, so it is done once. Raises SchemaError, RecursionError."""
    read = json.loads(schema)
    Draft202012Validator.check_schema(read)
    return Draft202012Validator(read, registry=Registry())


def _schema_of(tool: ToolInfo) -> str:
    return f"The schema of {tool.name}: " + cut(json.dumps(tool.input_schema, ensure_ascii=False), MAX_SCHEMA_CHARS)


def _has_surrogates(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False
