"""The table of routes, and the application made of it."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastapi import APIRouter
from starlette import routing
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from toolserver.api import calls, files, health, sessions, snapshots, tools, wire
from toolserver.api.answers import handle, json_answer
from toolserver.api.edge import Edge
from toolserver.api.mcp import McpEndpoint
from toolserver.api.openapi import Described, document
from toolserver.api.origins import Cors
from toolserver.api.services import Services, caller
from toolserver.errors import RuntimeUnavailable, StoreUnavailable, ToolServerError

Endpoint = Callable[[Request], Awaitable[Response]]
_SESSION = "/v1/sessions/{session_id}"


class _AnyPath(Convertor[str]):
    """A file's path: anything at all, line breaks too."""

    regex = r"[\s\S]*"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("anypath", _AnyPath())


@dataclass(frozen=True, kw_only=True)
class Route(Described):
    """One row of the table. Endpoints read the request themselves: nothing stands between them and the server."""

    endpoint: Endpoint


_CALL = Route(
    "POST",
    f"{_SESSION}/tools/{{tool_name}}",
    "Call a tool; header Idempotency-Key",
    endpoint=calls.call,
    body=wire.CallBody,
    events=True,
)
_ROUTES = (
    Route("GET", "/healthz", "Whether the process answers; without a key", endpoint=health.alive),
    Route("GET", "/readyz", "Whether work can be taken, and why not", endpoint=health.ready),
    Route("GET", "/metrics", "Metrics in the Prometheus text format", endpoint=health.metrics),
    Route("GET", "/v1/tools", "All tools", endpoint=tools.listing),
    Route("GET", "/v1/tools/search", "Tools that fit some words", endpoint=tools.search, query=wire.SearchQuery),
    Route("POST", "/v1/sessions", "Create a session", endpoint=sessions.create, body=wire.SessionBody),
    Route("GET", "/v1/sessions", "Live sessions", endpoint=sessions.listing, query=wire.SessionsQuery),
    Route("GET", _SESSION, "One session", endpoint=sessions.get),
    Route("DELETE", _SESSION, "End a session and delete its files", endpoint=sessions.delete, query=wire.SessionsQuery),
    Route("PUT", f"{_SESSION}/egress", "Change what it may reach", endpoint=sessions.put_egress, body=wire.EgressBody),
    Route("GET", f"{_SESSION}/tools", "The tools of a session", endpoint=sessions.tools),
    _CALL,
    Route(
        "GET",
        "/v1/calls/{call_id}",
        "The outcome of a call, or 450 while it runs",
        endpoint=calls.get,
        query=wire.CallQuery,
        events=True,
    ),
    Route("DELETE", "/v1/calls/{call_id}", "Cancel a call", endpoint=calls.cancel),
    Route("GET", f"{_SESSION}/files", "List a folder", endpoint=files.listing, query=wire.ListingQuery),
    Route("PUT", f"{_SESSION}/files", "Refused: names no file", endpoint=files.not_a_file),
    Route("DELETE", f"{_SESSION}/files", "Refused: names no file", endpoint=files.not_a_file),
    Route("GET", f"{_SESSION}/files/{{path:anypath}}", "Read a file, or a Range of it", endpoint=files.get),
    Route("PUT", f"{_SESSION}/files/{{path:anypath}}", "Write a file, whole or not at all", endpoint=files.put),
    Route("DELETE", f"{_SESSION}/files/{{path:anypath}}", "Delete a file or folder", endpoint=files.delete),
    Route("GET", f"{_SESSION}/archive", "The workspace as a tar", endpoint=files.get_archive),
    Route("PUT", f"{_SESSION}/archive", "Unpack a tar over the workspace, all or nothing", endpoint=files.put_archive),
    Route(
        "POST",
        f"{_SESSION}/snapshots",
        "Make a snapshot of the workspace",
        endpoint=snapshots.make,
        body=wire.EmptyBody,
    ),
    Route("GET", f"{_SESSION}/snapshots", "The session's snapshots", endpoint=snapshots.listing),
    Route("DELETE", f"{_SESSION}/snapshots/{{snapshot_id}}", "Forget a snapshot", endpoint=snapshots.remove),
    Route("GET", f"{_SESSION}/diff", "Compare two snapshots", endpoint=snapshots.diff, query=wire.DiffQuery),
    Route("POST", f"{_SESSION}/restore", "Go back to a snapshot", endpoint=snapshots.restore, body=wire.RestoreBody),
)


def routes(mcp: McpEndpoint) -> tuple[Route, ...]:
    return (
        *_ROUTES,
        Route("POST", "/mcp", "The tools over MCP: a JSON-RPC message", endpoint=mcp.post, events=True, rpc=True),
        Route("GET", "/mcp", "What an MCP session is told unasked", endpoint=mcp.get, events=True, rpc=True),
        Route("DELETE", "/mcp", "End an MCP session", endpoint=mcp.delete, rpc=True),
    )


def _without_query(endpoint: Endpoint) -> Endpoint:
    """The endpoint of a route that has no query parameters: any is a mistake that must not be passed over."""

    @functools.wraps(endpoint)  # the journal names an endpoint by its own name
    async def checked(request: Request) -> Response:
        if request.scope["query_string"] and request.scope["path"].startswith("/v1/"):
            wire.read_query(wire.NoQuery, request.query_params.multi_items())
        return await endpoint(request)

    return checked


def application(services: Services, version: str) -> ASGIApp:
    served = routes(McpEndpoint())

    async def openapi(request: Request) -> Response:
        caller(request, "read")
        return json_answer(document(served, version))

    table: list[routing.BaseRoute] = [
        routing.Route(r.path, r.endpoint if r.query is not None else _without_query(r.endpoint), methods=[r.method])
        for r in (_CALL, *served)  # the hot path first
    ]
    table.append(routing.Route("/openapi.json", openapi))
    router = APIRouter(routes=table, redirect_slashes=False)
    kinds = (ToolServerError, RuntimeUnavailable, StoreUnavailable, HTTPException)
    edge = Edge(ExceptionMiddleware(router, handlers=dict.fromkeys(kinds, handle)), services)
    return Cors(edge, services.settings.http)
