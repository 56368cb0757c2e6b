"""How the parts of a schema refer to each other: what dangles, what goes in circles, what multiplies.

Parts are joined in two ways. *In place*: `$ref`, `allOf`, `if` and the like look at the same value again. *Deeper*:
`properties`, `items` and the like look at a part of the value. A circle of in-place joins never ends; a circle that
goes deeper ends with the value. Many in-place joins of joins (`allOf` of two references to an `allOf` of two …) end,
but after exponential work.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from toolserver.catalog.patterns import pattern_problem

MAX_WORK = 10_000  # parts that may look at one value
MAX_CHAIN = 60  # in-place joins one after another

_IN_PLACE_LISTS = ("allOf", "anyOf", "oneOf")
_IN_PLACE_ONE = ("not", "if", "then", "else")
_IN_PLACE_MAPS = ("dependentSchemas", "dependencies")
_DEEPER_LISTS = ("prefixItems", "items")
_DEEPER_ONE = (
    "items", "additionalItems", "contains", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_DEEPER_MAPS = ("properties", "patternProperties")
_STORES = ("$defs", "definitions")


def graph_problem(schema: dict[str, Any]) -> str | None:
    """What keeps a valid schema from being safe to run, or None."""
    try:
        _check_parts(schema)
        work: dict[int, int] = {}
        for part, _ in _parts(schema, ""):
            _work(part, schema, work, [])
    except _Problem as problem:
        return str(problem)
    return None


class _Problem(Exception):  # noqa: N818 - private to this file
    pass


def _check_parts(schema: dict[str, Any]) -> None:
    for part, place in _parts(schema, ""):
        for keyword in ("$dynamicRef", "$recursiveRef"):
            if keyword in part:
                raise _Problem(f"{place}/{keyword}: dynamic references are not supported, use $ref")
        if place and "$id" in part:
            raise _Problem(f"{place}/$id: a part with an $id of its own is not supported")
        if "$ref" in part:
            target = resolve(schema, part["$ref"])
            if target is None:
                raise _Problem(f"{place}/$ref: {_reference_problem(part['$ref'])}")
        if "pattern" in part:
            problem = pattern_problem(part["pattern"])
            if problem is not None:
                raise _Problem(f"{place}/pattern: {problem}")
        for pattern in part.get("patternProperties", ()):
            problem = pattern_problem(pattern)
            if problem is not None:
                raise _Problem(f"{place}/patternProperties: {problem}")


def _reference_problem(reference: str) -> str:
    clipped = reference if len(reference) <= 100 else reference[:100] + "…"
    if reference.startswith("#"):
        return f"{clipped!r} points to nothing in this schema"
    return f"{clipped!r} points outside of this schema, and nothing is fetched: put the definition under $defs"


def resolve(schema: dict[str, Any], reference: str) -> Any:
    """The part that a local reference names (`#`, `#/pointer` or `#anchor`), or None."""
    if reference == "#":
        return schema
    if not reference.startswith("#/"):
        anchor = reference[1:] if reference.startswith("#") else None
        return next((p for p, _ in _parts(schema, "") if anchor and p.get("$anchor") == anchor), None)
    found: Any = schema
    for raw in reference[2:].split("/"):
        key = unquote(raw).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found if isinstance(found, (dict, bool)) else None


def _parts(schema: Any, place: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Every sub-schema with its pointer, the whole included; not what only looks like one (`const`, `default`, …)."""
    if not isinstance(schema, dict):
        return
    yield schema, place
    for name, child in _children(
        schema,
        (*_IN_PLACE_LISTS, *_DEEPER_LISTS),
        (*_IN_PLACE_ONE, *_DEEPER_ONE),
        (*_IN_PLACE_MAPS, *_DEEPER_MAPS, *_STORES),
    ):
        yield from _parts(child, f"{place}/{name}")


def _children(
    part: dict[str, Any], lists: tuple[str, ...], ones: tuple[str, ...], maps: tuple[str, ...]
) -> Iterator[tuple[str, Any]]:
    for name in lists:
        if isinstance(part.get(name), list):
            yield from ((f"{name}/{index}", item) for index, item in enumerate(part[name]))
    for name in ones:
        if isinstance(part.get(name), dict):
            yield name, part[name]
    for name in maps:
        if isinstance(part.get(name), dict):
            yield from ((f"{name}/{key}", item) for key, item in part[name].items())


def _work(part: Any, root: dict[str, Any], done: dict[int, int], chain: list[int]) -> int:
    """How many parts look at a value that `part` looks at. Parts are told apart by identity: they live in one tree."""
    if not isinstance(part, dict):
        return 1
    if id(part) in done:
        return done[id(part)]
    if id(part) in chain:
        raise _Problem(
            "a $ref leads back to itself without going deeper into the value, so that checking would never end"
        )
    if len(chain) >= MAX_CHAIN:
        raise _Problem(f"more than {MAX_CHAIN} references and combinations follow one another")
    chain.append(id(part))
    joined = [child for _, child in _children(part, _IN_PLACE_LISTS, _IN_PLACE_ONE, _IN_PLACE_MAPS)]
    if "$ref" in part:
        joined.append(resolve(root, part["$ref"]))
    total = 1 + sum(_work(child, root, done, chain) for child in joined)
    chain.pop()
    if total > MAX_WORK:
        raise _Problem(f"its combinations multiply to more than {MAX_WORK} checks of one value")
    done[id(part)] = total
    return total
