"""What a start finds of the servers before it: live sessions, their sandboxes, and calls that were left open."""

from __future__ import annotations

import time
from dataclasses import dataclass

from sqlalchemy import Connection

from toolserver.calls.answer import Answer
from toolserver.calls.failure import interrupted
from toolserver.store import calls, epoch, sandboxes, sessions
from toolserver.store.calls import CallRow
from toolserver.store.sandboxes import SandboxRow
from toolserver.store.sessions import SessionRow


@dataclass(frozen=True)
class LeftOpen:
    """`epoch` is that of the server that starts; `calls` are those whose session lives."""

    epoch: int
    sessions: list[SessionRow]
    sandboxes: list[SandboxRow]
    calls: list[CallRow]


def take_stock(connection: Connection) -> LeftOpen:
    """Begin a new epoch. Calls whose session is gone become outcome_unknown."""
    now = time.time()
    live = sessions.live(connection)
    alive = {row.session_id for row in live}
    open_calls = calls.running(connection)
    for row in open_calls:
        if row.session_id not in alive:
            answer = Answer.refusal(interrupted(row.call_id), row.trace_id)
            calls.end(connection, row.tenant, row.call_id, status=answer.status, body=answer.body, ended_at=now)
    sandboxes.purge(connection)
    return LeftOpen(
        epoch.advance(connection),
        live,
        sandboxes.of_live_sessions(connection),
        [row for row in open_calls if row.session_id in alive],
    )
