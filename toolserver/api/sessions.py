"""Sessions over HTTP."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from toolserver.api import wire
from toolserver.api.answers import json_answer
from toolserver.api.body import json_body
from toolserver.api.services import Services, caller, services
from toolserver.catalog.session_tools import SESSION_TOOLS
from toolserver.errors import Code, ToolServerError, invalid_all
from toolserver.runtime.base import Limits
from toolserver.sessions.session import Grant, Session

_CLOSE_S = 0.04  # how long a DELETE waits for the end of the clean-up; it goes on all the same


def session_tools(crib: Services, session: Session) -> list[dict[str, Any]]:
    return [tool.as_json() for tool in (*crib.catalog.tools(session.images), *SESSION_TOOLS)]


def shown(crib: Services, session: Session, *, tools: bool) -> dict[str, Any]:
    body = session.as_json(crib.runtime.isolation())
    return {**body, "tools": session_tools(crib, session)} if tools else body


async def create(request: Request) -> Response:
    crib, key = services(request), caller(request, "use")
    grant = grant_of(await json_body(request, wire.SessionBody), crib)
    crib.readiness.check_phase()
    session = await crib.registry.create(key.tenant, grant)
    return json_answer(shown(crib, session, tools=True), 201, {"Location": f"/v1/sessions/{session.session_id}"})


def grant_of(body: wire.SessionBody, crib: Services) -> Grant:
    """What the server grants of what was asked. Raises invalid_arguments, snapshot_not_found."""
    settings = crib.settings
    errors = _beyond(
        ("/ttl_s", body.ttl_s, settings.session.max_ttl_s),
        ("/limits/memory_mb", body.limits.memory_mb, settings.limits.max_memory_mb),
        ("/limits/cpus", body.limits.cpus, settings.limits.max_cpus),
        ("/limits/pids", body.limits.pids, settings.limits.max_pids),
        ("/limits/disk_mb", body.limits.disk_mb, settings.limits.max_disk_mb),
    )
    errors += _image_errors(body.images, crib) + _egress_errors(body.egress)
    if errors:
        raise invalid_all(errors)
    if body.from_snapshot is not None:
        raise ToolServerError(
            Code.SNAPSHOT_NOT_FOUND, "There is no such snapshot: this version of the server makes none yet."
        )
    asked = Limits(
        memory_mb=body.limits.memory_mb or settings.limits.memory_mb,
        cpus=body.limits.cpus or settings.limits.cpus,
        pids=body.limits.pids or settings.limits.pids,
        disk_mb=body.limits.disk_mb or settings.limits.disk_mb,
    )
    return Grant(
        ttl_s=body.ttl_s or settings.session.ttl_s,
        idle_s=body.idle_s or settings.session.idle_s,
        images=tuple(body.images) if body.images is not None else tuple(crib.catalog.images),
        limits=crib.runtime.effective_limits(asked),
        egress="open" if body.egress.mode == "open" else "none",
        env=body.env,
        labels=body.labels,
    )


def _beyond(*asked: tuple[str, float | None, float]) -> list[dict[str, str]]:
    return [
        {"pointer": pointer, "message": f"is more than this server grants: at most {most:g}"}
        for pointer, value, most in asked
        if value is not None and value > most
    ]


def _image_errors(images: list[str] | None, crib: Services) -> list[dict[str, str]]:
    known = ", ".join(crib.catalog.images)
    errors = []
    for place, name in enumerate(images or ()):
        if name not in crib.catalog.images:
            errors.append(
                {"pointer": f"/images/{place}", "message": f"there is no image {name[:60]!r}; known are {known}"}
            )
        elif images is not None and name in images[:place]:
            errors.append({"pointer": f"/images/{place}", "message": "is named twice"})
    return errors


def _egress_errors(egress: wire.EgressBody) -> list[dict[str, str]]:
    if egress.mode == "allow":
        told = "allow-lists need the egress proxy, which this version does not have; use none or open"
        return [{"pointer": "/egress/mode", "message": told}]
    if egress.allow:
        return [{"pointer": "/egress/allow", "message": "goes only with the mode allow"}]
    return []


async def find(request: Request, scope: str) -> Session:
    """The session of the path, for its tenant. Raises session_not_found, session_gone, forbidden."""
    key = caller(request, scope)
    return await services(request).registry.find(key.tenant, request.path_params["session_id"])


async def _find_any(request: Request, scope: str) -> Session:
    query = wire.read_query(wire.SessionsQuery, request.query_params.multi_items())
    if not query.all_tenants:
        return await find(request, scope)
    caller(request, "admin")
    return await services(request).registry.find(None, request.path_params["session_id"])


async def listing(request: Request) -> Response:
    crib = services(request)
    query = wire.read_query(wire.SessionsQuery, request.query_params.multi_items())
    key = caller(request, "admin" if query.all_tenants else "read")
    found = crib.registry.listing(None if query.all_tenants else key.tenant)
    told = [{**shown(crib, s, tools=False), **({"tenant": s.tenant} if query.all_tenants else {})} for s in found]
    return json_answer({"sessions": told})


async def get(request: Request) -> Response:
    wire.read_query(wire.NoQuery, request.query_params.multi_items())
    session = await find(request, "read")
    return json_answer(shown(services(request), session, tools=True))


async def tools(request: Request) -> Response:
    wire.read_query(wire.NoQuery, request.query_params.multi_items())
    session = await find(request, "read")
    return json_answer({"tools": session_tools(services(request), session)})


async def delete(request: Request) -> Response:
    """204 also for one that is gone already. Once begun it is finished, whether or not the client hears of it."""
    try:
        session = await _find_any(request, "use")
    except ToolServerError as error:
        if error.code is Code.SESSION_GONE:
            return Response(status_code=204)
        raise
    await services(request).registry.delete(session, _CLOSE_S)
    return Response(status_code=204)
