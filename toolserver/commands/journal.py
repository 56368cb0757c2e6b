"""`toolserver journal`: reading and checking the calls journal of a state folder, while a server writes it or not."""

# ruff: noqa: PLC0415, PLR0917 - imports wait for their command; typer's options are parameters
from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolserver.commands.terminal import FAILED, ConfigOption, JsonOption, StateOption, fail, load_settings, show, warn

if TYPE_CHECKING:
    from toolserver.journal.record import Head, Record

app = typer.Typer(no_args_is_help=True, help="The journal of calls, sessions, keys and tenants.")
_TIME = re.compile(r"\d{4}(-\d\d(-\d\d(T\d\d(:\d\d(:\d\d(\.\d{1,3})?)?)?)?)?)?Z?")


def _is_time(text: str) -> bool:
    """Whether it is a moment of the calendar, or the beginning of one: the rest is filled in from a moment that exists."""
    if _TIME.fullmatch(text) is None:
        return False
    begun = text.rstrip("Z")
    try:
        datetime.fromisoformat(begun + "2000-01-01T00:00:00"[len(begun) :])
    except ValueError:
        return False
    return True


@contextmanager
def _journal(config: Path | None, state_dir: Path | None) -> Iterator[Path]:
    from toolserver.errors import JournalUnavailable
    from toolserver.journal.segments import folder_of, segments

    folder = folder_of(load_settings(config, state_dir).state_dir)
    try:
        if not folder.is_dir() or not segments(folder):
            fail(f"there is no journal in {folder}")
        yield folder
    except (OSError, JournalUnavailable) as problem:
        fail(f"the journal can't be read: {problem}")


def _known_head(config: Path | None, state_dir: Path | None) -> Head | None:
    """The head that the database keeps, if it has one."""
    from toolserver.commands.terminal import with_database
    from toolserver.journal.record import Head
    from toolserver.store import journal_head
    from toolserver.store.connection import database_path

    settings = load_settings(config, state_dir)
    if not database_path(settings.state_dir).exists():
        return None
    text = with_database(settings, lambda d: d.run(journal_head.find, writes=False))
    return None if text is None else Head.parse(text)


@app.command("verify")
def verify(
    head: Annotated[
        list[str] | None,
        typer.Option(help="SEQ:HASH that was noted earlier, and must still be in it. Can be repeated."),
    ] = None,
    config: ConfigOption = None,
    state_dir: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Whether it is as it was written. Exit code 1, and where it is not, when a line was changed, removed, moved or cut."""
    from toolserver.journal.record import Head
    from toolserver.journal.verify import verify as check

    try:
        anchors = [Head.parse(text) for text in head or ()]
    except ValueError as problem:
        fail(f"--head: {problem}")
    known = _known_head(config, state_dir)  # before the journal is read: it may go on meanwhile
    with _journal(config, state_dir) as folder:
        verdict = check(folder, [*anchors, *([known] if known is not None else [])])
    found = [
        f"{problem.kind}: {problem.segment + f' line {problem.line}: ' if problem.line else ''}{problem.message}"
        for problem in verdict.problems
    ]
    said = "is whole" if not found else "is NOT as it was written"
    told = [f"the journal {said}: {verdict.records} records, head {verdict.head}"]
    show(as_json, verdict.as_json(), lambda: [*found, *(f"note: {note}" for note in verdict.notes), *told])
    if found:
        raise typer.Exit(FAILED)


@app.command("export")
def export(
    since: Annotated[
        str | None, typer.Option(help="From this time on: ISO 8601 in UTC, or the beginning of it.")
    ] = None,
    until: Annotated[str | None, typer.Option(help="Before this time.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only of this tenant.")] = None,
    session: Annotated[str | None, typer.Option(help="Only of this session.")] = None,
    form: Annotated[str, typer.Option("--format", help="jsonl or csv.")] = "jsonl",
    config: ConfigOption = None,
    state_dir: StateOption = None,
) -> None:
    """Print records, oldest first, as they are read."""
    from toolserver.journal import read

    writers = {"jsonl": read.as_json_lines, "csv": read.as_csv}
    if form not in writers:
        fail("--format is jsonl or csv")
    for name, text in (("--since", since), ("--until", until)):
        if text is not None and not _is_time(text):
            fail(f"{name} is a time such as 2026-01-31 or 2026-01-31T12:00:00Z")
    wanted = read.Wanted(
        since.rstrip("Z") if since is not None else None,
        until.rstrip("Z") if until is not None else None,
        tenant,
        session,
    )
    with _journal(config, state_dir) as folder:
        for line in writers[form](read.records(folder, wanted)):
            print(line)


@app.command("tail")
def tail(
    count: Annotated[int, typer.Option("--lines", min=1, max=100_000, help="How many.")] = 20,
    config: ConfigOption = None,
    state_dir: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """The last records."""
    from toolserver.journal.read import last_records

    with _journal(config, state_dir) as folder:
        found = last_records(folder, count)
    show(as_json, {"records": [one.as_json() for one in found]}, lambda: [_line(one) for one in found])


def _line(one: Record) -> str:
    fields = {name: value for name, value in one.fields.items() if name not in ("at", "event") and value is not None}
    told = (f"{name}={value if isinstance(value, str) else _compact(value)}" for name, value in fields.items())
    return " ".join((str(one.seq), str(one.fields["at"]), one.event, *told))


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


@app.command("head")
def head(config: ConfigOption = None, state_dir: StateOption = None, as_json: JsonOption = False) -> None:
    """The number and hash of the last record, to be kept elsewhere and given to `journal verify --head` later."""
    from toolserver.journal.read import last_records

    with _journal(config, state_dir) as folder:
        found = last_records(folder, 2)  # the very last line may be cut
    if not found:
        warn("the journal has no record yet")
        raise typer.Exit(FAILED)
    last = found[-1].head
    show(as_json, {"seq": last.seq, "hash": last.hash, "head": str(last)}, lambda: [str(last)])
