"""Which sessions there are, and how those that are gone came to their end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace

from sqlalchemy import Connection, delete, select

from toolserver.store.schema import sessions, snapshots


@dataclass(frozen=True)
class Tombstone:
    session_id: str
    tenant: str
    cause: str
    ended_at: float
    successor: str | None = None


@dataclass(frozen=True)
class SessionRow:
    """A live session. Times are seconds since 1970; `grant_json` is what it was granted, its environment included.

    `used_in_boot`: the boot of the machine in which it has calls that may not be on the disk yet; None: all of them are.
    """

    session_id: str
    tenant: str
    created_at: float
    workspace_id: str
    grant_json: str
    expires_at: float
    last_used_at: float
    used_in_boot: str | None = None


_LIVE = tuple(sessions.c[field.name] for field in fields(SessionRow))


def begin(connection: Connection, row: SessionRow) -> None:
    connection.execute(sessions.insert().values(asdict(row)))


def live(connection: Connection) -> list[SessionRow]:
    rows = connection.execute(select(*_LIVE).where(sessions.c.ended_at.is_(None)).order_by(sessions.c.created_at))
    return [SessionRow(*row) for row in rows]


def shift(connection: Connection, seconds: float) -> None:
    """The clock was set by so much: live sessions go on with the time that they had left."""
    moved = {name: sessions.c[name] + seconds for name in ("created_at", "expires_at", "last_used_at")}
    connection.execute(sessions.update().where(sessions.c.ended_at.is_(None)).values(moved))


def regrant(connection: Connection, session_id: str, grant_json: str) -> None:
    """Of a live session."""
    live_one = (sessions.c.session_id == session_id) & sessions.c.ended_at.is_(None)
    connection.execute(sessions.update().where(live_one).values(grant_json=grant_json))


def used(connection: Connection, last_used: Mapping[str, float]) -> None:
    """Note when sessions were used last."""
    for session_id, at in last_used.items():
        connection.execute(sessions.update().where(sessions.c.session_id == session_id).values(last_used_at=at))


def mark(connection: Connection, session_ids: Iterable[str], boot: str | None) -> None:
    """In a durable transaction: with `boot` before a call may run, with None when all calls before it are on the disk."""
    changed = sessions.update().where(sessions.c.session_id.in_(list(session_ids)))
    connection.execute(changed.values(used_in_boot=boot))


def unmark_all(connection: Connection) -> None:
    connection.execute(sessions.update().where(sessions.c.used_in_boot.is_not(None)).values(used_in_boot=None))


def succeed(connection: Connection, row: SessionRow, successor: str, boot: str, at: float) -> SessionRow:
    """End a session whose machine went, and hand its workspace and its snapshots to another one. Returns that one."""
    end(connection, row.session_id, "node_lost", at)
    ended = sessions.update().where(sessions.c.session_id == row.session_id)
    connection.execute(ended.values(successor=successor, used_in_boot=None))
    following = replace(row, session_id=successor, used_in_boot=boot)
    begin(connection, following)
    mine = snapshots.update().where(snapshots.c.tenant == row.tenant, snapshots.c.session_id == row.session_id)
    connection.execute(mine.values(session_id=successor))
    return following


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
    return None if row is None else Tombstone(row.session_id, row.tenant, row.cause, row.ended_at, row.successor)


def purge(connection: Connection, before: float) -> int:
    return connection.execute(delete(sessions).where(sessions.c.ended_at < before)).rowcount
