"""`toolserver tools check` and `new`: try an image without adding it, and make one to begin with."""

# ruff: noqa: PLC0415, PLR0917 - imports wait for their command; typer's options are parameters
from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from toolserver.commands import tool_options as options
from toolserver.commands.terminal import (
    FAILED,
    ConfigOption,
    JsonOption,
    StateOption,
    fail,
    load_settings,
    show,
    table,
    warn,
)
from toolserver.commands.tool_images import guarded, image_facts, load_catalog, refuse_reference


def check(
    image: Annotated[str, typer.Argument(help="The engine's name of an image, or the name of an added one.")],
    kind: options.KindOption = "mcp",
    command: options.CommandOption = None,
    working_dir: options.WorkingDirOption = None,
    env: options.EnvOption = None,
    secret: options.SecretOption = None,
    workspace: options.WorkspaceOption = "none",
    memory_mb: options.MemoryOption = None,
    config: ConfigOption = None,
    state_dir: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Try an image under full hardening and tell what it does well and badly. Exit code 1 when something fails."""
    from toolserver.catalog.asked import name_of_reference
    from toolserver.doctor.image_check import check_image

    settings = load_settings(config, state_dir)
    added = load_catalog(settings).added.get(image)
    if added is not None and added.entry is not None:
        name, entry = image, added.entry
    else:
        refuse_reference(image)
        name = name_of_reference(image)
        fields: dict[str, Any] = {
            "image": image,
            "command": options.words("--command", command),
            "working_dir": working_dir,
            "env": options.pairs("--env", env),
            "secrets": options.pairs("--secret", secret),
            "workspace": workspace,
            "limits": {"memory_mb": memory_mb},
        }
        if kind == "cli":
            fields |= {"kind": "cli", "commands": {"run": {"description": "A command.", "argv": []}}}
        entry = options.entry_of(fields)
    facts = image_facts(settings, entry.image)
    approval = added.row.approval if added is not None and added.row is not None else None
    warn(f"trying {entry.image}")
    report = guarded(lambda: check_image(settings, name, entry, facts, approval))
    counts = {state: sum(1 for one in report if one.state == state) for state in ("pass", "warn", "fail")}
    told = {"image": entry.image, "digest": facts.digest, "checks": [one.as_json() for one in report], **counts}

    def lines() -> list[str]:
        rows = table([[one.state, one.name, one.found] for one in report])
        advice = [f"{one.state}: {one.name}: {one.advice}" for one in report if one.state != "pass" and one.advice]
        return [*rows, "", *advice, f"{counts['pass']} pass, {counts['warn']} warn, {counts['fail']} fail"]

    show(as_json, told, lines)
    if counts["fail"]:
        raise typer.Exit(FAILED)


def new(
    name: Annotated[str, typer.Argument(help="What the image will be called: small letters, digits and '-'.")],
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Folder to make; by default one of that name, here.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a folder with a tool image in Python that works: a server, a Dockerfile, a test, a README."""
    from toolserver.images.scaffold import ScaffoldProblem, scaffold

    place = folder or Path(name)
    try:
        files = scaffold(name, place)
    except ScaffoldProblem as problem:
        fail(str(problem))
    steps = [f"docker build -t {name} {place}", f"toolserver tools check {name}", f"toolserver tools add {name}"]
    show(
        as_json,
        {"name": name, "folder": str(place), "files": files, "next": steps},
        lambda: [*(f"made {place / file}" for file in files), "", "Then:", *(f"  {step}" for step in steps)],
    )
