"""Calls over HTTP. The body of a call is read here by hand of the models, since this is the hot path."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from toolserver.api import events, strict_json, wire
from toolserver.api.answers import call_answer
from toolserver.api.body import raw_body
from toolserver.api.events import EventStream, left
from toolserver.api.services import Services, caller, services
from toolserver.calls.answer import Answer
from toolserver.calls.idempotency import KEY_FORM, is_key
from toolserver.calls.request import CallRequest
from toolserver.calls.running import RunningCall
from toolserver.errors import Code, ToolServerError, invalid, invalid_all
from toolserver.settings import CallSettings
from toolserver.telemetry.trace import about, trace_id

_SHOWN = 128  # characters of an id in the log


async def call(request: Request) -> Response:
    crib, key = services(request), caller(request, "use")
    session_id = request.path_params["session_id"]
    about(session_id=session_id[:_SHOWN])
    try:
        given, body = await _read(request, crib.settings.call)
    except ToolServerError as error:
        if error.code is Code.INVALID_ARGUMENTS:  # of a session that is not there, only that is told
            await crib.registry.find(key.tenant, session_id)
        raise
    asked = CallRequest(
        tenant=key.tenant,
        session_id=session_id,
        tool=request.path_params["tool_name"],
        arguments=body.arguments,
        trace_id=trace_id(),
        wait_s=body.wait_s,
        deadline_s=body.deadline_s,
        key=given,
        key_id=key.key_id,
        gone=lambda: left(request.receive),
    )
    if not events.wanted(request):
        return call_answer(await crib.calls.call(asked), replayable=given is not None)
    crib.streams.take(key.tenant)
    try:
        came = await crib.calls.begin(asked)
    except BaseException:
        crib.streams.give_back(key.tenant)
        raise
    return _stream(crib, key.tenant, came, 0, crib.calls.patience_s(asked))


def _stream(crib: Services, tenant: str, came: Answer | RunningCall, offset: int, wait_s: float | None) -> Response:
    headers = {"Idempotent-Replay": "true"} if isinstance(came, Answer) and came.replayed else {}
    return EventStream(crib.calls.events(tenant, came, offset, wait_s), crib.streams, tenant, headers)


async def _read(request: Request, settings: CallSettings) -> tuple[str | None, wire.CallBody]:
    """The Idempotency-Key and the body. Raises invalid_arguments with all that is wrong with them."""
    data = strict_json.read_object(await raw_body(request))
    body, errors = wire.read_all(wire.CallBody, data)
    asked = (("/wait_s", settings.max_wait_s), ("/deadline_s", settings.max_deadline_s))
    errors += wire.beyond(data, asked)
    given, wrong = _key(request)
    if body is None or errors or wrong:
        raise invalid_all(wrong + errors)
    return given, body


def _key(request: Request) -> tuple[str | None, list[dict[str, str]]]:
    given = request.headers.getlist("idempotency-key")
    if len(given) > 1:
        return None, [{"pointer": "Idempotency-Key", "message": "is given more than once"}]
    if given and not is_key(given[0]):
        return None, [{"pointer": "Idempotency-Key", "message": KEY_FORM}]
    return (given[0] if given else None), []


async def get(request: Request) -> Response:
    crib, key = services(request), caller(request, "read")
    query = wire.read_query(wire.CallQuery, request.query_params.multi_items())
    wait_s = query.wait_s
    if wait_s is not None and wait_s > crib.settings.call.max_wait_s:
        raise invalid("/wait_s", f"is more than this server grants: at most {crib.settings.call.max_wait_s:g}")
    call_id = request.path_params["call_id"]
    about(call_id=call_id[:_SHOWN])
    if events.wanted(request):
        offset = events.offset_of(request, query.after)
        crib.streams.take(key.tenant)
        try:
            came = await crib.calls.find(key.tenant, call_id)
        except BaseException:
            crib.streams.give_back(key.tenant)
            raise
        return _stream(crib, key.tenant, came, offset, wait_s)
    answer = await crib.calls.wait(key.tenant, call_id, wait_s, query.after)
    return call_answer(answer, replayable=False)


async def cancel(request: Request) -> Response:
    crib, key = services(request), caller(request, "use")
    about(call_id=request.path_params["call_id"][:_SHOWN])
    return call_answer(await crib.calls.cancel(key.tenant, request.path_params["call_id"]), replayable=False)
