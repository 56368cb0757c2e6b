"""The table of routes, and the application made of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from toolserver.api import calls, files, health, later, sessions, tools, wire
from toolserver.api.answers import handle, json_answer
from toolserver.api.edge import Edge
from toolserver.api.services import Services, caller
from toolserver.errors import CODES, RuntimeUnavailable, StoreUnavailable, ToolServerError

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


@dataclass(frozen=True)
class Route:
    method: str
    path: str
    endpoint: Endpoint
    summary: str
    body: type[wire.WireModel] | None = None
    query: type[wire.WireModel] | None = None


ROUTES = (
    Route("GET", "/healthz", health.alive, "Whether the process answers; without a key"),
    Route("GET", "/readyz", health.ready, "Whether work can be taken, and why not"),
    Route("GET", "/metrics", health.metrics, "Metrics in the Prometheus text format"),
    Route("GET", "/v1/tools", tools.listing, "All tools"),
    Route("GET", "/v1/tools/search", tools.search, "Tools that fit some words", query=wire.SearchQuery),
    Route("POST", "/v1/sessions", sessions.create, "Create a session", body=wire.SessionBody),
    Route("GET", "/v1/sessions", sessions.listing, "Live sessions", query=wire.SessionsQuery),
    Route("GET", _SESSION, sessions.get, "One session"),
    Route("DELETE", _SESSION, sessions.delete, "End a session and delete its files", query=wire.SessionsQuery),
    Route("GET", f"{_SESSION}/tools", sessions.tools, "The tools of a session"),
    Route(
        "POST", f"{_SESSION}/tools/{{tool_name}}", calls.call, "Call a tool; header Idempotency-Key", body=wire.CallBody
    ),
    Route("GET", "/v1/calls/{call_id}", calls.get, "The outcome of a call, or 450 while it runs", query=wire.CallQuery),
    Route("DELETE", "/v1/calls/{call_id}", calls.cancel, "Cancel a call"),
    Route("GET", f"{_SESSION}/files", files.listing, "List a folder", query=wire.ListingQuery),
    Route("PUT", f"{_SESSION}/files", files.not_a_file, "Refused: names no file"),
    Route("DELETE", f"{_SESSION}/files", files.not_a_file, "Refused: names no file"),
    Route("GET", f"{_SESSION}/files/{{path:anypath}}", files.get, "Read a file, or a Range of it"),
    Route("PUT", f"{_SESSION}/files/{{path:anypath}}", files.put, "Write a file, whole or not at all"),
    Route("DELETE", f"{_SESSION}/files/{{path:anypath}}", files.delete, "Delete a file or folder"),
    Route("GET", f"{_SESSION}/archive", files.get_archive, "The workspace as a tar"),
    Route("PUT", f"{_SESSION}/archive", files.put_archive, "Unpack a tar over the workspace, all or nothing"),
    Route("POST", f"{_SESSION}/snapshots", later.make_snapshot, "Not yet: make a snapshot"),
    Route("GET", f"{_SESSION}/snapshots", later.list_snapshots, "Not yet: list snapshots"),
    Route("GET", f"{_SESSION}/diff", later.diff, "Not yet: compare snapshots", query=wire.DiffQuery),
    Route("POST", f"{_SESSION}/restore", later.restore, "Not yet: go back to a snapshot", body=wire.RestoreBody),
    *(Route(method, "/mcp", later.mcp, "Not yet: the tools over MCP") for method in ("GET", "POST", "DELETE")),
)


def application(services: Services, version: str) -> ASGIApp:
    app = FastAPI(
        title="Toolcrib ToolServer",
        version=version,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.services = services
    for kind in (ToolServerError, RuntimeUnavailable, StoreUnavailable, HTTPException, Exception):
        app.add_exception_handler(kind, handle)
    for route in ROUTES:
        app.add_api_route(
            route.path,
            route.endpoint,
            methods=[route.method],
            summary=route.summary,
            operation_id=f"{route.method.lower()} {route.path}",
            openapi_extra=_described(route),
            response_model=None,
            response_class=Response,
        )

    async def openapi(request: Request) -> Response:
        caller(request, "read")
        return json_answer(app.openapi())

    app.add_route("/openapi.json", openapi, include_in_schema=False)
    return Edge(app, services)


def _described(route: Route) -> dict[str, Any]:
    names = [part.split(":")[0].strip("{}") for part in route.path.split("/") if part.startswith("{")]
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
    ]
    if route.query is not None:
        schema = route.query.model_json_schema()
        parameters += [
            {"name": name, "in": "query", "required": name in schema.get("required", ()), "schema": part}
            for name, part in schema.get("properties", {}).items()
        ]
    statuses = sorted({meaning.status for meaning in CODES.values()})
    shape = {"application/json": {"schema": _ERROR_SCHEMA}}
    described: dict[str, Any] = {
        "parameters": parameters,
        "responses": {str(status): {"description": _codes_of(status), "content": shape} for status in statuses},
    }
    if route.body is not None:
        content = {"application/json": {"schema": _inlined(route.body.model_json_schema())}}
        described["requestBody"] = {"content": content}
    return described


_ERROR_SCHEMA = {
    "type": "object",
    "required": ["detail"],
    "properties": {
        "detail": {
            "type": "object",
            "required": ["code", "message", "fault", "retryable", "effects", "trace_id"],
            "properties": {
                "code": {"enum": [str(code) for code in CODES]},
                "message": {"type": "string"},
                "fault": {"enum": ["caller", "tool", "infra", "policy"]},
                "retryable": {"type": "boolean"},
                "retry_after_s": {"type": "number"},
                "effects": {"enum": ["none", "possible"]},
                "call_id": {"type": "string"},
                "trace_id": {"type": "string"},
            },
        }
    },
}


def _codes_of(status: int) -> str:
    return ", ".join(str(code) for code, meaning in CODES.items() if meaning.status == status)


def _inlined(schema: Any, definitions: dict[str, Any] | None = None) -> Any:
    """The schema with its local definitions in place: an OpenAPI document has its definitions elsewhere."""
    if isinstance(schema, list):
        return [_inlined(part, definitions) for part in schema]
    if not isinstance(schema, dict):
        return schema
    known = definitions if definitions is not None else schema.get("$defs", {})
    if "$ref" in schema:
        return _inlined(known[schema["$ref"].rsplit("/", 1)[1]], known)
    return {name: _inlined(part, known) for name, part in schema.items() if name != "$defs"}
