"""Which sessions are marked as in use on the disk itself, so that a start after a loss of power knows whose calls it may have lost.

Calls are committed without waiting for the disk, so the last ones may be missing then, and a call that is sent again would run
twice. A mark costs one wait for the disk where a session begins to be used, not one for each call.
"""

from __future__ import annotations

from collections.abc import Iterable

from toolserver.sessions.session import Session
from toolserver.store import sessions as rows
from toolserver.store.database import Database


class UseMarks:
    """`boot` names the present boot of the machine; `marked` are sessions whose row has it, or gets it with the row."""

    def __init__(self, database: Database, boot: str) -> None:
        self._database, self.boot = database, boot
        self.marked: set[str] = set()

    def holds(self, session: Session) -> bool:
        return session.session_id in self.marked

    async def set(self, session: Session) -> None:
        """Before a call of it may run. Raises StoreUnavailable: then it must not."""
        name = session.session_id
        await self._database.write(lambda connection: rows.mark(connection, [name], self.boot), durable=True)
        if session.ending is None:
            self.marked.add(name)

    async def clear(self, rested: Iterable[Session]) -> None:
        """Of sessions without use for a while: their calls are on the disk with this. Raises StoreUnavailable: they stay marked.

        A call that comes meanwhile sets the mark anew, which the one thread that writes does afterwards.
        """
        names = [session.session_id for session in rested if self.holds(session)]
        if names:
            self.marked.difference_update(names)
            await self._database.write(lambda connection: rows.mark(connection, names, None), durable=True)
