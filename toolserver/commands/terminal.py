"""What the commands share: their settings, their options, the state folder they work on, and how they say things."""

# ruff: noqa: PLC0415 - imports wait for their command
from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

if TYPE_CHECKING:
    from toolserver.settings import Settings
    from toolserver.store.database import Database

T = TypeVar("T")
FAILED, USAGE, UNREACHABLE, INTERRUPTED = 1, 2, 5, 130

ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="Settings file (TOML).", envvar="TOOLSERVER_CONFIG")
]
StateOption = Annotated[Path | None, typer.Option("--state-dir", help="Folder of the database and the server's lock.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def fail(message: str, code: int = USAGE) -> NoReturn:
    warn(message)
    raise typer.Exit(code)


def warn(message: str) -> None:
    print(f"toolserver: {message}", file=sys.stderr)


def load_settings(config: Path | None, state_dir: Path | None = None, **sections: dict[str, Any]) -> Settings:
    from toolserver import settings

    flags: dict[str, Any] = {name: {k: v for k, v in part.items() if v is not None} for name, part in sections.items()}
    flags = {name: part for name, part in flags.items() if part}
    if state_dir is not None:
        flags["state_dir"] = state_dir.expanduser()
    wrong = settings.unknown_variables()
    try:
        loaded = settings.load(config, **flags)
    except (OSError, ValueError) as problem:  # both of pydantic's and TOML's errors are ValueErrors
        wrong += settings.problems(problem)
    if wrong:
        fail("Wrong settings:\n  " + "\n  ".join(wrong))
    return loaded


def show(as_json: bool, value: Any, lines: Callable[[], list[str]]) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False) if as_json else "\n".join(lines()))


def table(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def with_database(settings: Settings, work: Callable[[Database], T]) -> T:
    """`work` on the database of a state folder, beside a running server. Ends the command when it can't be used."""
    from toolserver.errors import StartRefused, StoreUnavailable
    from toolserver.store.connection import database_path
    from toolserver.store.database import Database

    database = Database(database_path(settings.state_dir))
    try:
        database.open()
        return work(database)
    except (StartRefused, StoreUnavailable) as problem:
        fail(str(problem))
    finally:
        database.close()
