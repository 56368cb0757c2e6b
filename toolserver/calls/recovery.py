"""What a start finds of the servers before it: live sessions, their sandboxes, and calls that were left open."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from sqlalchemy import Connection

from toolserver.calls.answer import Answer
from toolserver.calls.failure import interrupted
from toolserver.sessions.session import new_session_id
from toolserver.store import boot, calls, epoch, sandboxes, sessions
from toolserver.store.calls import CallRow
from toolserver.store.sandboxes import SandboxRow
from toolserver.store.sessions import SessionRow


@dataclass(frozen=True)
class LeftOpen:
    """`epoch` is that of the server that starts; `calls` are those whose session lives.

    `machine_lost`: the server before this one ended with its machine, so that its last writes may be missing.
    `succeeded`: sessions that were in use then, each with the one that has its workspace now.
    """

    epoch: int
    sessions: list[SessionRow]
    sandboxes: list[SandboxRow]
    calls: list[CallRow]
    machine_lost: bool = False
    succeeded: list[tuple[SessionRow, SessionRow]] = field(default_factory=list)


def take_stock(connection: Connection, this_boot: str) -> LeftOpen:
    """Begin a new epoch, in a durable transaction. Calls whose session is gone become outcome_unknown.

    A session that was in use when its machine went ends, for calls of it may have run that the store has lost, and whoever
    sends one again must not run it twice. Its workspace goes on in a session of another name.
    """
    now = time.time()
    if jump := boot.clock_jump(connection, this_boot, boot.clock_offset()):
        sessions.shift(connection, jump)
    machine_lost = boot.begin(connection, this_boot)
    succeeded = [
        (row, sessions.succeed(connection, row, new_session_id(), this_boot, now))
        for row in sessions.live(connection)
        if row.used_in_boot not in (None, this_boot)
    ]
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
        machine_lost,
        succeeded,
    )
