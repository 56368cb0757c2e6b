"""The OpenAPI document: made from the table of routes, when it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from fastapi.openapi.utils import get_openapi
from starlette.responses import Response

from toolserver.api import wire
from toolserver.errors import CODES


@dataclass(frozen=True)
class Described:
    """What the document says of one route."""

    method: str
    path: str
    summary: str
    body: type[wire.WireModel] | None = None
    query: type[wire.WireModel] | None = None
    events: bool = False  # the answer can also be had as a stream of events
    rpc: bool = False  # JSON-RPC messages are taken and answered


def document(routes: Sequence[Described], version: str) -> dict[str, Any]:
    async def nothing() -> None:
        """The document's routes are never served."""

    router = APIRouter()
    for route in routes:
        router.add_api_route(
            route.path,
            nothing,
            methods=[route.method],
            summary=route.summary,
            operation_id=f"{route.method.lower()} {route.path}",
            openapi_extra=_described(route),
            response_model=None,
            response_class=Response,
        )
    return get_openapi(title="Toolcrib ToolServer", version=version, routes=router.routes)


def _described(route: Described) -> dict[str, Any]:
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
    shape = {"application/json": {"schema": {"oneOf": [_ERROR_SCHEMA, _RPC_SCHEMA]} if route.rpc else _ERROR_SCHEMA}}
    described: dict[str, Any] = {
        "parameters": parameters,
        "responses": {str(status): {"description": _codes_of(status), "content": shape} for status in statuses},
    }
    if route.events:
        told = (
            "The outcome; as events, `outcome` is the last one and carries the status that the answer would have had."
        )
        if route.rpc:
            told = "The answer in JSON-RPC, whole or as events."
        kinds = {kind: {"schema": {"type": shown}} for kind, shown in _EVENT_KINDS.items()}
        described["responses"]["200"] = {"description": told, "content": kinds}
    if route.rpc and route.method == "POST":
        described["requestBody"] = {"content": {"application/json": {"schema": {"type": "object"}}}}
    if route.body is not None:
        content = {"application/json": {"schema": _inlined(route.body.model_json_schema())}}
        described["requestBody"] = {"content": content}
    return described


_EVENT_KINDS = {"application/json": "object", "text/event-stream": "string"}
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
_RPC_SCHEMA = {
    "type": "object",
    "required": ["jsonrpc", "error"],
    "properties": {
        "jsonrpc": {"const": "2.0"},
        "id": {"type": ["string", "integer", "null"]},
        "error": {
            "type": "object",
            "required": ["code", "message"],
            "properties": {"code": {"type": "integer"}, "message": {"type": "string"}},
        },
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
