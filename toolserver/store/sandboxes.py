"""The sandboxes of sessions: written down before a call can reach them, so that a later server finds them again."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from sqlalchemy import Connection, delete, select

from toolserver.store.schema import sandboxes, sessions


@dataclass(frozen=True)
class SandboxRow:
    """The latest sandbox of an image in a session. `spec` and `protocol` are JSON, `started_at` is seconds since 1970.

    `why_cold` is None for one that came from the pool. `generation` counts the sandboxes of that image in that session from 1. The row stays when the sandbox is gone, until
    there is a next one: so it is known which sandbox a call can have been sent to.
    """

    sandbox_id: str
    session_id: str
    image: str
    handle: str
    spec: str
    protocol: str
    generation: int
    started_at: float
    why_cold: str | None = None


def put(connection: Connection, row: SandboxRow) -> None:
    """In place of the one before it."""
    connection.execute(
        delete(sandboxes).where(sandboxes.c.session_id == row.session_id, sandboxes.c.image == row.image)
    )
    connection.execute(sandboxes.insert().values(asdict(row)))


def of_live_sessions(connection: Connection) -> list[SandboxRow]:
    live = select(sessions.c.session_id).where(sessions.c.ended_at.is_(None))
    return [SandboxRow(*row) for row in connection.execute(select(sandboxes).where(sandboxes.c.session_id.in_(live)))]


def forget(connection: Connection, session_id: str) -> None:
    connection.execute(delete(sandboxes).where(sandboxes.c.session_id == session_id))


def purge(connection: Connection) -> int:
    """Forget those of sessions that are not live: ended, or never made whole."""
    live = select(sessions.c.session_id).where(sessions.c.ended_at.is_(None))
    return connection.execute(delete(sandboxes).where(sandboxes.c.session_id.not_in(live))).rowcount
