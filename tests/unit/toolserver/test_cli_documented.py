"""What the command line offers stands in docs/reference/toolserver-cli.md, and nothing else does."""

from __future__ import annotations

import re
from pathlib import Path

import typer.main

from toolserver.cli import app

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "toolserver-cli.md").read_text()


def leaves(command: object, path: tuple[str, ...] = ()) -> dict[str, set[str]]:
    """Each command by its words, with its long options."""
    below = getattr(command, "commands", None)
    if below is not None:
        return {name: opts for word, sub in below.items() for name, opts in leaves(sub, (*path, word)).items()}
    options = {option for parameter in getattr(command, "params", ()) for option in parameter.opts}
    return {" ".join(path): {option for option in options if option.startswith("--")} - {"--help"}}


COMMANDS = leaves(typer.main.get_command(app))


def rows() -> dict[str, str]:
    """Each documented option with the commands that it is said to belong to."""
    return dict(re.findall(r"^\| `(--[a-z-]+)[^`]*` \| ([^|]*) \|", PAGE, re.MULTILINE))


def belongs(where: str, command: str) -> bool:
    names = re.findall(r"`([^`]+)`", where)
    within = any(command == name or command.startswith(f"{name} ") for name in names)
    return not within if where.startswith("all but") else within


def test_every_command_is_documented_and_no_other() -> None:
    documented = {name.strip() for name in re.findall(r"^\| `toolserver ([a-z ]+)", PAGE, re.MULTILINE)}
    assert documented == set(COMMANDS)


def test_every_option_is_documented_with_the_commands_that_have_it() -> None:
    described = rows()
    assert set(described) == set().union(*COMMANDS.values())
    for option, where in described.items():
        assert {name for name in COMMANDS if belongs(where, name)} == {n for n, o in COMMANDS.items() if option in o}, (
            option
        )


def test_every_variable_of_the_command_line_is_documented() -> None:
    for name in ("TOOLSERVER_CONFIG", "TOOLSERVER_URL", "TOOLSERVER_API_KEY"):
        assert f"`{name}`" in PAGE
