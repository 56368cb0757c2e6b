"""The only way into a sandbox: admit → wait for its turn when the server is full → write down → run → write down → answer.

A call runs in a task of its own: a caller that hangs up, or stops waiting, stops nothing. `(tenant, call_id)` names it,
and the call_id is the caller's Idempotency-Key where there is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from toolserver.calls import failure, idempotency
from toolserver.calls.admission import Admission, draining
from toolserver.calls.answer import Answer
from toolserver.calls.call_journal import CallJournal
from toolserver.calls.carry_on import carry_on
from toolserver.calls.carry_out import carry_out
from toolserver.calls.request import CallRequest
from toolserver.calls.running import RunningCall
from toolserver.calls.stored_answers import StoredAnswers, replay
from toolserver.calls.turns import Turns, wait_unless_gone
from toolserver.catalog.catalog import Catalog
from toolserver.catalog.image import Tool
from toolserver.errors import (
    Code,
    JournalUnavailable,
    RuntimeUnavailable,
    StoreUnavailable,
    ToolServerError,
    runtime_unavailable,
)
from toolserver.sandbox.background import Background
from toolserver.sandbox.tool_sandbox import ToolSandbox
from toolserver.sessions.registry import Registry
from toolserver.sessions.session import Session
from toolserver.settings import CallSettings, QueueSettings
from toolserver.store import calls as rows
from toolserver.store.calls import CallRow
from toolserver.store.database import Database
from toolserver.tenants.quotas import Quotas

_log = logging.getLogger(__name__)


class Executor:
    def __init__(
        self,
        settings: CallSettings,
        registry: Registry,
        catalog: Catalog,
        database: Database,
        *,
        journal: CallJournal,
        quotas: Quotas,
        queue: QueueSettings,
        counted: Callable[[str, str, float], None] = lambda _tool, _code, _seconds: None,
    ) -> None:
        """`counted` is told of each ended call: tool, code (`ok` for a success), seconds."""
        self.settings = settings
        self._registry, self._catalog, self._database, self._counted = registry, catalog, database, counted
        self._journal, self._quotas, self._queue = journal, quotas, queue
        self._tasks = Background()
        self.admission = Admission(settings, catalog, quotas, queue.max_waiting)
        self.stored = StoredAnswers(database, self._tasks, self.admission.forget)
        self._turns = Turns(self.admission, self._tasks, self._begin, self._keep_cancelled)

    async def call(self, request: CallRequest) -> Answer | RunningCall:
        """The answer; or the call itself when it goes on past wait_s. Raises ToolServerError when nothing was run."""
        deadline_s = self.settings.deadline_s if request.deadline_s is None else request.deadline_s
        arguments = idempotency.canonical(request.arguments)
        digest = idempotency.request_hash(request.session_id, request.tool, arguments, request.deadline_s)
        if request.key is not None and (earlier := self.admission.find(request.tenant, request.key)) is not None:
            return await self._join(earlier, digest, request)
        try:
            session = await self._registry.find(request.tenant, request.session_id)
            tool = self.admission.check(session, request)
            deadline_s = min(deadline_s, session.boxes[tool.image].plan.image.deadline_s or deadline_s)
        except ToolServerError as error:
            if error.code is Code.POLICY_DENIED:
                self._journal.denied(request.tenant, request.key_id, request.session_id, request.tool, request.trace_id)
            if request.key is not None and (stored := await self.stored.ended(request.tenant, request.key)) is not None:
                return replay(stored, digest)  # what was done stays known, also when its session is gone
            raise
        call = RunningCall(
            tenant=request.tenant,
            call_id=request.key or idempotency.new_call_id(),
            session=session,
            tool=tool,
            arguments=request.arguments,
            deadline_s=deadline_s,
            request_hash=digest,
            trace_id=request.trace_id,
            key_id=request.key_id,
            arguments_digest=self._journal.digest(arguments),
        )
        self.admission.hold(call)
        if not self.admission.try_place():
            return await self._call_in_turn(call, request)
        stored = await self._begin(call)
        if stored is not None:
            return replay(stored, digest)
        return await self._await(call, request, replay=False)

    async def _call_in_turn(self, call: RunningCall, request: CallRequest) -> Answer | RunningCall:
        """As `call`, for one that has to wait for a place."""
        if request.key is not None:
            try:
                stored = await self.stored.ended(call.tenant, call.call_id)
            except BaseException:
                self._turns.give_up(call, StoreUnavailable("the database can't be read"))
                raise
            if stored is not None:
                self._turns.give_up(call, replay(stored, stored.request_hash))
                return replay(stored, call.request_hash)
        wait_s = self._queue.wait_s if request.wait_s is None else request.wait_s
        self._turns.queue(call, wait_s)
        waiting = self._await(call, request, replay=False)
        return await (
            waiting if request.follow or request.gone is None else wait_unless_gone(call, waiting, request.gone)
        )

    async def _begin(self, call: RunningCall) -> CallRow | None:
        """Write it down and start it; or the row of an earlier call of that name. Raises StoreUnavailable.

        It has its place, which it gives back when it ends.
        """
        row = _row_of(call)
        started = False
        try:
            if not self._registry.use_marks.holds(call.session):
                await self._registry.use_marks.set(call.session)
            earlier = await self._database.write_small(lambda connection: rows.begin(connection, row))
            if earlier is not None:
                call.answer.set_result(replay(earlier, earlier.request_hash))
                return earlier
            await self._journal_begun(call)
            call.task = self._tasks.spawn(self._run(call), f"call {call.call_id}")
            started = True
            return None
        except StoreUnavailable as problem:
            call.answer.set_exception(problem)
            call.answer.exception()
            raise
        finally:
            if not started:
                self.admission.forget(call)
                self.admission.give_place()

    async def _keep_cancelled(self, call: RunningCall, answer: Answer) -> None:
        await self.stored.write_unbegun(_row_of(call), answer)
        self._journal.ended(call, answer.status, str(Code.CANCELLED), 0, 0)

    async def _journal_begun(self, call: RunningCall) -> None:
        """Nothing runs unjournalled. Raises JournalUnavailable: the call is as if it had never come."""
        try:
            self._journal.begun(call)
        except JournalUnavailable:
            with contextlib.suppress(StoreUnavailable):  # then its row says later that nothing can be told of it
                await self._database.write(lambda connection: rows.forget(connection, call.tenant, call.call_id))
            raise

    def take_over(self, left_open: Iterable[CallRow]) -> None:
        """Go on with calls that an earlier server began, of sessions that live: they can be joined, followed and cancelled."""
        for row in left_open:
            session = self._registry.live_session(row.session_id)
            tool = self._tool_of(session, row)
            if session is None or tool is None:  # its image was taken out of the catalog
                self._tasks.spawn(self._leave_unknown(row), f"give up {row.call_id}")
                continue
            call = RunningCall(
                tenant=row.tenant,
                call_id=row.call_id,
                session=session,
                tool=tool,
                arguments={},
                deadline_s=self.settings.deadline_s if row.deadline_s is None else row.deadline_s,
                request_hash=row.request_hash,
                trace_id=row.trace_id,
                left_open=row,
            )
            self._journal.adopted(call)
            self.admission.hold(call)
            self.admission.take_place_anyhow()
            call.task = self._tasks.spawn(self._run(call), f"call {call.call_id} again")

    def _tool_of(self, session: Session | None, row: CallRow) -> Tool | None:
        if session is None:
            return None
        try:
            tool = self._catalog.find(row.tool, session.images)
        except ToolServerError:
            return None
        return tool if tool.image in session.boxes else None

    async def _leave_unknown(self, row: CallRow) -> None:
        answer = Answer.refusal(failure.interrupted(row.call_id), row.trace_id)
        now = time.time()
        with contextlib.suppress(StoreUnavailable):  # the next start does it
            await self._database.write(
                lambda c: rows.end(c, row.tenant, row.call_id, status=answer.status, body=answer.body, ended_at=now)
            )
            self._journal.ended_unknown(row, answer.status, str(Code.OUTCOME_UNKNOWN))

    async def _run(self, call: RunningCall) -> None:
        begun = time.monotonic()
        session = call.session
        code = Code.INTERNAL
        try:
            call.begin_task()
            with call.ended_with_session(), session.in_use():
                session.check_live()
                work = carry_out if call.left_open is None else carry_on
                answer, told = await work(call, self.settings), "ok"
        except ToolServerError as error:
            answer, told = self._refused(call, error)
        except RuntimeUnavailable as problem:
            _log.warning("runtime_unavailable", extra={"fields": {"call_id": call.call_id, "problem": str(problem)}})
            answer, told = self._refused(call, runtime_unavailable(problem, call.call_id))
        except asyncio.CancelledError:
            if call.abort_error is None:
                raise
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            answer, told = self._refused(call, call.abort_error)
        except Exception:  # noqa: BLE001 - the outermost place of a call: its caller must get an answer
            _log.exception("call_failed", extra={"fields": {"call_id": call.call_id}})
            message = "The server failed while it worked on the call; its log says how. The tool may have had effects."
            answer, told = self._refused(call, ToolServerError(code, message, call.call_id))
        call.settling = True
        seconds = time.monotonic() - begun
        if call.left_open is not None:
            seconds = max(seconds, time.time() - call.left_open.created_at)
        await self._settle(call, answer, told, seconds)
        self._counted(call.tool.name, told, seconds)

    def _refused(self, call: RunningCall, error: ToolServerError) -> tuple[Answer, str]:
        return Answer.refusal(error, call.trace_id), str(error.code)

    async def _settle(self, call: RunningCall, answer: Answer, told: str, seconds: float) -> None:
        """Write the answer down, then give it. When it can't be written it is given all the same, and kept to be written later."""
        cpu_ms = _cpu_ms(call, seconds)
        self._quotas.cpu.add(call.tenant, cpu_ms / 1000)
        await self.stored.write(call, answer, cpu_ms)
        self._journal.ended(call, answer.status, told, seconds, cpu_ms)
        if not call.answer.done():
            call.answer.set_result(answer)
        self.admission.give_place()

    async def _join(self, call: RunningCall, digest: str, request: CallRequest) -> Answer | RunningCall:
        if call.request_hash != digest:
            raise idempotency.conflict(call.call_id)
        return await self._await(call, request, replay=True)

    async def _await(self, call: RunningCall, request: CallRequest, *, replay: bool) -> Answer | RunningCall:
        if request.follow:
            answer = await call.wait(0)
        elif request.wait_s is None:
            answer = await call.wait(self.settings.wait_s, self.settings.max_wait_s)
        else:
            answer = await call.wait(request.wait_s)
        if answer is None:
            return call
        return answer.again() if replay else answer

    async def look_up(self, tenant: str, call_id: str, wait_s: float, most_s: float = 0.0) -> Answer | RunningCall:
        """For GET and call_wait; `most_s`: as long while it tells progress. Raises call_not_found, StoreUnavailable."""
        call = self.admission.find(tenant, call_id)
        if call is not None:
            return await call.wait(wait_s, most_s) or call
        row = await self.stored.find(tenant, call_id)
        if row is None:
            raise ToolServerError(
                Code.CALL_NOT_FOUND,
                "There is no call of that call_id. It was never received, or it is so old that it was forgotten.",
            )
        return replay(row, row.request_hash)

    async def sandbox_of(self, tenant: str, call_id: str) -> ToolSandbox | None:
        """The sandbox that worked on an ended call, as long as its session has it. Raises StoreUnavailable."""
        row = await self.stored.find(tenant, call_id)
        session = self._registry.live_session(row.session_id) if row is not None else None
        if row is None or session is None:
            return None
        try:
            box = session.boxes.get(self._catalog.find(row.tool, session.images).image)
        except ToolServerError:  # no tool of the catalog any more
            return None
        return box.live if box is not None else None

    async def drain(
        self, wait_s: float, stop_s: float, stop: Callable[[RunningCall], Coroutine[Any, Any, Any]] | None
    ) -> None:
        """Take no new calls, wait for the running ones, then `stop` those that are left and give them `stop_s` to end."""
        self.admission.draining = True
        self.admission.queue.refuse_all(draining())
        await _all_answered(self.admission.held(), wait_s)
        left = self.admission.held()
        if left and stop is not None:
            await asyncio.wait([self._tasks.spawn(stop(call), f"stop {call.call_id}") for call in left], timeout=stop_s)

    async def leave(self) -> None:
        """Let go of what still runs: the calls stay open for the next server, and who waits here is told how to go on."""
        self.admission.draining = True
        for call in self.admission.held():
            if call.settling or call.answer.done():
                continue
            message = (
                "The call is still running; the server restarts. Call call_wait with its call_id to go on waiting."
            )
            then = {"type": "retry", "next_calling": "call_wait", "arguments": {"call_id": call.call_id}, "content": []}
            error = ToolServerError(Code.STILL_RUNNING, message, call.call_id, retry_after_s=1, extra=then)
            call.answer.set_result(Answer.refusal(error, call.trace_id))
            if call.task is not None:
                call.task.cancel()

    async def close(self) -> None:
        """When all sessions have ended: what still can't be written down is given up."""
        self.stored.give_up()
        await self._tasks.finish(1.0)


def _row_of(call: RunningCall) -> CallRow:
    """Of a call that begins now."""
    return CallRow(
        call.tenant,
        call.call_id,
        call.session.session_id,
        call.tool.name,
        call.request_hash,
        call.trace_id,
        time.time(),
        deadline_s=call.deadline_s,
        generation=call.session.boxes[call.tool.image].first_candidate,
    )


def _cpu_ms(call: RunningCall, seconds: float) -> float:
    """As its sandbox told it; where none did, the most that it can have used: all of its cores, all of the time."""
    told = (call.usage or {}).get("cpu_ms")
    if isinstance(told, int | float) and told >= 0:
        return float(told)
    return seconds * 1000 * call.session.grant.limits.cpus


async def _all_answered(calls: list[RunningCall], wait_s: float) -> None:
    if calls:
        await asyncio.wait([call.answer for call in calls], timeout=wait_s)
