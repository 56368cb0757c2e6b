"""Calls: written down before their tool runs, and with their answer afterwards. (tenant, call_id) names one for good."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, bindparam, delete, select
from sqlalchemy.dialects import postgresql, sqlite

from toolserver.store.schema import calls

NOT_HELD = frozenset({404, 422, 429, 503})  # answers that say that nothing ran: the name may be used again


@dataclass(frozen=True)
class CallRow:
    """One call. `status` and `body` are None while it runs.

    `generation` is the first sandbox of its image in its session that it can have been sent to.
    """

    tenant: str
    call_id: str
    session_id: str
    tool: str
    request_hash: str
    trace_id: str
    created_at: float
    ended_at: float | None = None
    status: int | None = None
    body: bytes | None = None
    deadline_s: float | None = None
    generation: int | None = None
    cpu_ms: float | None = None


_NEW = ("tenant", "call_id", "session_id", "tool", "request_hash", "trace_id", "created_at", "deadline_s", "generation")
_FIND = select(calls).where(calls.c.tenant == bindparam("t"), calls.c.call_id == bindparam("c"))
_END = (
    calls.update()
    .where(calls.c.tenant == bindparam("t"), calls.c.call_id == bindparam("c"), calls.c.ended_at.is_(None))
    .values({name: bindparam(name) for name in ("status", "body", "ended_at", "cpu_ms")})
)

# the two statements of each call, as texts for the driver: SQLAlchemy's own way costs twice what they do
_INSERT_TEXT, _END_TEXT = {}, {}
for _kind, _paramstyle in ((sqlite, "named"), (postgresql, "pyformat")):
    _dialect = _kind.dialect(paramstyle=_paramstyle)
    _insert = _kind.insert(calls).values({name: bindparam(name) for name in _NEW}).on_conflict_do_nothing()
    _INSERT_TEXT[_dialect.name] = str(_insert.compile(dialect=_dialect))
    _END_TEXT[_dialect.name] = str(_END.compile(dialect=_dialect))


def _carry_out(connection: Connection, texts: dict[str, str], values: dict[str, Any]) -> int:
    """In the connection's transaction; how many rows it was. Raises what the driver raises."""
    cursor = connection.connection.cursor()
    try:
        cursor.execute(texts[connection.dialect.name], values)
        return cursor.rowcount
    finally:
        cursor.close()


def find(connection: Connection, tenant: str, call_id: str) -> CallRow | None:
    row = connection.execute(_FIND, {"t": tenant, "c": call_id}).one_or_none()
    return None if row is None else CallRow(*row)


def begin(connection: Connection, row: CallRow) -> CallRow | None:
    """Write a new call down. When one of that name may have run already, nothing is written and that one is the answer."""
    values = {name: getattr(row, name) for name in _NEW}
    if _carry_out(connection, _INSERT_TEXT, values) == 1:
        return None
    earlier = find(connection, row.tenant, row.call_id)
    if earlier is None or earlier.status not in NOT_HELD:
        return earlier
    connection.execute(delete(calls).where(calls.c.tenant == row.tenant, calls.c.call_id == row.call_id))
    _carry_out(connection, _INSERT_TEXT, values)
    return None


def end(
    connection: Connection,
    tenant: str,
    call_id: str,
    *,
    status: int,
    body: bytes,
    ended_at: float,
    cpu_ms: float | None = None,
) -> None:
    """The first answer stays. `cpu_ms` counts against the tenant's quota."""
    values = {"status": status, "body": body, "ended_at": ended_at, "cpu_ms": cpu_ms}
    _carry_out(connection, _END_TEXT, {"t": tenant, "c": call_id, **values})


def forget(connection: Connection, tenant: str, call_id: str) -> None:
    """Of a call that is known not to have run: its name is free again."""
    connection.execute(delete(calls).where(calls.c.tenant == tenant, calls.c.call_id == call_id))


def running(connection: Connection) -> list[CallRow]:
    return [CallRow(*row) for row in connection.execute(select(calls).where(calls.c.ended_at.is_(None)))]


def purge(connection: Connection, before: float) -> int:
    return connection.execute(delete(calls).where(calls.c.ended_at < before)).rowcount
