"""The options of `toolserver tools add` and `check` that make an entry: texts in, a ToolEntry out."""

# ruff: noqa: PLC0415 - imports wait for their command
from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolserver.commands.terminal import fail

if TYPE_CHECKING:
    from pydantic import ValidationError

    from toolserver.tool_entry import ToolEntry

CommandOption = Annotated[
    str | None, typer.Option("--command", help="Command to run in place of the image's own, split as a shell would.")
]
EnvOption = Annotated[
    list[str] | None, typer.Option("--env", help="NAME=VALUE, visible to whoever may inspect it. Repeatable.")
]
SecretOption = Annotated[
    list[str] | None,
    typer.Option("--secret", help="NAME=file:PATH or NAME=env:VARIABLE, read at each start. Repeatable."),
]
HeaderOption = Annotated[
    list[str] | None,
    typer.Option(
        "--header-secret",
        help="'HOST:HEADER=[PREFIX ]file:PATH|env:VARIABLE', put in outside of the sandbox. Repeatable.",
    ),
]
WorkspaceOption = Annotated[str, typer.Option("--workspace", help="The session's files: none, ro or rw.")]
EgressOption = Annotated[
    str, typer.Option("--egress", help="none, open, or host:port,… : the most that its sandboxes reach.")
]
KindOption = Annotated[str, typer.Option("--kind", help="mcp (a server on stdio) or cli (a command-line program).")]
MemoryOption = Annotated[int | None, typer.Option("--memory-mb", help="MiB of memory, below the session's.")]
WorkingDirOption = Annotated[str | None, typer.Option("--working-dir", help="Folder that the command starts in.")]
CliOption = Annotated[
    str | None,
    typer.Option(
        "--cli", help="Of kind cli: what follows the image's entrypoint, such as '-c {filter}' ([ … ]: a group)."
    ),
]
StdinOption = Annotated[str | None, typer.Option("--stdin", help="Of kind cli: its input, such as '{text}'.")]
OutputOption = Annotated[str, typer.Option("--output", help="Of kind cli: what stdout is, text or json.")]
DescriptionOption = Annotated[
    str | None, typer.Option("--description", help="Of kind cli: what the tool does, for the model.")
]
SchemaOption = Annotated[
    Path | None,
    typer.Option("--input-schema", help="Of kind cli: JSON Schema of the arguments; else made of the placeholders."),
]


def pairs(option: str, given: list[str] | None) -> dict[str, str]:
    """Of NAME=VALUE texts. What is wrong is not repeated: it may hold a secret."""
    found: dict[str, str] = {}
    for one in given or ():
        name, equals, value = one.partition("=")
        if not equals or not name:
            fail(f"{option} takes NAME=VALUE")
        found[name] = value
    return found


def headers(given: list[str] | None) -> list[dict[str, str]]:
    found = []
    for place, told in pairs("--header-secret", given).items():
        host, colon, header = place.rpartition(":")
        if not colon:
            fail("--header-secret takes HOST:HEADER=source, such as 'api.example.org:Authorization=Bearer env:TOKEN'")
        prefix, _, source = told.rpartition(" ")
        found.append({"host": host, "header": header, "source": source, "prefix": f"{prefix} " if prefix else ""})
    return found


def egress(text: str) -> str | list[str]:
    return text if text in ("none", "open") else [rule.strip() for rule in text.split(",") if rule.strip()]


def words(option: str, text: str | None) -> list[str]:
    try:
        return shlex.split(text or "")
    except ValueError as problem:
        fail(f"{option}: {problem}")


def groups(template: str) -> list[str | list[str]]:
    """`a [ --b {c} ] d` as `["a", ["--b", "{c}"], "d"]`."""
    found: list[str | list[str]] = []
    group: list[str] | None = None
    for word in words("--cli", template):
        if word == "[" and group is None:
            group = []
        elif word == "]" and group is not None:
            found.append(group)
            group = None
        elif group is not None:
            group.append(word)
        else:
            found.append(word)
    if group is not None:
        fail("--cli: a group that begins with [ ends with ], both with blanks around them")
    return found


def command(
    template: str, stdin: str | None, output: str, description: str | None, schema: Path | None
) -> dict[str, Any]:
    """One of the `commands` of an entry of kind cli."""
    if not description:
        fail("a command-line tool needs --description: what it does, in words for the model")
    told: dict[str, Any] = {"description": description, "argv": groups(template), "stdin": stdin, "output": output}
    if schema is not None:
        try:
            told["input_schema"] = json.loads(schema.read_text("utf-8"))
        except (OSError, ValueError) as problem:
            fail(f"--input-schema {schema}: {problem}")
    return told


def entry_of(fields: dict[str, Any]) -> ToolEntry:
    """Ends the command when they don't fit."""
    from pydantic import ValidationError

    from toolserver.tool_entry import ToolEntry

    try:
        return ToolEntry.model_validate(fields)
    except ValidationError as problem:
        fail("the image can't be added so:\n  " + "\n  ".join(_lines(problem)))


def _lines(problem: ValidationError) -> list[str]:
    lines = []
    for one in problem.errors(include_input=False, include_url=False):
        place = ".".join(str(part) for part in one["loc"] if not str(part).startswith(("literal[", "list[")))
        lines.append(f"{place or 'it'}: {one['msg'].removeprefix('Value error, ')}")
    return list(dict.fromkeys(lines))
