"""From the tables of an earlier version to those of this one, in one transaction with the new version's number.

    1 → 2   sessions that outlive the server: their grant, workspace and sandboxes are stored. What version 1 left live has
            none of it and is gone.
    2 → 3   what a loss of power takes is told: sessions in use have the boot of the machine beside them.
A step only adds tables and columns that may be NULL, so that it is quick and works the same on every database.
"""

from __future__ import annotations

import time

from sqlalchemy import Connection, Table, inspect
from sqlalchemy.schema import CreateColumn

from toolserver.store import schema


def migrate(connection: Connection, version: int) -> None:
    """From `version` to the newest. The caller's transaction makes it all or nothing."""
    schema.metadata.create_all(connection)  # those that are missing
    for table in schema.metadata.sorted_tables:
        _add_columns(connection, table)
    if version < 2:
        live = schema.sessions.update().where(schema.sessions.c.ended_at.is_(None))
        connection.execute(live.values(ended_at=time.time(), cause="node_lost"))
    newest = str(schema.SCHEMA_VERSION)
    connection.execute(schema.meta.update().where(schema.meta.c.name == "schema_version").values(value=newest))


def _add_columns(connection: Connection, table: Table) -> None:
    have = {column["name"] for column in inspect(connection).get_columns(table.name)}
    quoted = connection.dialect.identifier_preparer.format_table(table)
    for column in table.columns:
        if column.name not in have:
            told = CreateColumn(column).compile(dialect=connection.dialect)
            connection.exec_driver_sql(f"ALTER TABLE {quoted} ADD COLUMN {told}")
