"""Which sessions there are, and how those that are gone came to their end."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, delete, select

from toolserver.store.schema import sessions


@dataclass(frozen=True)
class Tombstone:
    session_id: str
    tenant: str
    cause: str
    ended_at: float


def begin(connection: Connection, session_id: str, tenant: str, created_at: float) -> None:
    connection.execute(sessions.insert().values(session_id=session_id, tenant=tenant, created_at=created_at))


def end(connection: Connection, session_id: str, cause: str, ended_at: float) -> None:
    """The first cause stays."""
    connection.execute(
        sessions.update()
        .where(sessions.c.session_id == session_id, sessions.c.ended_at.is_(None))
        .values(ended_at=ended_at, cause=cause)
    )


def end_all(connection: Connection, cause: str, ended_at: float) -> int:
    """End every live session; how many."""
    update = sessions.update().where(sessions.c.ended_at.is_(None)).values(ended_at=ended_at, cause=cause)
    return connection.execute(update).rowcount


def tombstone(connection: Connection, session_id: str) -> Tombstone | None:
    row = connection.execute(
        select(sessions).where(sessions.c.session_id == session_id, sessions.c.ended_at.is_not(None))
    ).one_or_none()
    return None if row is None else Tombstone(row.session_id, row.tenant, row.cause, row.ended_at)


def purge(connection: Connection, before: float) -> int:
    return connection.execute(delete(sessions).where(sessions.c.ended_at < before)).rowcount
