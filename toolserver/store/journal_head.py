"""How far the journal had come: what its files must still hold, noted where they are not."""

from __future__ import annotations

from sqlalchemy import Connection, select

from toolserver.store.schema import meta

_NAME = "journal_head"


def find(connection: Connection) -> str | None:
    return connection.execute(select(meta.c.value).where(meta.c.name == _NAME)).scalar()


def note(connection: Connection, head: str) -> None:
    if connection.execute(meta.update().where(meta.c.name == _NAME).values(value=head)).rowcount == 0:
        connection.execute(meta.insert().values(name=_NAME, value=head))
