"""What an MCP client is told of its call: messages while it runs, its answer, and the stream of both, which can be taken up again."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from toolserver.api import mcp_elicitation, mcp_results
from toolserver.api.events import QUIET, ByteStream
from toolserver.api.mcp_messages import INVALID_REQUEST, RpcFault, RpcId, fault_of, is_id, note, reply
from toolserver.api.mcp_revisions import META_SERVER, Revision, server_info
from toolserver.api.mcp_rooms import Room
from toolserver.api.services import Services, caller, services
from toolserver.calls.answer import Answer, encode_body
from toolserver.calls.idempotency import is_key
from toolserver.calls.news import LOG_LEVELS
from toolserver.calls.running import RunningCall
from toolserver.errors import Code, ToolServerError
from toolserver.store.keys import Key

_MAX_MARK = 4096
_OUTPUT_LEVEL = LOG_LEVELS.index("info")
_COME_BACK_MS = 500  # after which a client that lost its stream asks for the rest
_ANEW = "[The session before this call was closed; a new one was begun: its files and interpreter state are gone.]"


@dataclass
class Flight:
    """A request for a call that runs. `call_id`: once it is known. `cancelled`: nothing more is sent for it."""

    call_id: str | None = None
    cancelled: bool = False


@dataclass(frozen=True)
class Asked:
    """Who asked, and how it is to be answered.

    `log_level`: its place in LOG_LEVELS, None: no messages of the log. `elicits`: the modes in which its client asks a user.
    """

    crib: Services
    key: Key
    revision: Revision
    rpc_id: RpcId | None
    token: RpcId | None = None
    log_level: int | None = None
    elicits: frozenset[str] = frozenset()

    @property
    def listens(self) -> bool:
        """Whether it wants to be told anything before the end."""
        return self.token is not None or self.log_level is not None

    @property
    def hears_output(self) -> bool:
        return self.log_level is not None and self.log_level <= _OUTPUT_LEVEL


def stamped(revision: Revision, result: dict[str, Any]) -> dict[str, Any]:
    """With what the stateless revision wants in every result."""
    if not revision.stateless:
        return result
    meta = {**result.get("_meta", {}), META_SERVER: server_info()}
    return {"resultType": "complete", **result, "_meta": meta}


@dataclass(frozen=True)
class Told:
    """A call and the one who hears of it. `offset`: the byte of its output to begin at; `wait_s`: None, up to its end."""

    asked: Asked
    came: Answer | RunningCall
    flight: Flight
    room: Room | None = None
    wait_s: float | None = None
    offset: int = 0

    async def messages(self) -> AsyncIterator[tuple[int, dict[str, Any] | None]]:
        """Each with the byte of the output to go on from; None: nothing new. Ends with the answer, unless the request was cancelled."""
        asked, offset, furthest = self.asked, self.offset, float("-inf")
        async for event in asked.crib.calls.events(asked.key.tenant, self.came, offset, self.wait_s):
            if event is None:
                yield offset, None
                continue
            offset = offset if event.offset is None else event.offset
            data = json.loads(event.data)
            if event.name == "outcome":
                if not self.flight.cancelled:
                    yield offset, self.last(Answer.of(data["status"], data["body"]))
                return
            if event.name == "input_required":
                yield offset, await self._question(data)
                if asked.revision.stateless or not mcp_elicitation.can(asked.elicits, data):
                    return
            elif event.name == "progress" and asked.token is not None and data["progress"] > furthest:
                furthest = data["progress"]
                yield offset, note("notifications/progress", {"progressToken": asked.token, **data})
            elif event.name in ("stdout", "stderr") and asked.hears_output:
                told = {"level": "info", "logger": event.name, "data": data["text"]}
                yield offset, note("notifications/message", told)
            elif (
                event.name == "log"
                and asked.log_level is not None
                and LOG_LEVELS.index(data["level"]) >= asked.log_level
            ):
                yield offset, note("notifications/message", data)

    async def _question(self, data: dict[str, Any]) -> dict[str, Any]:
        """What the tool asks: put to the client where it can ask its user, else the answer that says how the model goes on."""
        asked = self.asked
        if not mcp_elicitation.can(asked.elicits, data):
            assert isinstance(self.came, RunningCall)  # noqa: S101 - only a call that runs asks
            return self.last(await asked.crib.calls.still_running(self.came))
        if asked.revision.stateless:
            return reply(asked.rpc_id, stamped(asked.revision, mcp_elicitation.required(data)))
        return mcp_elicitation.request(data)

    def last(self, answer: Answer) -> dict[str, Any]:
        """The message that ends the request."""
        asked, room = self.asked, self.room
        made = mcp_results.result(answer, asked.revision, room.session.session_id if room else None)
        if made is None:
            detail = answer.json()["detail"]
            fault = fault_of(ToolServerError(Code(detail["code"]), detail["message"]), status=200)
            return RpcFault(fault.code, fault.message, detail, id=asked.rpc_id).as_json()
        if room is not None and room.began_anew:
            made["content"] = [{"type": "text", "text": _ANEW}, *made["content"]]
        return reply(asked.rpc_id, stamped(asked.revision, made))

    async def whole(self) -> dict[str, Any] | None:
        """Its answer, without a word before; None when the request was cancelled."""
        mute = replace(self, asked=replace(self.asked, token=None, log_level=None, elicits=frozenset()))
        said = [message async for _, message in mute.messages() if message is not None]
        return said[-1] if said else None

    async def written(self) -> AsyncIterator[bytes]:
        """As events of a stream, which in the revisions that have it can be gone on with elsewhere."""
        call_id = self.came.call_id if isinstance(self.came, RunningCall) else _call_id(self.came)
        resumable = not self.asked.revision.stateless and call_id is not None
        if resumable and self.asked.revision.primes:
            yield b"id: %b\nretry: %d\ndata: \n\n" % (self._mark(str(call_id), self.offset).encode(), _COME_BACK_MS)
        try:
            async for at, message in self.messages():
                yield event(message, self._mark(str(call_id), at) if resumable else None)
        except Exception as problem:  # noqa: BLE001 - the stream must end with an answer
            fault = fault_of(problem)
            yield event(RpcFault(fault.code, fault.message, fault.data, id=self.asked.rpc_id).as_json())

    def _mark(self, call_id: str, offset: int) -> str:
        """The id of an event: all that is needed to go on behind it, so that nothing is kept for those who might."""
        told = [call_id, offset, self.asked.rpc_id, self.asked.token, self.asked.log_level]
        return base64.urlsafe_b64encode(json.dumps(told, separators=(",", ":")).encode()).decode()


def event(message: dict[str, Any] | None, mark: str | None = None) -> bytes:
    """One event of a stream; None: a sign that it is still there."""
    if message is None:
        return QUIET
    head = b"" if mark is None else b"id: %b\n" % mark.encode()
    return b"%bevent: message\ndata: %b\n\n" % (head, encode_body(message))


async def resume(request: Request, revision: Revision, elicits: frozenset[str], last_event: str) -> Response:
    """A stream again from behind the event that its client has. Raises RpcFault, ToolServerError."""
    crib, key = services(request), caller(request, "use")
    call_id, offset, asked = _read_mark(last_event, Asked(crib, key, revision, None, elicits=elicits))
    crib.streams.take(key.tenant)
    try:
        came = await crib.calls.find(key.tenant, call_id)
    except BaseException:
        crib.streams.give_back(key.tenant)
        raise
    told = Told(asked, came, Flight(call_id), offset=offset)
    return ByteStream(told.written(), crib.streams, key.tenant, {})


def _read_mark(text: str, of: Asked) -> tuple[str, int, Asked]:
    try:
        call_id, offset, rpc_id, token, level = json.loads(base64.b64decode(text[:_MAX_MARK], b"-_", validate=True))
    except (binascii.Error, ValueError, TypeError, RecursionError):
        raise _foreign_mark() from None
    known = isinstance(call_id, str) and is_key(call_id) and is_id(rpc_id) and (token is None or is_id(token))
    place = isinstance(offset, int) and 0 <= offset < 1 << 53
    if not (known and place and (level is None or (isinstance(level, int) and level in range(len(LOG_LEVELS))))):
        raise _foreign_mark()
    return call_id, offset, replace(of, rpc_id=rpc_id, token=token, log_level=level)


def _foreign_mark() -> RpcFault:
    return RpcFault(INVALID_REQUEST, "Last-Event-ID is not the id of an event of this server.")


def _call_id(answer: Answer) -> str | None:
    body = answer.json()
    found = body.get("call_id") or (body.get("detail") or {}).get("call_id")
    return found if isinstance(found, str) else None
