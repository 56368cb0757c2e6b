"""Tool images that were added: what the operator granted, and what was approved. A counter tells a running server of changes."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, select

from toolserver.store.schema import meta, tool_images

_COUNTER = "tool_images_version"


@dataclass(frozen=True)
class Approval:
    """What was looked at and approved. listed: entries of `tools/list`. names: what its tools are called here, by its own names."""

    reference: str
    digest: str
    listed: list[dict[str, Any]]
    names: dict[str, str]
    era: str | None
    at: float


@dataclass(frozen=True)
class Drift:
    """What was found in place of what was approved; None for what is as it was."""

    digest: str | None = None
    listed: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class ToolImageRow:
    """`entry` as ToolEntry has it; None: it stands in the settings."""

    name: str
    entry: dict[str, Any] | None
    added_at: float
    approval: Approval | None = None
    drift: Drift | None = None


def version(connection: Connection) -> int:
    """Another number after each change that a running server has to take up."""
    return int(connection.execute(select(meta.c.value).where(meta.c.name == _COUNTER)).scalar() or 0)


def listing(connection: Connection) -> list[ToolImageRow]:
    """All, in the order in which they were added."""
    rows = connection.execute(select(tool_images).order_by(tool_images.c.added_at, tool_images.c.name)).mappings()
    return [_row(row) for row in rows]


def find(connection: Connection, name: str) -> ToolImageRow | None:
    row = connection.execute(select(tool_images).where(tool_images.c.name == name)).mappings().one_or_none()
    return None if row is None else _row(row)


def put(connection: Connection, name: str, entry: dict[str, Any] | None, approval: Approval | None) -> ToolImageRow:
    """Add it, or put it in the place of the one of that name, whose time of being added stays."""
    earlier = find(connection, name)
    values: dict[str, Any] = {"entry": None if entry is None else json.dumps(entry), **_values(approval), "drift": None}
    if earlier is None:
        connection.execute(tool_images.insert().values(name=name, added_at=time.time(), **values))
    else:
        connection.execute(tool_images.update().where(tool_images.c.name == name).values(**values))
    _count(connection)
    made = find(connection, name)
    if made is None:  # pragma: no cover - it was written above
        raise LookupError(name)
    return made


def note_drift(connection: Connection, name: str, drift: Drift) -> None:
    """It is not offered until it is approved again. No counter: whoever noted it has taken it out already."""
    told = json.dumps({"digest": drift.digest, "listed": drift.listed})
    connection.execute(tool_images.update().where(tool_images.c.name == name).values(drift=told))


def learn_era(connection: Connection, name: str, era: str) -> None:
    connection.execute(tool_images.update().where(tool_images.c.name == name).values(era=era))


def remove(connection: Connection, name: str) -> bool:
    """Whether it was there."""
    gone = connection.execute(delete(tool_images).where(tool_images.c.name == name)).rowcount > 0
    if gone:
        _count(connection)
    return gone


def _count(connection: Connection) -> None:
    earlier = version(connection)
    if earlier:
        connection.execute(meta.update().where(meta.c.name == _COUNTER).values(value=str(earlier + 1)))
    else:
        connection.execute(meta.insert().values(name=_COUNTER, value="1"))


def _values(approval: Approval | None) -> dict[str, Any]:
    if approval is None:
        return dict.fromkeys(("reference", "digest", "listed", "names", "era", "approved_at"))
    return {
        "reference": approval.reference,
        "digest": approval.digest,
        "listed": json.dumps(approval.listed),
        "names": json.dumps(approval.names),
        "era": approval.era,
        "approved_at": approval.at,
    }


def _row(row: Any) -> ToolImageRow:
    approval = None
    if row["approved_at"] is not None:
        listed, names = json.loads(row["listed"]), json.loads(row["names"])
        approval = Approval(row["reference"], row["digest"], listed, names, row["era"], row["approved_at"])
    entry = None if row["entry"] is None else json.loads(row["entry"])
    drift = None if row["drift"] is None else Drift(**json.loads(row["drift"]))
    return ToolImageRow(row["name"], entry, row["added_at"], approval, drift)
