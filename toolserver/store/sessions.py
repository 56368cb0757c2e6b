"""Which sessions there are, and how those that are gone came to their end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from sqlalchemy import Connection, delete, select

from toolserver.store.schema import sessions


@dataclass(frozen=True)
class Tombstone:
    session_id: str
    tenant: str
    cause: str
    ended_at: float


@dataclass(frozen=True)
class SessionRow:
    """A live session. Times are seconds since 1970; `grant_json` is what it was granted, its environment included."""

    session_id: str
    tenant: str
    created_at: float
    workspace_id: str
    grant_json: str
    expires_at: float
    last_used_at: float


_LIVE = tuple(sessions.c[field.name] for field in fields(SessionRow))


def begin(connection: Connection, row: SessionRow) -> None:
    connection.execute(sessions.insert().values(asdict(row)))


def live(connection: Connection) -> list[SessionRow]:
    rows = connection.execute(select(*_LIVE).where(sessions.c.ended_at.is_(None)).order_by(sessions.c.created_at))
    return [SessionRow(*row) for row in rows]


def used(connection: Connection, last_used: Mapping[str, float]) -> None:
    """Note when sessions were used last."""
    for session_id, at in last_used.items():
        connection.execute(sessions.update().where(sessions.c.session_id == session_id).values(last_used_at=at))


def end(connection: Connection, session_id: str, cause: str, ended_at: float) -> None:
    """The first cause stays. Its environment is forgotten."""
    connection.execute(
        sessions.update()
        .where(sessions.c.session_id == session_id, sessions.c.ended_at.is_(None))
        .values(ended_at=ended_at, cause=cause, grant_json=None)
    )


def tombstone(connection: Connection, session_id: str) -> Tombstone | None:
    row = connection.execute(
        select(sessions).where(sessions.c.session_id == session_id, sessions.c.ended_at.is_not(None))
    ).one_or_none()
    return None if row is None else Tombstone(row.session_id, row.tenant, row.cause, row.ended_at)


def purge(connection: Connection, before: float) -> int:
    return connection.execute(delete(sessions).where(sessions.c.ended_at < before)).rowcount
