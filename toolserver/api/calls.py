"""Calls over HTTP. The body of a call is read here by hand of the models, since this is the hot path."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from toolserver.api import wire
from toolserver.api.answers import call_answer
from toolserver.api.body import json_body
from toolserver.api.services import caller, services
from toolserver.calls.executor import CallRequest
from toolserver.calls.idempotency import check_key
from toolserver.errors import Code, ToolServerError, invalid, invalid_all
from toolserver.settings import CallSettings
from toolserver.telemetry.trace import trace_id


async def call(request: Request) -> Response:
    crib, key = services(request), caller(request, "use")
    session_id = request.path_params["session_id"]
    try:
        given = _key(request)
        body = await json_body(request, wire.CallBody)
        _check_times(body, crib.settings.call)
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
    )
    return call_answer(await crib.calls.call(asked), replayable=given is not None)


def _key(request: Request) -> str | None:
    given = request.headers.getlist("idempotency-key")
    if len(given) > 1:
        raise invalid("Idempotency-Key", "is given more than once")
    return check_key(given[0]) if given else None


def _check_times(body: wire.CallBody, settings: CallSettings) -> None:
    asked = (("/wait_s", body.wait_s, settings.max_wait_s), ("/deadline_s", body.deadline_s, settings.max_deadline_s))
    errors = [
        {"pointer": pointer, "message": f"is more than this server grants: at most {most:g}"}
        for pointer, value, most in asked
        if value is not None and value > most
    ]
    if errors:
        raise invalid_all(errors)


async def get(request: Request) -> Response:
    crib, key = services(request), caller(request, "read")
    query = wire.read_query(wire.CallQuery, request.query_params.multi_items())
    wait_s = query.wait_s
    if wait_s is not None and wait_s > crib.settings.call.max_wait_s:
        raise invalid("/wait_s", f"is more than this server grants: at most {crib.settings.call.max_wait_s:g}")
    answer = await crib.calls.wait(key.tenant, request.path_params["call_id"], wait_s, query.after)
    return call_answer(answer, replayable=False)


async def cancel(request: Request) -> Response:
    crib, key = services(request), caller(request, "use")
    wire.read_query(wire.NoQuery, request.query_params.multi_items())
    return call_answer(await crib.calls.cancel(key.tenant, request.path_params["call_id"]), replayable=False)
