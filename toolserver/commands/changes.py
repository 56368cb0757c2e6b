"""Changes of keys and tenants: in the database and in the journal, or in neither."""

# ruff: noqa: PLC0415 - imports wait for their command
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from toolserver.commands.terminal import with_database

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from toolserver.settings import Settings

T = TypeVar("T")


def change(
    settings: Settings, work: Callable[[Connection], T], record: Callable[[T], tuple[str, dict[str, Any]] | None]
) -> T:
    """Do `work` in one transaction, with the record that `record` makes of its result (None: nothing was changed)."""
    from toolserver.journal.journal import Journal
    from toolserver.journal.segments import folder_of
    from toolserver.store import journal_head
    from toolserver.store.database import Database

    journal = Journal(folder_of(settings.state_dir), settings.journal)

    def job(connection: Connection) -> T:
        done = work(connection)
        told = record(done)
        if told is not None:
            event, fields = told
            journal.append(event, **fields, by="command line")
            journal_head.note(connection, str(journal.head))
        return done

    def run(database: Database) -> T:
        journal.open(whole=False)
        try:
            return database.run(job, durable=True)
        finally:
            journal.close()

    return with_database(settings, run)
