"""`tools/list` and `tools/call`, the same for every revision: through the desk that the HTTP contract's calls go through."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from toolserver.api import mcp_elicitation, mcp_results, wire
from toolserver.api.answers import json_answer
from toolserver.api.events import ByteStream, left
from toolserver.api.mcp_messages import Rpc, fault_of, invalid_params, reply
from toolserver.api.mcp_revisions import Revision
from toolserver.api.mcp_rooms import Rooms
from toolserver.api.mcp_told import Asked, Flight, Told, stamped
from toolserver.api.services import Services, caller, services
from toolserver.calls.answer import Answer
from toolserver.calls.idempotency import KEY_FORM, is_key
from toolserver.calls.request import CallRequest
from toolserver.calls.running import RunningCall
from toolserver.catalog.image import Tool
from toolserver.catalog.session_tools import CALL_ANSWER, SESSION_TOOLS
from toolserver.errors import Code, ToolServerError, invalid
from toolserver.sessions.session import Session
from toolserver.store.keys import Key
from toolserver.telemetry.trace import about, trace_id

LIST_FRESH_MS = 60_000  # how long a client of the stateless revision may keep a list
_PLAIN_S = 0.5  # a call that ends within it is answered without a stream
_SESSION_TOOLS = frozenset(tool.name for tool in SESSION_TOOLS)
T = TypeVar("T")


def tools_of(crib: Services, session: Session | None) -> list[Tool]:
    """What can be called: in a session, the tools of its images."""
    return [*crib.catalog.tools(None if session is None else session.images), *SESSION_TOOLS]


def listing(crib: Services, rpc: Rpc, revision: Revision, session: Session | None) -> dict[str, Any]:
    """The result of `tools/list`. Raises RpcFault."""
    tools, more = mcp_results.page(tools_of(crib, session), rpc.params.get("cursor"), crib.settings.mcp.page_tools)
    told: dict[str, Any] = {"tools": [mcp_results.shown(tool, revision) for tool in tools]}
    if more is not None:
        told["nextCursor"] = more
    if revision.stateless:
        told |= {"ttlMs": LIST_FRESH_MS, "cacheScope": "private"}
    return stamped(revision, told)


@dataclass
class Calls:
    """One `tools/call`, from its request to its answer. `name`: of the client's session, with the `labels` of a new one."""

    request: Request
    rooms: Rooms
    rpc: Rpc
    revision: Revision
    name: str
    labels: dict[str, str]
    log_level: int | None
    elicits: frozenset[str]
    flight: Flight

    async def begin(self) -> Told:
        """Raises ToolServerError, RpcFault and what else an endpoint may: nothing was run."""
        crib, key, rpc = services(self.request), caller(self.request, "use"), self.rpc
        tool, arguments = rpc.params.get("name"), rpc.params.get("arguments", {})
        if not isinstance(tool, str):
            raise invalid_params("params.name must be the name of a tool.")
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            raise invalid("/arguments", "must be an object")
        deadline_s, idempotency_key = _terms(rpc, crib.settings.call.max_deadline_s)
        if tool not in _SESSION_TOOLS:
            crib.catalog.find(tool, None)  # a name that nothing has makes no session
        room = await self.rooms.enter(crib, key, self.name, self.labels)
        about(session_id=room.session.session_id)
        call = CallRequest(
            tenant=key.tenant,
            session_id=room.session.session_id,
            tool=tool,
            arguments=arguments,
            trace_id=trace_id(),
            deadline_s=deadline_s,
            key=idempotency_key,
            key_id=key.key_id,
        )
        state = rpc.params.get("requestState") if self.revision.stateless else None
        came = await crib.calls.begin(call) if state is None else await _again(crib, call, state, rpc.params)
        if isinstance(came, RunningCall) and tool not in _SESSION_TOOLS:
            self.flight.call_id = came.call_id
            if self.flight.cancelled:
                cancel_soon(crib, key, came.call_id)
        asked = Asked(crib, key, self.revision, rpc.id, rpc.progress_token, self.log_level, self.elicits)
        return Told(asked, came, self.flight, room, crib.calls.patience_s(call))

    async def respond(self) -> Response:
        """As one JSON answer when it ends soon and its client wants to hear nothing before; else as a stream."""
        try:
            told = await self.begin()
        except Exception as problem:  # noqa: BLE001 - judged by what it means: a model is told of some of them
            return json_answer(refused(problem, self.rpc, self.revision))
        asked, came = told.asked, told.came
        if isinstance(came, RunningCall) and not asked.listens:
            await self._unless_left(came, came.wait(_PLAIN_S))
        if not isinstance(came, RunningCall) or (came.answer.done() and not asked.listens):
            answer = came.answer.result() if isinstance(came, RunningCall) else came
            return _one(None if self.flight.cancelled else told.last(answer))
        try:
            asked.crib.streams.take(asked.key.tenant)
        except ToolServerError:  # the call runs: its answer comes whole
            return _one(await self._unless_left(came, told.whole()))
        return ByteStream(told.written(), asked.crib.streams, asked.key.tenant, {}, on_leave=lambda: self._left(came))

    async def _unless_left(self, call: RunningCall, work: Coroutine[Any, Any, T]) -> T | None:
        """What the work gives; None when the client goes before."""
        working, leaving = asyncio.create_task(work), asyncio.create_task(left(self.request.receive))
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
        finally:
            for task in (working, leaving):
                task.cancel()
            await asyncio.wait({working, leaving})
        self._left(call)
        return None

    def _left(self, call: RunningCall) -> None:
        """In the stateless revision a client cancels by closing its stream; in the others that means nothing."""
        call.left()
        if self.revision.stateless and self.flight.call_id is not None:
            cancel_soon(services(self.request), caller(self.request, "use"), self.flight.call_id)


def _one(message: dict[str, Any] | None) -> Response:
    """None: the request was cancelled, or its client is gone."""
    return Response(status_code=202) if message is None else json_answer(message)


async def _again(crib: Services, call: CallRequest, state: Any, params: dict[str, Any]) -> Answer | RunningCall:
    """The call that waits for an answer of its user, with the answers that came. Raises RpcFault, ToolServerError."""
    read = mcp_elicitation.again(state, params.get("inputResponses"))
    if read is None:
        raise invalid_params("params.requestState is not one of this server's.")
    call_id, answer = read
    came = await crib.calls.find(call.tenant, call_id)
    if isinstance(came, RunningCall):
        if came.tool.name != call.tool or came.session.session_id != call.session_id:
            raise invalid_params("params.requestState is that of another call.")
        if answer is not None:
            await settle(crib, call, answer)
    return came


async def settle(crib: Services, of: CallRequest, answer: dict[str, Any]) -> None:
    """Give an answer to the question of a call in the session of `of`; one that can't be taken dismisses the question.

    Raises ToolServerError when there is no such call.
    """
    telling = replace(of, tool=CALL_ANSWER.name, arguments=answer, key=None)
    try:
        await crib.calls.begin(telling)
    except ToolServerError as problem:
        if problem.code is not Code.INVALID_ARGUMENTS:
            raise
        dismissal = {name: answer[name] for name in ("call_id", "elicitation_id")} | {"action": "cancel"}
        with contextlib.suppress(ToolServerError):  # it asks nothing now
            await crib.calls.begin(replace(telling, arguments=dismissal))


def cancel_soon(crib: Services, key: Key, call_id: str) -> None:
    async def cancel() -> None:
        with contextlib.suppress(ToolServerError):  # it has ended
            await crib.calls.cancel(key.tenant, call_id)

    crib.registry.background.spawn(cancel(), f"cancel {call_id}")


def refused(problem: Exception, rpc: Rpc, revision: Revision) -> dict[str, Any]:
    """The answer to a call that was refused before anything was run."""
    fault = fault_of(problem, rpc, status=200)
    detail = fault.data
    if isinstance(detail, dict) and "fault" in detail and mcp_results.tells_model(detail, revision):
        made = mcp_results.result(Answer.of(422, {"detail": detail}), revision, None)
        return reply(rpc.id, stamped(revision, made or {}))
    return fault.as_json()


def _terms(rpc: Rpc, max_deadline_s: float) -> tuple[float | None, str | None]:
    """The deadline and the idempotency key of a call, which clients that know this server may give. Raises invalid_arguments."""
    deadline_s, key = rpc.meta.get("toolcrib/deadline_s"), rpc.meta.get("toolcrib/idempotency_key")
    if deadline_s is not None:
        if errors := wire.beyond({"deadline_s": deadline_s}, [("/deadline_s", max_deadline_s)]):
            raise invalid("/_meta/toolcrib~1deadline_s", errors[0]["message"])
        if not isinstance(deadline_s, int | float) or isinstance(deadline_s, bool) or deadline_s <= 0:
            raise invalid("/_meta/toolcrib~1deadline_s", "must be a number of seconds above 0")
    if key is not None and not (isinstance(key, str) and is_key(key)):
        raise invalid("/_meta/toolcrib~1idempotency_key", KEY_FORM)
    return deadline_s, key
