"""Checks arguments against the schemas of tools.json: the few words of JSON Schema that those use."""

from __future__ import annotations

import re

from sandbox_images.base.annotations import Any

TYPES: dict[str, tuple[type, ...]] = {"string": (str,), "boolean": (bool,), "integer": (int,), "number": (int, float)}


def problems(schema: dict[str, Any], arguments: dict[str, Any]) -> list[dict[str, str]]:
    """All that is wrong: [{"pointer", "message"}]."""
    properties = schema["properties"]
    found = [{"pointer": f"/{name}", "message": "is missing"} for name in schema["required"] if name not in arguments]
    for name, value in arguments.items():
        if name not in properties:
            found.append({"pointer": f"/{name}", "message": "is not an argument of this tool"})
            continue
        message = _problem(properties[name], value)
        if message:
            found.append({"pointer": f"/{name}", "message": message})
    return found


def _problem(schema: dict[str, Any], value: Any) -> str | None:
    kind = schema["type"]
    if not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean"):
        return f"must be of type {kind}"
    if isinstance(value, str):
        if len(value) < schema.get("minLength", 0):
            return "must not be empty"
        if len(value) > schema.get("maxLength", len(value)):
            return f"must have at most {schema['maxLength']} characters"
        if "enum" in schema and value not in schema["enum"]:
            return f"must be one of {', '.join(schema['enum'])}"
        if "pattern" in schema and not re.search(schema["pattern"], value):
            return f"must match {schema['pattern']}"
    elif not isinstance(value, bool):
        low, high = schema.get("minimum"), schema.get("maximum")
        if value != value or (low is not None and value < low) or (high is not None and value > high):  # noqa: PLR0124 - NaN
            return f"must be between {low} and {high}"
    return None
