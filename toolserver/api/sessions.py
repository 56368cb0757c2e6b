"""Sessions over HTTP."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from toolserver.api import strict_json, wire
from toolserver.api.answers import json_answer
from toolserver.api.body import raw_body
from toolserver.api.events import left
from toolserver.api.services import Services, caller, services
from toolserver.catalog.session_tools import SESSION_TOOLS
from toolserver.egress.policy import EgressPolicy, narrowed
from toolserver.errors import Code, ToolServerError, invalid, invalid_all
from toolserver.runtime.base import Limits
from toolserver.sessions.registry import Prepare
from toolserver.sessions.session import Grant, Session
from toolserver.telemetry.trace import trace_id

RESERVED_LABELS = "mcp."
_MAX_ERRORS = 64  # as many as there may be images
_CLOSE_S = 0.01  # how long a DELETE waits for the end of the clean-up; it goes on all the same


def session_tools(crib: Services, session: Session) -> list[dict[str, Any]]:
    return [tool.as_json() for tool in (*crib.catalog.tools(session.images), *SESSION_TOOLS)]


def shown(crib: Services, session: Session, *, tools: bool) -> dict[str, Any]:
    body = session.as_json(crib.runtime.isolation())
    return {**body, "tools": session_tools(crib, session)} if tools else body


async def create(request: Request) -> Response:
    crib, key = services(request), caller(request, "use")
    body = _read(strict_json.read_object(await raw_body(request)), crib)
    grant = grant_of(body, crib)
    crib.readiness.check_phase()
    session = await crib.registry.create(
        key.tenant,
        grant,
        key_id=key.key_id,
        prepare=await _filling(request, grant, body.from_snapshot),
        wait_s=crib.settings.queue.wait_s if body.wait_s is None else body.wait_s,
        gone=lambda: left(request.receive),
    )
    return json_answer(shown(crib, session, tools=True), 201, {"Location": f"/v1/sessions/{session.session_id}"})


def _read(data: dict[str, Any], crib: Services) -> wire.SessionBody:
    """Raises invalid_arguments with all that is wrong, in its shape and with what this server grants."""
    session, limits = crib.settings.session, crib.settings.limits
    body, errors = wire.read_all(wire.SessionBody, data)
    most = (
        ("/ttl_s", session.max_ttl_s),
        ("/wait_s", crib.settings.queue.max_wait_s),
        ("/limits/memory_mb", limits.max_memory_mb),
        ("/limits/cpus", limits.max_cpus),
        ("/limits/pids", limits.max_pids),
        ("/limits/disk_mb", limits.max_disk_mb),
    )
    errors += (
        wire.beyond(data, most)
        + _label_errors(data.get("labels"))
        + _image_errors(data.get("images"), crib)
        + egress_errors(data.get("egress"), "/egress")
    )
    if body is None or errors:
        raise invalid_all(errors)
    return body


def note(request: Request, session: Session, event: str, **fields: Any) -> None:
    """Write down what was done to a session's files. Where that can't be done now, nothing new begins before it is."""
    key_id = caller(request, "use").key_id
    who = {"tenant": session.tenant, "key_id": key_id, "session_id": session.session_id}
    services(request).journal.append_surely(event, **who, **fields, trace_id=trace_id())


async def _filling(request: Request, grant: Grant, snapshot_id: str | None) -> Prepare | None:
    """What puts the snapshot into the new session. Raises snapshot_not_found, invalid_arguments."""
    crib, tenant = services(request), caller(request, "use").tenant
    if snapshot_id is None:
        return None
    if not any(crib.catalog.images[name].keeps_files for name in grant.images):
        raise invalid("/from_snapshot", "needs an image that works on the workspace, such as the image workspace")
    wanted = snapshot_id
    await crib.snapshots.check(tenant, wanted)

    async def fill(session: Session) -> None:
        await crib.snapshots.fill(session, wanted)
        note(request, session, "snapshot_restored", snapshot_id=wanted)

    return fill


def grant_of(body: wire.SessionBody, crib: Services) -> Grant:
    """What the server grants of what was asked."""
    settings = crib.settings
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
        egress=narrowed(policy_of(body.egress), crib.registry.doors.most),
        env=body.env,
        labels=body.labels,
    )


def _label_errors(labels: Any) -> list[dict[str, str]]:
    """By these the sessions of MCP clients are found again: nobody may lay one out for somebody else."""
    given = labels if isinstance(labels, dict) else {}
    reserved = [name for name in given if name.startswith(RESERVED_LABELS)]
    message = f"labels that begin with {RESERVED_LABELS} are the server's own"
    return [{"pointer": f"/labels/{strict_json.escape(name)}", "message": message} for name in reserved][:_MAX_ERRORS]


def _image_errors(images: Any, crib: Services) -> list[dict[str, str]]:
    known = ", ".join(crib.catalog.images)
    errors = []
    for place, name in enumerate(images if isinstance(images, list) else ()):
        if not isinstance(name, str):
            continue  # the model says so
        if name in crib.catalog.absent:
            errors.append({"pointer": f"/images/{place}", "message": crib.catalog.absent[name]})
        elif name not in crib.catalog.images:
            errors.append(
                {"pointer": f"/images/{place}", "message": f"there is no image {name[:60]!r}; known are {known}"}
            )
        elif name in images[:place]:
            errors.append({"pointer": f"/images/{place}", "message": "is named twice"})
    return errors[:_MAX_ERRORS]


def policy_of(body: wire.EgressBody) -> EgressPolicy:
    """Of a body without `egress_errors`."""
    return EgressPolicy.load(body.model_dump(exclude_none=True))


def egress_errors(egress: Any, pointer: str) -> list[dict[str, str]]:
    """`egress` is the client's JSON, at `pointer` of the body. What has another shape is for the model to refuse."""
    mode, allow = wire.at(egress, "/mode"), wire.at(egress, "/allow")
    if not isinstance(allow, list):
        return []
    if allow and mode in ("none", "open"):
        return [{"pointer": f"{pointer}/allow", "message": "goes only with the mode allow"}]
    errors = []
    for place, rule in enumerate(allow):
        try:
            EgressPolicy("allow", (rule,) if isinstance(rule, str) else ())
        except ValueError as problem:
            errors.append({"pointer": f"{pointer}/allow/{place}", "message": str(problem)})
    return errors[:_MAX_ERRORS]


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
    session = await find(request, "read")
    return json_answer(shown(services(request), session, tools=True))


async def tools(request: Request) -> Response:
    session = await find(request, "read")
    return json_answer({"tools": session_tools(services(request), session)})


async def put_egress(request: Request) -> Response:
    """The session's egress from now on; the session as it is then."""
    session = await find(request, "use")
    crib, key = services(request), caller(request, "use")
    data = strict_json.read_object(await raw_body(request))
    body, errors = wire.read_all(wire.EgressBody, data)
    errors += egress_errors(data, "")
    if body is None or errors:
        raise invalid_all(errors)
    with session.in_use():
        policy = narrowed(policy_of(body), crib.registry.doors.most)
        await crib.registry.set_egress(session, policy, key_id=key.key_id)
    return json_answer(shown(crib, session, tools=False))


async def delete(request: Request) -> Response:
    """204 also for one that is gone already. Once begun it is finished, whether or not the client hears of it."""
    try:
        session = await _find_any(request, "use")
    except ToolServerError as error:
        if error.code is Code.SESSION_GONE:
            return Response(status_code=204)
        raise
    key = caller(request, "use")
    await services(request).registry.delete(session, _CLOSE_S, key_id=key.key_id)
    return Response(status_code=204)
