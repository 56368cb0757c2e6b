"""The command `toolserver doctor`."""

# ruff: noqa: PLC0415 - imports wait for the command, so that `--help` is quick
from __future__ import annotations

from typing import Annotated

import typer

from toolserver.commands.terminal import (
    UNREACHABLE,
    ConfigOption,
    JsonOption,
    StateOption,
    load_settings,
    show,
    table,
)

RuntimeOption = Annotated[str | None, typer.Option("--runtime", help="auto, docker, bubblewrap or fake.")]


def doctor(
    config: ConfigOption = None,
    state_dir: StateOption = None,
    runtime: RuntimeOption = None,
    as_json: JsonOption = False,
) -> None:
    """What this host can enforce, what is weaker, and what to do. Exit code 5 when sandboxes can't be started."""
    import asyncio

    from toolserver.doctor.examine import examine

    found = asyncio.run(examine(load_settings(config, state_dir, runtime={"name": runtime})))

    def lines() -> list[str]:
        checks = found["checks"]
        told = table([[one["state"], one["name"], one["found"]] for one in checks])
        advice = [f"{one['state']}: {one['name']}: {one['advice']}" for one in checks if one["state"] != "ok"]
        return [*told, "", *(advice or ["Nothing is weaker than it could be."])]

    show(as_json, found, lines)
    if found["problem"] is not None:
        raise typer.Exit(UNREACHABLE)
