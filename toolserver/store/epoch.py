"""The server's epoch: how many times it has been started on this database. It tells a sandbox which server is the later one."""

from __future__ import annotations

from sqlalchemy import Connection, select

from toolserver.store.schema import meta


def advance(connection: Connection) -> int:
    """The next epoch, from 1."""
    told = connection.execute(select(meta.c.value).where(meta.c.name == "epoch")).scalar()
    if told is None:
        connection.execute(meta.insert().values(name="epoch", value="1"))
        return 1
    epoch = int(told) + 1
    connection.execute(meta.update().where(meta.c.name == "epoch").values(value=str(epoch)))
    return epoch
