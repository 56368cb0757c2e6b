"""Which schemas a tool may have."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from toolserver.catalog.patterns import UnsafePattern, pattern_problem, text_limit
from toolserver.catalog.schema import compile_schema, schema_problem


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "$schema": "https://json-schema.org/draft/2020-12/schema"},
        {
            "type": "object",
            "$schema": "http://json-schema.org/draft-07/schema#",
            "definitions": {"a": {}},
            "properties": {"x": {"$ref": "#/definitions/a"}},
        },
        {"properties": {"x": {"$ref": "#/$defs/a~1b"}}, "$defs": {"a/b": {"type": "string"}}},
        {"properties": {"x": {"$ref": "#here"}}, "$defs": {"a": {"$anchor": "here"}}},
        {"properties": {"x": {"$ref": "#"}}},
        {"properties": {"x": {"const": {"$ref": "https://example.org/only-data"}}}},
        {"properties": {"$ref": {"type": "string"}}},
        {"$id": "https://example.org/tool", "properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": {}}},
    ],
)
def test_usable_schemas_compile(schema: dict[str, Any]) -> None:
    assert schema_problem(schema) is None
    assert compile_schema(schema).is_valid({})


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ([], "not an object"),
        ({"type": "objekt"}, "not valid JSON Schema at /type"),
        ({"properties": {"a": {"required": "x"}}}, "/properties/a/required"),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "draft 2020-12"),
        ({"$schema": 5}, "draft 2020-12"),
        ({"properties": {"x": {"$ref": "#/$defs/missing"}}}, "/properties/x/$ref: '#/$defs/missing' points to nothing"),
        ({"properties": {"x": {"$ref": "#missing"}}}, "points to nothing"),
        ({"properties": {"x": {"$ref": "https://example.org/s.json"}}}, "nothing is fetched"),
        ({"properties": {"x": {"$ref": "other.json#/a"}}}, "nothing is fetched"),
        ({"properties": {"x": {"$ref": "file:///etc/passwd"}}}, "nothing is fetched"),
        ({"properties": {"x": {"$id": "https://example.org/x"}}}, "$id"),
        ({"properties": {"x": {"$dynamicRef": "#x"}}}, "dynamic"),
        ({"$ref": "#"}, "never end"),
        (
            {
                "allOf": [{"$ref": "#/$defs/a"}],
                "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"not": {"$ref": "#/$defs/a"}}},
            },
            "never end",
        ),
        ({"properties": {"x": {"pattern": "^(a+)+$"}}}, "exponential"),
        ({"patternProperties": {"(a|a)*$": {}}}, "begin alike"),
        ({"properties": {"x": {"pattern": "("}}}, "at /properties/x/pattern"),
    ],
)
def test_unusable_schemas_are_refused_with_the_reason_and_place(schema: Any, said: str) -> None:
    problem = schema_problem(schema)
    assert problem is not None
    assert said in problem
    assert len(problem) < 600


def test_combinations_that_multiply_are_refused() -> None:
    layers = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 4} for n in range(12)}
    problem = schema_problem({"$ref": "#/$defs/d0", "$defs": {**layers, "d12": {}}})
    assert problem is not None
    assert "multiply" in problem


def test_a_very_long_chain_and_a_very_deep_schema_are_refused() -> None:
    chain = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(3_000)}
    assert "follow one another" in str(schema_problem({"$ref": "#/$defs/d0", "$defs": {**chain, "d3000": {}}}))
    deep: dict[str, Any] = {}
    for _ in range(5_000):
        deep = {"not": deep}
    assert "deep" in str(schema_problem(deep))
    assert "parts" in str(schema_problem({"enum": list(range(50_000))}))


@pytest.mark.parametrize(
    "pattern",
    [
        "^[a-z0-9]+(-[a-z0-9]+)*$", r"^\d+\.\d+\.\d+$", r"^[\w.-]+@[\w.-]+$", "^.*$", ".*", "^x-", r"^\d{4}-\d\d-\d\d(T\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:\d\d)?)?$",
        "^(foo|bar|baz)+$", r"^(\d{1,3}\.){3}\d{1,3}$", "^#[0-9a-fA-F]{6}$", "^https?://.+$", r"^(?!.*\.\.).*$", "^[A-Za-z0-9_-]{1,128}$", "",
    ],
)  # fmt: skip
def test_usual_patterns_are_accepted(pattern: str) -> None:
    assert pattern_problem(pattern) is None
    assert text_limit(pattern) >= 1_000


@pytest.mark.parametrize(
    "pattern",
    [
        "^(a+)+$", "(a*)*b", "(a|a)*$", r"(\s*\w+)*$", r"(\w+\s?)*$", "(.*a){11}", "(x+x+)+y", "^(([a-z])+.)+[A-Z]([a-z])+$", "(a?){30}a{30}",
        "(a?a?a?)*b", r"(a)\1*b", r"^(?:(?=a)a+)+$", "a?" * 30 + "a" * 30, "(", r"\p{L}", "a" * 5_000, "(" * 300 + ")" * 300 + "+",
    ],
)  # fmt: skip
def test_patterns_that_could_hang_or_do_not_parse_are_refused(pattern: str) -> None:
    assert pattern_problem(pattern) is not None


PIECES = ["a", "b", "[ab]", ".", "(a)", "(ab)", "a|b", "a|ab", "(a|b)", "(?:a|ba)"]
patterns = st.recursive(
    st.sampled_from(PIECES),
    lambda inner: (
        st.builds(lambda one, times: f"(?:{one}){times}", inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}"]))
        | st.builds(lambda one, other: f"(?:{one}){other}", inner, inner)
    ),
    max_leaves=5,
)


@settings(
    max_examples=80, deadline=None, phases=[Phase.explicit, Phase.generate]
)  # shrinking would wait for each slow try
@example("(?:(?:a)*)(?:a)*", "{}c")
@example("(?:(?:a)*)(?:(?:(a|b))(a|b))*", "{}c")
@given(patterns, st.sampled_from(["^{}$", "{}", "{}c", "^{}c"]))
def test_an_accepted_pattern_never_takes_long(inner: str, around: str) -> None:
    pattern = around.format(inner)
    try:
        limit = text_limit(pattern)
    except UnsafePattern:
        return
    for unit in ("a", "ab", "b", "aab"):
        text = (unit * 3_000)[: min(limit, 3_000)]
        begin = time.monotonic()
        re.search(pattern, text)
        assert time.monotonic() - begin < 3
