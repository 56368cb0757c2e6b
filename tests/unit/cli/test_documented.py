"""What the command line offers and what runs leave stands in docs/reference/agent-cli.md, and nothing else does."""

from __future__ import annotations

import re
from pathlib import Path

import typer.main

from agent.cli import app
from agent.report.artifacts import Manifest
from agent.report.folder import result_of
from agent.report.story import tell
from tests.unit.report.journal_example import full_run

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "agent-cli.md").read_text()
COMMANDS = typer.main.get_group(app).commands


def options_of(name: str) -> set[str]:
    return {option for parameter in COMMANDS[name].params for option in parameter.opts if option.startswith("--")} - {
        "--help"
    }


def test_every_command_is_documented() -> None:
    documented = set(re.findall(r"^\| `agent (\w+)", PAGE, re.MULTILINE))
    assert documented == set(COMMANDS)


def test_every_option_is_documented() -> None:
    for name in COMMANDS:
        missing = {option for option in options_of(name) if f"`{option}" not in PAGE}
        assert not missing, f"{name}: {missing}"


def test_no_option_is_documented_that_does_not_exist() -> None:
    known = set().union(*(options_of(name) for name in COMMANDS)) | {"--help"}
    assert set(re.findall(r"`(--[a-z-]+)", PAGE)) <= known


def test_every_field_of_the_result_is_documented() -> None:
    result = result_of(tell(full_run()), Manifest())
    fields = set(result) | set(result["tasks"][0]) | set(result["costs"])
    assert {field for field in fields if f"`{field}`" not in PAGE} == set()
