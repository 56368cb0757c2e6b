"""Tenants whose bounds are their own; of all others the settings' hold."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, delete, func, select

from toolserver.store.schema import calls, keys, sessions, tenants

LIMITS = ("sessions", "calls", "memory_mb", "disk_mb", "cpu_s")


@dataclass(frozen=True)
class TenantRow:
    """`limits` has a value for each name of LIMITS; None: the server's settings hold."""

    tenant: str
    limits: Mapping[str, float | None]
    changed_at: float


def listing(connection: Connection) -> list[TenantRow]:
    rows = connection.execute(select(tenants).order_by(tenants.c.tenant)).mappings()
    return [TenantRow(row["tenant"], {name: row[f"max_{name}"] for name in LIMITS}, row["changed_at"]) for row in rows]


def find(connection: Connection, tenant: str) -> TenantRow | None:
    return next((row for row in listing(connection) if row.tenant == tenant), None)


def change(connection: Connection, tenant: str, limits: Mapping[str, float | None]) -> TenantRow:
    """Set those that are named; None takes the settings' value again. The others stay."""
    earlier = find(connection, tenant)
    values = {f"max_{name}": value for name, value in limits.items()}
    now = time.time()
    if earlier is None:
        connection.execute(tenants.insert().values(tenant=tenant, changed_at=now, **values))
    else:
        connection.execute(tenants.update().where(tenants.c.tenant == tenant).values(changed_at=now, **values))
    changed = find(connection, tenant)
    if changed is None or any(value is not None for value in changed.limits.values()):
        return changed or TenantRow(tenant, dict.fromkeys(LIMITS), now)
    connection.execute(delete(tenants).where(tenants.c.tenant == tenant))  # it has nothing of its own any more
    return changed


def names(connection: Connection) -> list[str]:
    """All tenants that have a key, a live session, or bounds of their own."""
    live = select(sessions.c.tenant).where(sessions.c.ended_at.is_(None))
    return sorted(connection.execute(select(keys.c.tenant).union(select(tenants.c.tenant), live)).scalars())


def cpu_used(connection: Connection, since: float, slot_s: float) -> list[tuple[str, float, float]]:
    """Of the calls that ended after `since`: tenant, a time within the slot, CPU seconds in that slot."""
    slot = func.round(calls.c.ended_at / slot_s)
    rows = connection.execute(
        select(calls.c.tenant, func.max(calls.c.ended_at), func.sum(calls.c.cpu_ms))
        .where(calls.c.ended_at > since, calls.c.cpu_ms.is_not(None))
        .group_by(calls.c.tenant, slot)
        .order_by(func.max(calls.c.ended_at))
    )
    return [(tenant, at, cpu_ms / 1000) for tenant, at, cpu_ms in rows]


def used(connection: Connection, since: float) -> dict[str, dict[str, float]]:
    """By quota and tenant: live sessions, calls that run, CPU seconds of calls that ended after `since`."""
    live = select(sessions.c.tenant, func.count()).where(sessions.c.ended_at.is_(None)).group_by(sessions.c.tenant)
    running = select(calls.c.tenant, func.count()).where(calls.c.ended_at.is_(None)).group_by(calls.c.tenant)
    cpu = (
        select(calls.c.tenant, func.sum(calls.c.cpu_ms) / 1000.0)
        .where(calls.c.ended_at > since)
        .group_by(calls.c.tenant)
    )
    return {
        name: {tenant: value or 0 for tenant, value in connection.execute(query)}
        for name, query in (("sessions", live), ("calls", running), ("cpu_s", cpu))
    }
