"""Snapshots over HTTP."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from toolserver.api import wire
from toolserver.api.answers import json_answer
from toolserver.api.body import json_body
from toolserver.api.services import services
from toolserver.api.sessions import find, note


async def make(request: Request) -> Response:
    session = await find(request, "use")
    await json_body(request, wire.EmptyBody)
    made = await services(request).snapshots.take(session)
    note(request, session, "snapshot_made", snapshot_id=made["snapshot_id"], bytes=made["bytes"], files=made["files"])
    return json_answer(made, 201)


async def listing(request: Request) -> Response:
    session = await find(request, "read")
    return json_answer({"snapshots": await services(request).snapshots.listing(session)})


async def remove(request: Request) -> Response:
    session = await find(request, "use")
    snapshot_id = request.path_params["snapshot_id"]
    await services(request).snapshots.remove(session, snapshot_id)
    note(request, session, "snapshot_removed", snapshot_id=snapshot_id)
    return Response(status_code=204)


async def diff(request: Request) -> Response:
    session = await find(request, "read")
    query = wire.read_query(wire.DiffQuery, request.query_params.multi_items())
    return json_answer(await services(request).snapshots.diff(session.tenant, query.from_, query.to))


async def restore(request: Request) -> Response:
    session = await find(request, "use")
    body = await json_body(request, wire.RestoreBody)
    restored = await services(request).snapshots.restore(session, body.snapshot_id)
    note(request, session, "snapshot_restored", snapshot_id=body.snapshot_id)
    return json_answer(restored)
