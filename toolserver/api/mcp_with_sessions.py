"""/mcp in the revisions 2025-03-26 to 2025-11-25: initialize, then requests within an MCP session, and a stream for changes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from toolserver.api.answers import json_answer
from toolserver.api.events import ByteStream
from toolserver.api.mcp_calls import Calls, cancel_soon, listing, refused, settle, tools_of
from toolserver.api.mcp_elicitation import answer_of
from toolserver.api.mcp_listen import changes
from toolserver.api.mcp_messages import (
    INVALID_REQUEST,
    Rpc,
    RpcFault,
    fault_of,
    invalid_params,
    method_not_found,
    note,
    read,
    reply,
)
from toolserver.api.mcp_revisions import CAPABILITIES, instructions, server_info
from toolserver.api.mcp_rooms import Rooms
from toolserver.api.mcp_sessions import McpSession, McpSessions
from toolserver.api.mcp_told import Flight, event, resume
from toolserver.api.services import Phase, Services, caller, services
from toolserver.calls.news import LOG_LEVELS
from toolserver.calls.request import CallRequest
from toolserver.catalog.image import Tool
from toolserver.errors import ToolServerError
from toolserver.store.keys import Key
from toolserver.telemetry.trace import trace_id

_MAX_BATCH = 32
_CLOSE_S = 0.01


class WithSessions:
    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._sessions = McpSessions(rooms)

    # -- POST

    async def post(self, request: Request, body: Any) -> Response:
        """Raises RpcFault."""
        if isinstance(body, list):
            return await self._batch(request, body)
        rpc = read(body)
        if rpc.kind == "request" and rpc.method == "initialize":
            return self._initialize(request, rpc)
        session = self._session(request, rpc)
        if rpc.kind != "request":
            await self._take_note(request, session, rpc)
            return Response(status_code=202)
        if rpc.method == "tools/call":
            calls = self._call(request, session, rpc)
            try:
                return await calls.respond()
            finally:
                self._landed(request, session, rpc, calls.flight)
        return json_answer(self._answer(request, session, rpc))

    def _session(self, request: Request, rpc: Rpc | None) -> McpSession:
        given = request.headers.get("mcp-session-id")
        if given is None:
            told = "The header Mcp-Session-Id is missing. Send initialize first; its answer has one."
            raise RpcFault(INVALID_REQUEST, told, id=rpc.id if rpc else None)
        return self._sessions.find(services(request), caller(request, "read"), given)

    def _initialize(self, request: Request, rpc: Rpc) -> Response:
        crib, key = services(request), caller(request, "read")
        requested = rpc.params.get("protocolVersion")
        if not isinstance(requested, str):
            raise RpcFault(-32602, "params.protocolVersion must be a text.", id=rpc.id)
        if "mcp-session-id" in request.headers:
            raise RpcFault(INVALID_REQUEST, "initialize begins a session: send it without Mcp-Session-Id.", id=rpc.id)
        session = self._sessions.begin(key, requested, rpc.params)
        told = {
            "protocolVersion": session.revision.name,
            "capabilities": CAPABILITIES,
            "serverInfo": server_info(),
            "instructions": instructions(crib.settings.session.idle_s),
        }
        return json_answer(reply(rpc.id, told), headers={"Mcp-Session-Id": session.session_id})

    def _answer(self, request: Request, session: McpSession, rpc: Rpc) -> dict[str, Any]:
        """Of all requests but `tools/call`."""
        crib, key = services(request), caller(request, "read")
        try:
            match rpc.method:
                case "ping":
                    return reply(rpc.id, {})
                case "tools/list":
                    room = self._sessions.room_of(crib, key, session)
                    return reply(rpc.id, listing(crib, rpc, session.revision, room))
                case "logging/setLevel":
                    level = rpc.params.get("level")
                    if level not in LOG_LEVELS:
                        raise invalid_params(f"params.level must be one of {', '.join(LOG_LEVELS)}.")
                    session.log_level = LOG_LEVELS.index(level)
                    return reply(rpc.id, {})
                case "initialize":
                    raise RpcFault(INVALID_REQUEST, "initialize must not be part of a batch.")
                case _:
                    raise method_not_found(rpc, 200)
        except RpcFault as fault:
            return fault_of(fault, rpc).as_json()

    def _call(self, request: Request, session: McpSession, rpc: Rpc) -> Calls:
        """Raises RpcFault: another request with that id is not answered yet."""
        if rpc.id is None or rpc.id in session.flights:
            raise RpcFault(INVALID_REQUEST, "Another request with this id is not answered yet.", id=rpc.id)
        flight = session.flights[rpc.id] = Flight()
        name, level, elicits = session.session_id, session.log_level, session.elicits
        return Calls(request, self._rooms, rpc, session.revision, name, session.labels, level, elicits, flight)

    def _landed(self, request: Request, session: McpSession, rpc: Rpc, flight: Flight) -> None:
        """The request is over when its call is, whether or not its client is still there."""

        def forget(_ended: object = None) -> None:
            if rpc.id is not None and session.flights.get(rpc.id) is flight:
                del session.flights[rpc.id]

        crib, key = services(request), caller(request, "read")
        if (room := self._sessions.room_of(crib, key, session)) is not None:
            session.room = room.session_id
        call = None if flight.call_id is None else crib.calls.running(key.tenant, flight.call_id)
        if call is None:
            forget()
        else:
            call.answer.add_done_callback(forget)

    async def _take_note(self, request: Request, session: McpSession, rpc: Rpc) -> None:
        """Of notifications and responses; those that mean nothing here are passed over."""
        if rpc.kind == "response":
            await self._take_answer(request, session, rpc)
        if rpc.method != "notifications/cancelled":
            return
        wanted = rpc.params.get("requestId")
        flight = session.flights.get(wanted) if isinstance(wanted, str | int) else None
        if flight is not None:
            flight.cancelled = True
            if flight.call_id is not None:
                cancel_soon(services(request), caller(request, "use"), flight.call_id)

    async def _take_answer(self, request: Request, session: McpSession, rpc: Rpc) -> None:
        """To what a tool asked."""
        crib, key, answer = services(request), caller(request, "use"), answer_of(rpc)
        room = self._sessions.room_of(crib, key, session)
        if answer is None or room is None:
            return
        of = CallRequest(key.tenant, room.session_id, "", {}, trace_id(), key_id=key.key_id)
        with contextlib.suppress(ToolServerError):  # the call has ended
            await settle(crib, of, answer)

    # -- several messages in one body

    async def _batch(self, request: Request, body: list[Any]) -> Response:
        session = self._session(request, None)
        if not session.revision.batches:
            raise RpcFault(INVALID_REQUEST, f"The revision {session.revision.name} has no batches: send one message.")
        if not 0 < len(body) <= _MAX_BATCH:
            raise RpcFault(INVALID_REQUEST, f"A batch has 1 to {_MAX_BATCH} messages.")
        rpcs = [read(message) for message in body]
        asked = [rpc for rpc in rpcs if rpc.kind == "request"]
        if len({rpc.id for rpc in asked}) < len(asked):
            raise RpcFault(INVALID_REQUEST, "Two requests of the batch have the same id.")
        for rpc in rpcs:
            if rpc.kind != "request":
                await self._take_note(request, session, rpc)
        if not asked:
            return Response(status_code=202)
        answers = await asyncio.gather(*(self._answer_of_batch(request, session, rpc) for rpc in asked))
        told = [answer for answer in answers if answer is not None]
        return json_answer(told) if told else Response(status_code=202)

    async def _answer_of_batch(self, request: Request, session: McpSession, rpc: Rpc) -> dict[str, Any] | None:
        if rpc.method != "tools/call":
            return self._answer(request, session, rpc)
        calls: Calls | None = None
        try:
            calls = self._call(request, session, rpc)
            return await (await calls.begin()).whole()
        except Exception as problem:  # noqa: BLE001 - each message of a batch has an answer of its own
            return refused(problem, rpc, session.revision)
        finally:
            if calls is not None:
                self._landed(request, session, rpc, calls.flight)

    # -- GET and DELETE

    async def get(self, request: Request) -> Response:
        """A stream again after `Last-Event-ID`; without it, one for changes. Raises RpcFault."""
        session = self._session(request, None)
        if last_event := request.headers.get("last-event-id"):
            return await resume(request, session.revision, session.elicits, last_event)
        crib, key = services(request), caller(request, "read")
        crib.listeners.take(key.tenant)
        return ByteStream(self._changes(crib, key, session), crib.listeners, key.tenant, {})

    async def _changes(self, crib: Services, key: Key, session: McpSession) -> AsyncIterator[bytes]:
        session.listener += 1
        mine = session.listener

        def tools() -> list[Tool]:
            return tools_of(crib, self._sessions.room_of(crib, key, session))

        def goes_on() -> bool:
            gone = session.room is not None and self._sessions.room_of(crib, key, session) is None
            taken_over = session.listener != mine
            return not (gone or taken_over or session.ended or crib.readiness.phase is Phase.DRAINING)

        session.listeners += 1
        try:
            yield event(None)
            async for changed in changes(tools, goes_on):
                yield event(note("notifications/tools/list_changed") if changed else None)
        finally:
            session.listeners -= 1

    async def delete(self, request: Request) -> Response:
        """Raises RpcFault."""
        session = self._session(request, None)
        await self._sessions.end(services(request), caller(request, "read"), session, _CLOSE_S)
        return Response(status_code=204)
