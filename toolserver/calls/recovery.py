"""What a start makes of the calls and sessions that an earlier process left open."""

from __future__ import annotations

import time

from sqlalchemy import Connection

from toolserver.calls.answer import Answer
from toolserver.calls.failure import interrupted
from toolserver.store import calls, sandboxes, sessions


def close_left_open(connection: Connection) -> tuple[int, int]:
    """Running calls become outcome_unknown, live sessions are gone (node_lost). How many of each."""
    now = time.time()
    left = calls.running(connection)
    for row in left:
        answer = Answer.refusal(interrupted(row.call_id), row.trace_id)
        calls.end(connection, row.tenant, row.call_id, status=answer.status, body=answer.body, ended_at=now)
    lost = sessions.live(connection)
    for session in lost:
        sessions.end(connection, session.session_id, "node_lost", now)
    sandboxes.purge(connection)
    return len(left), len(lost)
