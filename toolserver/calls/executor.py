"""The only way into a sandbox: admit → wait for its turn when the server is full → write down → run → write down → answer.

A call runs in a task of its own: a caller that hangs up, or stops waiting, stops nothing. `(tenant, call_id)` names it,
and the call_id is the caller's Idempotency-Key where there is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from toolserver.calls import failure, idempotency
from toolserver.calls.answer import Answer
from toolserver.calls.call_journal import CallJournal
from toolserver.calls.carry_on import carry_on
from toolserver.calls.carry_out import carry_out
from toolserver.calls.running import RunningCall
from toolserver.catalog import arguments as schema_check
from toolserver.catalog.catalog import Catalog
from toolserver.catalog.image import Tool
from toolserver.errors import (
    Code,
    JournalUnavailable,
    RuntimeUnavailable,
    StoreUnavailable,
    ToolServerError,
    invalid_all,
    runtime_unavailable,
)
from toolserver.sandbox.background import Background
from toolserver.sandbox.tool_sandbox import ToolSandbox
from toolserver.sessions.registry import Registry
from toolserver.sessions.session import Ending, Session
from toolserver.settings import CallSettings, QueueSettings
from toolserver.store import calls as rows
from toolserver.store.calls import CallRow
from toolserver.store.database import Database
from toolserver.telemetry.trace import about
from toolserver.tenants.fair_queue import FairQueue
from toolserver.tenants.quotas import Quotas

_RETRY_WRITE_S = 2.0
_SMALL_BYTES = 64 << 10
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CallRequest:
    """One request to call a tool. `key` is the Idempotency-Key; times in seconds, None: the server's own.

    `key_id` names the API key. `gone` makes something to await that ends when the caller hangs up. `follow`: nothing is waited
    for, since its caller follows it by events; wait_s bounds only how long it waits for its turn.
    """

    tenant: str
    session_id: str
    tool: str
    arguments: Any
    trace_id: str
    wait_s: float | None = None
    deadline_s: float | None = None
    key: str | None = None
    key_id: str | None = None
    gone: Callable[[], Coroutine[Any, Any, None]] | None = None
    follow: bool = False


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
        most = f"The server is full: {settings.max_running} calls run at once, its limit."
        self.queue = FairQueue(most, queue.max_waiting)
        self._places = 0  # taken by calls that run
        self._running: dict[tuple[str, str], RunningCall] = {}
        self._per_session: Counter[str] = Counter()
        self._per_tenant: Counter[str] = Counter()
        self._unwritten: dict[tuple[str, str], tuple[RunningCall, Answer]] = {}
        self._tasks = Background()
        self.draining = False

    def running(self) -> list[RunningCall]:
        return list(self._running.values())

    @property
    def unwritten(self) -> int:
        """Outcomes that could not be stored yet."""
        return len(self._unwritten)

    def running_in(self, session_id: str) -> int:
        """How many calls run in a session now."""
        return self._per_session[session_id]

    def find_running(self, tenant: str, call_id: str) -> RunningCall | None:
        return self._running.get((tenant, call_id))

    async def call(self, request: CallRequest) -> Answer | RunningCall:
        """The answer; or the call itself when it goes on past wait_s. Raises ToolServerError when nothing was run."""
        deadline_s = self.settings.deadline_s if request.deadline_s is None else request.deadline_s
        arguments = idempotency.canonical(request.arguments)
        digest = idempotency.request_hash(request.session_id, request.tool, arguments, request.deadline_s)
        if request.key is not None and (earlier := self._running.get((request.tenant, request.key))) is not None:
            return await self._join(earlier, digest, request)
        try:
            session = await self._registry.find(request.tenant, request.session_id)
            tool = self._admit(session, request)
        except ToolServerError as error:
            if error.code is Code.POLICY_DENIED:
                self._journal.denied(request.tenant, request.key_id, request.session_id, request.tool, request.trace_id)
            if request.key is not None and (stored := await self._stored(request.tenant, request.key)) is not None:
                return _replay(stored, digest)  # what was done stays known, also when its session is gone
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
        self._hold(call)
        if not self.queue.try_now(self._take_place):
            return await self._call_in_turn(call, request)
        stored = await self._begin(call)
        if stored is not None:
            return _replay(stored, digest)
        return await self._await(call, request, replay=False)

    def _take_place(self) -> bool:
        if self._places >= self.settings.max_running:
            return False
        self._places += 1
        return True

    def _give_place(self) -> None:
        self._places -= 1
        self.queue.serve()

    async def _call_in_turn(self, call: RunningCall, request: CallRequest) -> Answer | RunningCall:
        """As `call`, for one that has to wait for a place. It waits by itself: who has its key may join it, or cancel it."""
        if request.key is not None:
            try:
                stored = await self._stored(call.tenant, call.call_id)
            except BaseException:
                self._give_up(call, StoreUnavailable("the database can't be read"))
                raise
            if stored is not None:
                self._give_up(call, _replay(stored, stored.request_hash))
                return _replay(stored, call.request_hash)
        wait_s = self._queue.wait_s if request.wait_s is None else request.wait_s
        call.queued = True
        call.task = self._tasks.spawn(self._wait_for_turn(call, wait_s), f"queue {call.call_id}")
        return await self._await_queued(call, request)

    async def _await_queued(self, call: RunningCall, request: CallRequest) -> Answer | RunningCall:
        """A caller that hangs up leaves the queue, unless another one waits for the same call."""
        if request.follow or request.gone is None:
            return await self._await(call, request, replay=False)
        waiting = asyncio.ensure_future(self._await(call, request, replay=False))
        gone = asyncio.ensure_future(request.gone())
        try:
            await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                waiting.cancel()
                await asyncio.wait({waiting})
                call.left()
                return call
            return waiting.result()
        finally:
            waiting.cancel()
            gone.cancel()

    async def _wait_for_turn(self, call: RunningCall, wait_s: float) -> None:
        """Wait for the call's turn, then begin it; or answer why not."""
        try:
            with _told_of_end(call):
                await self.queue.wait(call.tenant, self._take_place, self._give_place, wait_s)
            call.queued = False
            await self._begin(call)
        except ToolServerError as error:
            error.call_id = call.call_id
            self._give_up(call, self._refused(call, error)[0])
        except StoreUnavailable as problem:
            _log.warning("call_not_begun", extra={"fields": {"call_id": call.call_id, "problem": str(problem)}})
        except asyncio.CancelledError:
            if call.abort_error is None:
                self._give_up(call, asyncio.CancelledError())
                raise
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            call.abort_error.effects = "none"
            self._give_up(call, self._refused(call, call.abort_error)[0])

    def _give_up(self, call: RunningCall, told: Answer | BaseException) -> None:
        """Of a call that never ran: its name is free again."""
        call.queued = False
        self._forget(call)
        if call.answer.done():
            return
        if isinstance(told, Answer):
            call.answer.set_result(told)
        elif isinstance(told, asyncio.CancelledError):
            call.answer.cancel()
        else:
            call.answer.set_exception(told)
            call.answer.exception()  # nobody may be waiting for it

    def _admit(self, session: Session, request: CallRequest) -> Tool:
        """Raises tool_not_found, invalid_arguments, policy_denied, draining, quota_exceeded: nothing is held against the key."""
        tool = self._catalog.find(request.tool, session.images)
        if errors := schema_check.check(tool, request.arguments):
            raise invalid_all([{**error, "pointer": "/arguments" + error["pointer"]} for error in errors])
        image = self._catalog.images[tool.image]
        if image.network == "open" and session.grant.egress != "open":
            raise ToolServerError(
                Code.POLICY_DENIED,
                f"The tool {tool.name} needs the network, and this session has none. Create a session with "
                '{"egress": {"mode": "open"}} and call it there.',
            )
        if self.draining:
            raise draining()
        session.check_not_restoring()
        most = self.settings.max_concurrent_per_session
        if (running := self._per_session[session.session_id]) >= most:
            raise ToolServerError(
                Code.QUOTA_EXCEEDED,
                f"{most} calls run in this session already, its limit. Wait until one has ended.",
                extra={"quota": "session_calls", "used": running, "limit": most, "left": 0, "asked": 1},
            )
        self._quotas.check_call(request.tenant, self._per_tenant[request.tenant])
        return tool

    def _hold(self, call: RunningCall) -> None:
        """Before it is written down: a second request with its key joins this one."""
        about(call_id=call.call_id)
        self._running[(call.tenant, call.call_id)] = call
        self._per_session[call.session.session_id] += 1
        self._per_tenant[call.tenant] += 1

    async def _begin(self, call: RunningCall) -> CallRow | None:
        """Write it down and start it; or the row of an earlier call of that name. Raises StoreUnavailable.

        It has its place, which it gives back when it ends.
        """
        row = CallRow(
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
        started = False
        try:
            earlier = await self._database.write_small(lambda connection: rows.begin(connection, row))
            if earlier is not None:
                call.answer.set_result(_replay(earlier, earlier.request_hash))
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
                self._forget(call)
                self._give_place()

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
            self._hold(call)
            self._places += 1  # whatever the bounds are now
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
            with _told_of_end(call), session.in_use():
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
        try:
            await self._write(call, answer, cpu_ms)
        except StoreUnavailable as problem:
            _log.error("outcome_not_written", extra={"fields": {"call_id": call.call_id, "problem": str(problem)}})
            self._unwritten[(call.tenant, call.call_id)] = (call, answer)
            self._tasks.spawn(self._write_later(call, answer, cpu_ms), f"write {call.call_id}")
        else:
            self._forget(call)
        self._journal.ended(call, answer.status, told, seconds, cpu_ms)
        if not call.answer.done():
            call.answer.set_result(answer)
        self._give_place()

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

    async def _write_later(self, call: RunningCall, answer: Answer, cpu_ms: float) -> None:
        while True:
            await asyncio.sleep(_RETRY_WRITE_S)
            try:
                await self._write(call, answer, cpu_ms)
            except StoreUnavailable:
                continue
            self._unwritten.pop((call.tenant, call.call_id), None)
            self._forget(call)
            return

    def _forget(self, call: RunningCall) -> None:
        if self._running.get((call.tenant, call.call_id)) is call:
            del self._running[(call.tenant, call.call_id)]
            self._per_session[call.session.session_id] -= 1
            if self._per_session[call.session.session_id] <= 0:
                del self._per_session[call.session.session_id]
            self._per_tenant[call.tenant] -= 1
            if self._per_tenant[call.tenant] <= 0:
                del self._per_tenant[call.tenant]

    async def _join(self, call: RunningCall, digest: str, request: CallRequest) -> Answer | RunningCall:
        if call.request_hash != digest:
            raise idempotency.conflict(call.call_id)
        return await self._await(call, request, replay=True)

    async def _await(self, call: RunningCall, request: CallRequest, *, replay: bool) -> Answer | RunningCall:
        wait_s = self.settings.wait_s if request.wait_s is None else request.wait_s
        answer = await call.wait(0 if request.follow else wait_s)
        if answer is None:
            return call
        return answer.again() if replay else answer

    async def _stored(self, tenant: str, call_id: str) -> CallRow | None:
        """The row of a call that has ended, unless it says that nothing ran."""
        row = await self._database.read(lambda connection: rows.find(connection, tenant, call_id))
        return row if row is not None and row.status is not None and row.status not in rows.NOT_HELD else None

    async def look_up(self, tenant: str, call_id: str, wait_s: float) -> Answer | RunningCall:
        """For GET and call_wait. Raises call_not_found, StoreUnavailable."""
        call = self._running.get((tenant, call_id))
        if call is not None:
            return await call.wait(wait_s) or call
        row = await self._database.read(lambda connection: rows.find(connection, tenant, call_id))
        if row is None:
            raise ToolServerError(
                Code.CALL_NOT_FOUND,
                "There is no call of that call_id. It was never received, or it is so old that it was forgotten.",
            )
        return _replay(row, row.request_hash)

    async def sandbox_of(self, tenant: str, call_id: str) -> ToolSandbox | None:
        """The sandbox that worked on an ended call, as long as its session has it. Raises StoreUnavailable."""
        row = await self._database.read(lambda connection: rows.find(connection, tenant, call_id))
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
        self.draining = True
        self.queue.refuse_all(draining())
        await _all_answered(self.running(), wait_s)
        left = self.running()
        if left and stop is not None:
            await asyncio.wait([self._tasks.spawn(stop(call), f"stop {call.call_id}") for call in left], timeout=stop_s)

    async def leave(self) -> None:
        """Let go of what still runs: the calls stay open for the next server, and who waits here is told how to go on."""
        self.draining = True
        for call in self.running():
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
        """When all sessions have ended: what still can't be written down is given up, said in the log."""
        for call_id in [call_id for _, call_id in self._unwritten]:
            _log.error("outcome_lost", extra={"fields": {"call_id": call_id}})
        await self._tasks.finish(1.0)


def draining() -> ToolServerError:
    return ToolServerError(
        Code.DRAINING, "The server is shutting down and takes no new calls. Try again when it is back."
    )


@contextlib.contextmanager
def _told_of_end(call: RunningCall) -> Iterator[None]:
    """Within it the end of the session ends the call."""

    def on_end(ending: Ending) -> None:
        error = ending.error(call.session.session_id)
        error.call_id, error.effects = call.call_id, "possible"
        call.abort(error)

    call.session.watchers.add(on_end)
    try:
        yield
    finally:
        call.session.watchers.discard(on_end)


def _cpu_ms(call: RunningCall, seconds: float) -> float:
    """As its sandbox told it; where none did, the most that it can have used: all of its cores, all of the time."""
    told = (call.usage or {}).get("cpu_ms")
    if isinstance(told, int | float) and told >= 0:
        return float(told)
    return seconds * 1000 * call.session.grant.limits.cpus


async def _all_answered(calls: list[RunningCall], wait_s: float) -> None:
    if calls:
        await asyncio.wait([call.answer for call in calls], timeout=wait_s)


def _replay(row: CallRow, digest: str) -> Answer:
    """Raises idempotency_conflict."""
    if row.request_hash != digest:
        raise idempotency.conflict(row.call_id)
    if row.status is None or row.body is None:
        # it is nobody's: whoever ran it is gone without a word
        return Answer.refusal(failure.interrupted(row.call_id), row.trace_id).again()
    return Answer(row.status, row.body).again()
