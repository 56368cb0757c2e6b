"""What the calls journal holds of a call: who, what, when and how it ended. Never its arguments, its output or its environment."""

from __future__ import annotations

from typing import Any

from toolserver.calls.running import RunningCall
from toolserver.errors import JournalUnavailable
from toolserver.journal.digest import ArgumentsDigest
from toolserver.journal.journal import Journal, OpenCall
from toolserver.store.calls import CallRow


class CallJournal:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._digest: ArgumentsDigest | None = None

    def open(self) -> None:
        """Raises JournalUnavailable."""
        try:
            self._digest = ArgumentsDigest(self._journal.folder)
        except OSError as problem:
            raise JournalUnavailable(f"its key can't be read or made: {problem.strerror or problem}") from problem

    def digest(self, arguments: str) -> str:
        """Of arguments as canonical JSON. Raises JournalUnavailable."""
        if self._digest is None:
            raise JournalUnavailable("the journal is closed")
        return self._digest(arguments)

    def denied(self, tenant: str, key_id: str | None, session_id: str, tool: str, trace_id: str) -> None:
        """Of a call that policy did not let begin. Raises JournalUnavailable."""
        self._journal.append(
            "call_denied", tenant=tenant, key_id=key_id, session_id=session_id, tool=tool, trace_id=trace_id
        )

    def begun(self, call: RunningCall) -> None:
        """Raises JournalUnavailable: then it must not run."""
        image = call.session.boxes[call.tool.image].plan.image
        self._journal.append(
            "call_begun",
            **_who(call),
            image=image.reference,
            arguments_digest=call.arguments_digest,
            deadline_s=call.deadline_s,
        )

    def adopted(self, call: RunningCall) -> None:
        """Of a call that an earlier server began. Where that one died before it journalled it, its beginning is added."""
        known = OpenCall(call.tenant, call.call_id)
        if known in self._journal.open_calls:
            call.key_id = self._journal.open_calls[known]
        else:
            self._journal.append_surely("call_begun", **_who(call), recovered=True)

    def ended_unknown(self, row: CallRow, status: int, code: str) -> None:
        """Of a call of an earlier server that nobody can tell anything of."""
        who = {"tenant": row.tenant, "session_id": row.session_id, "call_id": row.call_id, "tool": row.tool}
        self._journal.append_surely(
            "call_ended", **who, trace_id=row.trace_id, status=status, code=code, recovered=True
        )

    def ended(self, call: RunningCall, status: int, code: str, seconds: float, cpu_ms: float) -> None:
        """`code` is `ok` for a success. Where it can't be written now it is kept, and nothing new begins before it is."""
        fields: dict[str, Any] = {"status": status, "code": code}
        if (cause := _cause(call, code)) is not None:
            fields["cause"] = cause
        self._journal.append_surely(
            "call_ended", **_who(call), **fields, wall_ms=round(seconds * 1000, 1), cpu_ms=round(cpu_ms, 1)
        )


def _who(call: RunningCall) -> dict[str, Any]:
    return {
        "tenant": call.tenant,
        "key_id": call.key_id,
        "session_id": call.session.session_id,
        "call_id": call.call_id,
        "tool": call.tool.name,
        "trace_id": call.trace_id,
    }


def _cause(call: RunningCall, code: str) -> str | None:
    if code == "session_gone" and call.session.ending is not None:
        return call.session.ending.cause
    return call.cancelled_by if code == "cancelled" else None
