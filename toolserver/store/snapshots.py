"""Which session has which snapshots. What is in them is in the tenant's BlobStore."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from sqlalchemy import Connection, delete, func, select

from toolserver.store.schema import sessions, snapshots


@dataclass(frozen=True)
class SnapshotRow:
    """`bytes`: the sizes of its files; `left_out`: how many FIFOs, sockets and devices it does not hold."""

    tenant: str
    session_id: str
    snapshot_id: str
    created_at: float
    files: int
    bytes: int
    left_out: int


_COLUMNS = tuple(snapshots.c[field.name] for field in fields(SnapshotRow))


def _is(row: SnapshotRow) -> tuple[object, ...]:
    return (
        snapshots.c.tenant == row.tenant,
        snapshots.c.session_id == row.session_id,
        snapshots.c.snapshot_id == row.snapshot_id,
    )


def add(connection: Connection, row: SnapshotRow) -> None:
    """One that the session has already becomes its newest."""
    connection.execute(delete(snapshots).where(*_is(row)))  # type: ignore[arg-type]
    connection.execute(snapshots.insert().values(asdict(row)))


def remove(connection: Connection, tenant: str, session_id: str, snapshot_id: str) -> bool:
    """Whether there was one."""
    row = SnapshotRow(tenant, session_id, snapshot_id, 0, 0, 0, 0)
    return connection.execute(delete(snapshots).where(*_is(row))).rowcount > 0  # type: ignore[arg-type]


def of_session(connection: Connection, tenant: str, session_id: str) -> list[SnapshotRow]:
    """Oldest first."""
    query = select(*_COLUMNS).where(snapshots.c.tenant == tenant, snapshots.c.session_id == session_id)
    return [SnapshotRow(*row) for row in connection.execute(query.order_by(snapshots.c.created_at))]


def find(connection: Connection, tenant: str, snapshot_id: str) -> SnapshotRow | None:
    """Of whichever session of the tenant."""
    query = select(*_COLUMNS).where(snapshots.c.tenant == tenant, snapshots.c.snapshot_id == snapshot_id).limit(1)
    row = connection.execute(query).one_or_none()
    return None if row is None else SnapshotRow(*row)


def ids(connection: Connection, tenant: str) -> list[str]:
    query = select(snapshots.c.snapshot_id).where(snapshots.c.tenant == tenant).distinct()
    return [str(row[0]) for row in connection.execute(query)]


def tenants(connection: Connection) -> list[str]:
    return [str(row[0]) for row in connection.execute(select(snapshots.c.tenant).distinct())]


def count(connection: Connection) -> int:
    return int(connection.execute(select(func.count()).select_from(snapshots)).scalar() or 0)


def expire(connection: Connection, now: float, keep_s: float) -> int:
    """Forget those whose session ended more than `keep_s` ago; how many. A session that is forgotten itself ended now at the latest."""
    open_ones = select(snapshots.c.session_id).where(snapshots.c.session_ended_at.is_(None)).distinct()
    for (session_id,) in connection.execute(open_ones).all():
        row = connection.execute(select(sessions.c.ended_at).where(sessions.c.session_id == session_id)).one_or_none()
        ended_at = now if row is None else row[0]
        if ended_at is not None:
            mine = snapshots.update().where(snapshots.c.session_id == session_id)
            connection.execute(mine.values(session_ended_at=ended_at))
    return connection.execute(delete(snapshots).where(snapshots.c.session_ended_at < now - keep_s)).rowcount
