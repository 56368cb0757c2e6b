"""What a call's arguments may look like."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from toolserver.catalog.arguments import MAX_ERRORS, check, pointer
from toolserver.catalog.image import Tool

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "code": {"type": "string", "maxLength": 100},
        "count": {"type": "integer", "minimum": 1},
        "ratio": {"type": "number", "exclusiveMaximum": 2},
        "mode": {"enum": ["fast", "slow"]},
        "names": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]+$"}, "uniqueItems": True},
        "choice": {"anyOf": [{"type": "string", "minLength": 3}, {"type": "null"}]},
    },
    "required": ["code"],
    "additionalProperties": False,
}


def tool(schema: dict[str, Any]) -> Tool:
    return Tool("t", "a tool of the tests", schema, None, {}, "image")


def pointers(arguments: Any, schema: dict[str, Any] = SCHEMA) -> list[str]:
    return sorted(error["pointer"] for error in check(tool(schema), arguments))


def test_good_arguments_have_no_errors() -> None:
    assert check(tool(SCHEMA), {"code": "1", "count": 1.0, "ratio": 1, "names": ["a", "b"], "choice": None}) == []


def test_all_errors_come_at_once_each_with_its_pointer() -> None:
    arguments = {
        "code": 5,
        "count": 0,
        "ratio": 2,
        "mode": "x",
        "names": ["a", "B"],
        "choice": "ab",
        "bogus": 1,
        "a/b~c": 2,
    }
    assert pointers(arguments) == ["/a~1b~0c", "/bogus", "/choice", "/code", "/count", "/mode", "/names/1", "/ratio"]


def test_a_missing_argument_points_to_its_object_and_is_named() -> None:
    assert check(tool(SCHEMA), {}) == [{"pointer": "", "message": "needs 'code', which is missing"}]


def test_each_unknown_argument_is_named_with_what_is_known() -> None:
    errors = check(tool(SCHEMA), {"code": "", "bogus": 1, "timeout": 2})
    assert [error["pointer"] for error in errors] == ["/bogus", "/timeout"]
    assert "'bogus'" in errors[0]["message"]
    assert "count" in errors[0]["message"]


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [('{"code": "1"}', "string"), (["1"], "array"), (5, "integer"), (None, "null"), (True, "boolean")],
)
def test_arguments_that_are_no_object_are_refused(arguments: Any, kind: str) -> None:
    (error,) = check(tool(SCHEMA), arguments)
    assert error["pointer"] == ""
    assert "must be an object" in error["message"]
    assert kind in error["message"]


def test_a_boolean_is_no_integer_and_a_whole_float_is_one() -> None:
    assert pointers({"code": "", "count": True}) == ["/count"]
    assert pointers({"code": "", "count": 2.0}) == []
    assert pointers({"code": "", "count": 2.5}) == ["/count"]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf"), 10**400, -(10**400)])
def test_numbers_that_json_does_not_have_are_refused_wherever_they_stand(number: float) -> None:
    assert pointers({"deep": [{"x": number}]}, {"type": "object"}) == ["/deep/0/x"]


def test_lone_surrogates_are_refused_in_values_and_names() -> None:
    assert pointers({"x": "\ud800"}, {"type": "object"}) == ["/x"]
    assert pointers({"a": {"\ud800": 1}}, {"type": "object"}) == ["/a"]
    assert pointers({"x": "🦀"}, {"type": "object"}) == []


def test_errors_never_repeat_megabytes() -> None:
    huge = "x" * 2_000_000
    errors = check(tool(SCHEMA), {"code": huge, "mode": huge, "names": huge, "choice": {"a": huge}, "y" * 900: huge})
    assert len(errors) == 5
    assert len(json.dumps(errors)) < 5_000


def test_the_number_of_errors_is_bounded() -> None:
    errors = check(tool(SCHEMA), {"code": "", "names": [str(number) for number in range(5_000)]})
    assert len(errors) == MAX_ERRORS + 1
    assert "more than" in errors[-1]["message"]


def test_deep_arguments_are_an_error_not_a_crash() -> None:
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    (error,) = check(tool({"type": "object"}), {"x": deep})
    assert "nested" in error["message"]
    while isinstance(deep, list):  # taken apart by hand: freeing it would recurse
        deep = deep.pop()


def test_a_recursive_schema_works_as_deep_as_arguments_go() -> None:
    schema = {
        "type": "object",
        "properties": {"next": {"$ref": "#"}, "n": {"type": "integer"}},
        "additionalProperties": False,
    }
    value: dict[str, Any] = {"n": "no"}
    for _ in range(50):
        value = {"next": value}
    assert pointers(value, schema) == ["/next" * 50 + "/n"]


def test_a_schema_whose_references_multiply_is_given_up_in_time() -> None:
    schema = {"type": "object", "properties": {"a": {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}}}
    value: dict[str, Any] = {}
    for _ in range(50):
        value = {"a": value}
    begin = time.monotonic()
    (error,) = check(tool(schema), value)
    assert "too large" in error["message"]
    assert time.monotonic() - begin < 5


def test_many_items_that_must_differ_take_no_quadratic_time() -> None:
    schema = {"type": "object", "properties": {"x": {"uniqueItems": True}}}
    items = [{"n": number} for number in range(30_000)]
    begin = time.monotonic()
    assert check(tool(schema), {"x": items}) == []
    assert pointers({"x": [*items, {"n": 7.0}]}, schema) == ["/x"]
    assert pointers({"x": [1, True, "1", None, [1], {"1": 1}]}, schema) == []
    assert time.monotonic() - begin < 5


def test_a_text_too_long_for_its_pattern_is_refused_quickly() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": r"^.*x.*y$"}}}
    begin = time.monotonic()
    (error,) = check(tool(schema), {"x": "x" * 1_000_000})
    assert "longer than" in error["message"]
    assert time.monotonic() - begin < 5


def test_pattern_properties_and_additional_properties_go_together() -> None:
    schema = {
        "type": "object",
        "patternProperties": {"^x-": {"type": "integer"}},
        "additionalProperties": {"type": "string"},
    }
    assert pointers({"x-a": 1, "b": "c"}, schema) == []
    assert pointers({"x-a": "1", "b": 1}, schema) == ["/b", "/x-a"]


def test_draft_7_is_followed_where_a_schema_says_so() -> None:
    old = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"x": {"items": [{"type": "integer"}]}},
    }
    assert pointers({"x": ["a"]}, old) == ["/x/0"]


def test_pointers_escape_as_rfc_6901_says() -> None:
    assert pointer(["a/b", "m~n", 0, ""]) == "/a~1b/m~0n/0/"


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats(allow_nan=False, allow_infinity=False, width=16)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["code", "count", "names", "zz"]), inner, max_size=4)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from([*SCHEMA["properties"], "zz"]), json_values, max_size=5))
def test_says_the_same_as_the_plain_library(arguments: dict[str, Any]) -> None:
    assert (check(tool(SCHEMA), arguments) == []) == Draft202012Validator(SCHEMA).is_valid(arguments)


def test_a_small_call_is_checked_fast() -> None:
    checked = tool(SCHEMA)
    check(checked, {"code": "1"})
    rounds = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(500):
            check(checked, {"code": "print(1)", "count": 5})
        rounds.append((time.perf_counter() - begin) / 500)
    assert min(rounds) < 500e-6  # about 25 µs on an idle machine
