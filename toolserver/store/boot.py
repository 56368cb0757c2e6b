"""The boot of the machine that the database was used in. Another one at a start: what the kernel had not written is lost."""

from __future__ import annotations

import contextlib
from pathlib import Path

from sqlalchemy import Connection, delete, select

from toolserver.store.schema import meta

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """The same for every process until the machine starts anew; empty where the kernel has none."""
    with contextlib.suppress(OSError):
        return _BOOT_ID.read_text("ascii").strip()
    return ""


def begin(connection: Connection, boot: str) -> bool:
    """Note it at a start. Whether the server before this one ended with its machine and not in order."""
    earlier = connection.execute(select(meta.c.value).where(meta.c.name == "boot")).scalar()
    end(connection)
    connection.execute(meta.insert().values(name="boot", value=boot))
    return earlier is not None and earlier != boot


def end(connection: Connection) -> None:
    """At an orderly stop, in a durable transaction: nothing is open that a later boot could have lost."""
    connection.execute(delete(meta).where(meta.c.name == "boot"))
