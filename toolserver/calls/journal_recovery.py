"""What a start writes into the journal of calls that an earlier process stored an outcome of and did not journal."""

from __future__ import annotations

import json

from sqlalchemy import Connection

from toolserver.errors import Code
from toolserver.journal.journal import Journal
from toolserver.store import calls


def close_gaps(connection: Connection, journal: Journal, *, machine_lost: bool) -> int:
    """A record for each call that began and whose end the journal lacks, but for those that still run; how many.

    Raises JournalUnavailable.
    """
    # a row that is missing was taken back, and the call not run; unless the machine went with rows that it had not written
    missing = Code.OUTCOME_UNKNOWN if machine_lost else "not_run"
    count = 0
    for call in list(journal.open_calls):
        row = calls.find(connection, call.tenant, call.call_id)
        if row is not None and row.ended_at is None:
            continue
        fields: dict[str, object] = {"status": None, "code": str(missing)}
        if row is not None:
            fields = {"session_id": row.session_id, "tool": row.tool, "trace_id": row.trace_id, "status": row.status}
            fields |= {"code": _code(row.status, row.body), "cpu_ms": row.cpu_ms}
        journal.append("call_ended", tenant=call.tenant, call_id=call.call_id, **fields, recovered=True)
        count += 1
    return count


def _code(status: int | None, body: bytes | None) -> str:
    if status == 200:
        return "ok"
    try:
        return str(json.loads(body or b"")["detail"]["code"])
    except (ValueError, KeyError, TypeError):
        return "unknown"
