"""Answers in the database: written when a call ends, or as soon as the database takes them, and given again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from sqlalchemy import Connection

from toolserver.calls import failure, idempotency
from toolserver.calls.answer import Answer
from toolserver.calls.running import RunningCall
from toolserver.errors import StoreUnavailable
from toolserver.sandbox.background import Background
from toolserver.store import calls as rows
from toolserver.store.calls import CallRow
from toolserver.store.database import Database

_RETRY_WRITE_S = 2.0
_SMALL_BYTES = 64 << 10
_log = logging.getLogger(__name__)


class StoredAnswers:
    def __init__(self, database: Database, tasks: Background, written: Callable[[RunningCall], None]) -> None:
        """`written` is told of each call whose answer is stored."""
        self._database, self._tasks, self._written = database, tasks, written
        self._unwritten: set[tuple[str, str]] = set()

    @property
    def unwritten(self) -> int:
        """Outcomes that could not be stored yet."""
        return len(self._unwritten)

    async def find(self, tenant: str, call_id: str) -> CallRow | None:
        """Raises StoreUnavailable."""
        return await self._database.read(lambda connection: rows.find(connection, tenant, call_id))

    async def ended(self, tenant: str, call_id: str) -> CallRow | None:
        """The row of a call that has ended, unless it says that nothing ran. Raises StoreUnavailable."""
        row = await self.find(tenant, call_id)
        return row if row is not None and row.status is not None and row.status not in rows.NOT_HELD else None

    async def write(self, call: RunningCall, answer: Answer, cpu_ms: float) -> None:
        """When it can't be written now it is kept, and written later."""
        try:
            await self._write(call, answer, cpu_ms)
        except StoreUnavailable as problem:
            _log.error("outcome_not_written", extra={"fields": {"call_id": call.call_id, "problem": str(problem)}})
            self._unwritten.add((call.tenant, call.call_id))
            self._tasks.spawn(self._write_later(call, answer, cpu_ms), f"write {call.call_id}")
        else:
            self._written(call)

    async def _write(self, call: RunningCall, answer: Answer, cpu_ms: float) -> None:
        ended_at = time.time()

        def end(connection: Connection) -> None:
            if not call.received:
                rows.forget(connection, call.tenant, call.call_id)
                return
            rows.end(
                connection,
                call.tenant,
                call.call_id,
                status=answer.status,
                body=answer.body,
                ended_at=ended_at,
                cpu_ms=cpu_ms,
            )

        small = len(answer.body) <= _SMALL_BYTES
        await (self._database.write_small(end) if small else self._database.write(end))

    async def write_unbegun(self, row: CallRow, answer: Answer) -> None:
        """Of a call that was cancelled before its turn came. When it can't be written its name is free again."""

        def begin_and_end(connection: Connection) -> None:
            if rows.begin(connection, row) is None:
                at = row.created_at
                rows.end(connection, row.tenant, row.call_id, status=answer.status, body=answer.body, ended_at=at)

        try:
            await self._database.write_small(begin_and_end)
        except StoreUnavailable as problem:
            _log.error("outcome_not_written", extra={"fields": {"call_id": row.call_id, "problem": str(problem)}})

    async def _write_later(self, call: RunningCall, answer: Answer, cpu_ms: float) -> None:
        while True:
            await asyncio.sleep(_RETRY_WRITE_S)
            try:
                await self._write(call, answer, cpu_ms)
            except StoreUnavailable:
                continue
            self._unwritten.discard((call.tenant, call.call_id))
            self._written(call)
            return

    def give_up(self) -> None:
        """At the end of the server: what still can't be written down is said in the log."""
        for _, call_id in self._unwritten:
            _log.error("outcome_lost", extra={"fields": {"call_id": call_id}})


def replay(row: CallRow, digest: str) -> Answer:
    """The answer of an earlier call to one with this request hash. Raises idempotency_conflict."""
    if row.request_hash != digest:
        raise idempotency.conflict(row.call_id)
    if row.status is None or row.body is None:
        # it is nobody's: whoever ran it is gone without a word
        return Answer.refusal(failure.interrupted(row.call_id), row.trace_id).again()
    return Answer(row.status, row.body).again()
