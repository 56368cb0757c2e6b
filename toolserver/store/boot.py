"""The boot of the machine that the database was used in, and what its clock showed.

Another boot at a start: what the kernel had not written is lost. The same boot and another time of day than the time since
the boot tells: somebody has set the clock, and the times in the store are of the earlier one.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from sqlalchemy import Connection, delete, select

from toolserver.store.schema import meta

_A_JUMP_S = 1.0  # less is drift
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """The same for every process until the machine starts anew; empty where the kernel has none."""
    with contextlib.suppress(OSError):
        return _BOOT_ID.read_text("ascii").strip()
    return ""


def clock_offset() -> float:
    """Seconds from the boot's clock, which nobody sets, to the time of day."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def begin(connection: Connection, boot: str) -> bool:
    """Note it at a start. Whether the server before this one ended with its machine and not in order."""
    earlier = connection.execute(select(meta.c.value).where(meta.c.name == "boot")).scalar()
    end(connection)
    connection.execute(meta.insert().values(name="boot", value=boot))
    return earlier is not None and earlier != boot


def clock_jump(connection: Connection, boot: str, offset: float) -> float:
    """By how many seconds the clock was set since it was noted, in this same boot; notes what it is now."""
    told = connection.execute(select(meta.c.value).where(meta.c.name == "clock")).scalar()
    connection.execute(delete(meta).where(meta.c.name == "clock"))
    connection.execute(meta.insert().values(name="clock", value=f"{boot} {offset!r}"))
    noted_in, _, noted = (told or "").rpartition(" ")
    jump = offset - float(noted) if told is not None and noted_in == boot else 0.0
    return jump if abs(jump) >= _A_JUMP_S else 0.0


def end(connection: Connection) -> None:
    """At an orderly stop, in a durable transaction: nothing is open that a later boot could have lost."""
    connection.execute(delete(meta).where(meta.c.name == "boot"))
