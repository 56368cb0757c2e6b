"""Endpoints of the contract that this version answers with not_implemented, after the checks that come first anyway."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from toolserver.api import wire
from toolserver.api.body import json_body
from toolserver.api.services import caller
from toolserver.api.sessions import find
from toolserver.errors import Code, ToolServerError


def _not_yet(what: str) -> ToolServerError:
    return ToolServerError(Code.NOT_IMPLEMENTED, f"This version of the server does not have {what} yet.")


async def make_snapshot(request: Request) -> Response:
    await find(request, "use")
    await json_body(request, wire.EmptyBody)
    raise _not_yet("snapshots")


async def list_snapshots(request: Request) -> Response:
    await find(request, "read")
    raise _not_yet("snapshots")


async def diff(request: Request) -> Response:
    await find(request, "read")
    wire.read_query(wire.DiffQuery, request.query_params.multi_items())
    raise _not_yet("snapshots")


async def restore(request: Request) -> Response:
    await find(request, "use")
    await json_body(request, wire.RestoreBody)
    raise _not_yet("snapshots")


async def mcp(request: Request) -> Response:
    caller(request, "use")
    raise _not_yet("the MCP endpoint")
