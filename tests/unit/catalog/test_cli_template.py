from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolserver.catalog.cli_template import CliTemplate, Unfit

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "filter": {"type": "string"},
        "files": {"type": "array", "items": {"type": "string"}},
        "compact": {"type": "boolean"},
        "indent": {"type": "integer", "default": 2},
        "text": {},
    },
    "required": ["filter"],
}


def template(*argv: Any, **more: Any) -> CliTemplate:
    made = CliTemplate.load({"argv": list(argv), **more})
    made.check(SCHEMA)
    assert CliTemplate.load(made.as_json()) == made
    return made


def argv(made: CliTemplate, **arguments: Any) -> list[str]:
    return list(made.expand(arguments, SCHEMA).argv)


def test_each_element_becomes_one_element() -> None:
    made = template("jq", "--indent={indent}", "--", "{filter}", "{{x}}")
    assert argv(made, filter="; rm -rf / $(id) `id` 'a b'") == [
        "jq",
        "--indent=2",
        "--",
        "; rm -rf / $(id) `id` 'a b'",
        "{x}",
    ]
    assert argv(made, filter="", indent=4) == ["jq", "--indent=4", "--", "", "{x}"]


def test_a_list_becomes_as_many_elements_as_it_has() -> None:
    made = template("{filter}", ["--", "{files}"], files=["files"])
    assert argv(made, filter=".", files=["a b", "/workspace/c", "-d"]) == [
        ".",
        "--",
        "/workspace/a b",
        "/workspace/c",
        "/workspace/-d",
    ]
    assert argv(made, filter=".", files=[]) == ["."]
    assert argv(made, filter=".") == ["."]


def test_groups_are_whole_or_not_there() -> None:
    made = template("x", ["-c", "{compact?}"], ["--text", "{text}"], "{filter}")
    assert argv(made, filter=".") == ["x", "."]
    assert argv(made, filter=".", compact=False, text=None) == ["x", "."]
    assert argv(made, filter=".", compact=True, text=3) == ["x", "-c", "--text", "3", "."]


def test_the_input_is_made_of_arguments_too() -> None:
    made = template("x", stdin="{filter}\n")
    assert made.expand({"filter": "a\nb"}, SCHEMA).stdin == b"a\nb\n"
    assert template("x").expand({"filter": "a"}, SCHEMA).stdin == b""


@pytest.mark.parametrize(
    ("argv_of", "arguments", "why"),
    [
        (["{filter}"], {"filter": "-n"}, "must not begin with '-'"),
        (["{filter}x"], {"filter": "-n"}, "must not begin with '-'"),
        (["{filter}"], {"filter": "a\0b"}, "NUL"),
        (["{filter}", ["{files}"]], {"filter": ".", "files": ["../etc/passwd"]}, "path in the workspace"),
        (["{filter}", ["{files}"]], {"filter": ".", "files": ["/etc/passwd"]}, "path in the workspace"),
        (["{filter}", ["{files}"]], {"filter": ".", "files": ["/workspace/../x"]}, "path in the workspace"),
        (["{filter}", ["{files}"]], {"filter": ".", "files": ["/workspacex"]}, "path in the workspace"),
        (["{filter}", ["{files}"]], {"filter": ".", "files": [""]}, "path in the workspace"),
        (["{filter}"], {"filter": "x" * 100_001}, "too long"),
        (["{filter}", ["{files}"]], {"filter": ".", "files": ["x" * 90_000] * 12}, "too long"),
    ],
    ids=["dash", "dash-first", "nul", "dots", "absolute", "dots-within", "prefix", "empty", "long", "long-in-all"],
)
def test_what_makes_no_command_line_is_refused(argv_of: list[Any], arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(Unfit, match=why):
        template(*argv_of, files=["files"]).expand(arguments, SCHEMA)


def test_a_dash_is_let_through_where_it_can_do_no_harm() -> None:
    assert argv(template("--", "{filter}"), filter="-n") == ["--", "-n"]
    assert argv(template("{filter}", allow_dash=["filter"]), filter="-n") == ["-n"]
    assert argv(template("--x={filter}"), filter="-n") == ["--x=-n"]


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"argv": "jq ."}, "list of texts"),
        ({"argv": [[]]}, "list of texts"),
        ({"argv": ["{"]}, "lone {"),
        ({"argv": ["{a b}"]}, "lone {"),
        ({"argv": [], "shell": True}, "no key shell"),
        ({"argv": [], "output": "xml"}, "one of text, json"),
        ({"argv": [], "stdin": 3}, "must be a text"),
        ({"argv": [], "exit_codes": {"x": "done"}}, "codes from 0 to 255"),
        ({"argv": [], "exit_codes": {"1": "fine"}}, "codes from 0 to 255"),
        ({"argv": [], "exit_codes": [1]}, "codes from 0 to 255"),
        ({"argv": [], "files": "a"}, "list of arguments' names"),
        ({"argv": ["a\0"]}, "NUL"),
    ],
)
def test_a_template_that_means_nothing_is_refused(told: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        CliTemplate.load(told)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"argv": ["{compact}"]}, "outside of a group"),
        ({"argv": ["x"], "stdin": "{text}"}, "outside of a group"),
        ({"argv": [["{other}"]]}, "input_schema does not have"),
        ({"argv": ["x"], "files": ["other"]}, "input_schema does not have"),
    ],
)
def test_a_template_that_does_not_fit_its_schema_is_refused(told: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        CliTemplate.load(told).check(SCHEMA)


def test_exit_codes_decide_the_end() -> None:
    made = template("x", exit_codes={"1": "done", "2": "invalid"})
    assert [made.end_of(code) for code in (0, 1, 2, 3, 137)] == ["done", "done", "invalid", "failed", "failed"]


@given(st.text(), st.lists(st.text(min_size=1), max_size=5))
def test_no_value_changes_the_shape_of_a_command_line(text: str, files: list[str]) -> None:
    made = template("x", "--a={filter}", ["--", "{files}"])
    try:
        got = argv(made, filter=text, files=files)
    except Unfit:
        assert "\0" in text + "".join(files)
        return
    assert got == ["x", f"--a={text}", *(["--", *files] if files else [])]
