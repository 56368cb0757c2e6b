import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.llm.json_ladder import MAX_DEPTH, JsonProblem, JsonValue, parse_arguments, parse_json

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def value_of(text: str) -> tuple[Any, tuple[str, ...]]:
    parsed = parse_arguments(text)
    assert isinstance(parsed, JsonValue), parsed
    return parsed.value, parsed.repairs


@pytest.mark.parametrize("text", ["", "  \n", "null", " null ", "None"])
def test_no_text_and_null_mean_no_arguments(text: str) -> None:
    assert value_of(text) == ({}, ())


@pytest.mark.parametrize(
    ("text", "value", "repair"),
    [
        ('```json\n{"a": 1}\n```', {"a": 1}, "code fence"),
        ('```\n{"a": 1}```', {"a": 1}, "code fence"),
        ('{"a": [1, 2,], "b": {"c": 1,},}', {"a": [1, 2], "b": {"c": 1}}, "trailing comma"),
        ("{'a': 'it\\'s \"so\"'}", {"a": 'it\'s "so"'}, "single quotes"),
        ("{'a': True, 'b': False, 'c': None}", {"a": True, "b": False, "c": None}, "Python literal"),
        ('"{\\"a\\": \\"b\\"}"', {"a": "b"}, "double-encoded"),
        (json.dumps(json.dumps(json.dumps({"a": 1}))), {"a": 1}, "double-encoded"),
        ('{"code": "x = 1\nprint(x)\t"}', {"code": "x = 1\nprint(x)\t"}, ""),
        ("{'code': 'print(1)\nprint(2)',}", {"code": "print(1)\nprint(2)"}, "single quotes"),
    ],
)
def test_lossless_repairs(text: str, value: Any, repair: str) -> None:
    found, repairs = value_of(text)
    assert found == value
    assert not repair or repair in repairs


@pytest.mark.parametrize(
    "text",
    [
        '{"code": "print(1)"',
        '{"code": "print(1',
        "{k: [ }",
        '{"',
        "{'a': 1",
        '{"a": 1}}',
        '{"a" 1}',
        '{"a": 1 "b": 2}',
        '{"a": .5}',
        '{"a":[,]}',
        "{,}",
        '{"a":1,,}',
        '{"a": undefined}',
        "{'a': '\\x41'}",
        "call python with x = 1",
        '{"a": 1, "a": 2}',
        '{"n": NaN}',
        '{"n": Infinity}',
        '{"n": 1e999}',
        '{"n": ' + "9" * 5000 + "}",
    ],
)
def test_what_would_have_to_be_guessed_is_a_problem(text: str) -> None:
    parsed = parse_arguments(text)
    assert isinstance(parsed, JsonProblem)
    assert len(parsed.message) < 1000


@pytest.mark.parametrize(("text", "kind"), [("[1]", "list"), ('"a"', "string"), ("3", "number"), ("true", "boolean")])
def test_arguments_must_be_an_object(text: str, kind: str) -> None:
    parsed = parse_arguments(text)
    assert isinstance(parsed, JsonProblem)
    assert kind in parsed.message


@pytest.mark.parametrize(
    "text",
    [
        "[" * 2_000_000,
        '{"a":' * 5000 + "1" + "}" * 5000,
        "[" * 5000 + "]" * 5000,
        "{k: [ }",
        '{"',
        '\\"' * 1_000_000,
        '"\\"' * 700_000,
        "'" * 2_000_000,
        "{" + "'\\'" * 600_000,
        '{"a": ' + '"x",' * 500_000,
        '{"a":1,' * 300_000,
        "```json\n" * 250_000,
        "-" * 2_000_000,
        "{" + "[" * 90 + "'" + "[" * 5000,
        "x" * 5_000_000,
    ],
    ids=lambda text: text[:12],
)
def test_hostile_text_ends_in_a_problem_in_bounded_time(text: str) -> None:
    started = time.process_time()
    assert isinstance(parse_arguments(text), JsonProblem)
    assert time.process_time() - started < 5


def test_depth_is_bounded_but_brackets_in_strings_do_not_count() -> None:
    assert value_of(json.dumps({"code": "[" * 10_000}))[0] == {"code": "[" * 10_000}
    deep: Any = 1
    for _ in range(MAX_DEPTH - 1):
        deep = [deep]
    assert value_of(json.dumps({"a": deep}))[0] == {"a": deep}
    assert isinstance(parse_arguments(json.dumps({"a": [deep]})), JsonProblem)


@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_strict_json_comes_through_unchanged_and_unrepaired(value: dict[str, Any]) -> None:
    assert value_of(json.dumps(value)) == (value, ())


@given(st.dictionaries(st.text(), st.booleans() | st.none() | st.integers(-100, 100) | st.text("ab'\"c é"), max_size=5))
def test_a_python_literal_is_read_as_python_reads_it(value: dict[str, Any]) -> None:
    parsed = parse_arguments(repr(value))
    if "\\" not in repr(value):
        assert isinstance(parsed, JsonValue)
        assert parsed.value == value
    elif isinstance(parsed, JsonValue):
        assert parsed.value == value


@given(st.text(alphabet="{}[]\",:'\\ab1 \nTrueNone`", max_size=60))
def test_any_text_gives_a_value_or_a_problem(text: str) -> None:
    for parsed in (parse_json(text), parse_arguments(text)):
        assert isinstance(parsed, JsonValue | JsonProblem)
