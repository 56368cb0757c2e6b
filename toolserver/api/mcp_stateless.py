"""/mcp in the revision 2026-07-28: every request stands alone, and says in `_meta` and headers what it needs."""

from __future__ import annotations

import base64
import binascii
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from toolserver.api.answers import json_answer
from toolserver.api.events import ByteStream
from toolserver.api.mcp_calls import LIST_FRESH_MS, Calls, listing, tools_of
from toolserver.api.mcp_elicitation import modes
from toolserver.api.mcp_listen import changes
from toolserver.api.mcp_messages import (
    HEADER_MISMATCH,
    INVALID_PARAMS,
    INVALID_REQUEST,
    Rpc,
    RpcFault,
    method_not_found,
    note,
    read,
    reply,
)
from toolserver.api.mcp_revisions import (
    CAPABILITIES,
    META_CAPABILITIES,
    META_LOG_LEVEL,
    META_SUBSCRIPTION,
    META_VERSION,
    REVISIONS,
    SUPPORTED,
    Revision,
    instructions,
    unsupported,
)
from toolserver.api.mcp_rooms import NAME_FORM, Rooms, is_name
from toolserver.api.mcp_told import Flight, event, stamped
from toolserver.api.services import Phase, caller, services
from toolserver.calls.news import LOG_LEVELS

SESSION_HEADER, META_SESSION = "toolcrib-session", "toolcrib/session"
DEFAULT_NAME = "default"
_NAMED = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}
_MIRRORED = ("mcp-protocol-version", "mcp-method", "mcp-name")
_ENCODED = ("=?base64?", "?=")


class Stateless:
    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms

    async def post(self, request: Request, body: Any) -> Response:
        """Raises RpcFault."""
        rpc = read(body)
        if rpc.kind == "response":
            raise RpcFault(INVALID_REQUEST, "This revision has no requests of the server, so no responses to them.")
        if rpc.kind == "notification":
            return Response(status_code=202)  # none means anything over HTTP: a stream is cancelled by closing it
        try:
            revision = _checked(request, rpc)
            return await self._answer(request, rpc, revision)
        except RpcFault as fault:
            fault.id = rpc.id
            raise

    async def _answer(self, request: Request, rpc: Rpc, revision: Revision) -> Response:
        crib, key = services(request), caller(request, "read")
        match rpc.method:
            case "server/discover":
                told = {
                    "supportedVersions": SUPPORTED,
                    "capabilities": CAPABILITIES,
                    "instructions": instructions(crib.settings.session.idle_s),
                    "ttlMs": LIST_FRESH_MS,
                    "cacheScope": "private",
                }
                return json_answer(reply(rpc.id, stamped(revision, told)))
            case "tools/list":
                room = self._rooms.find(crib, key, _name(request, rpc))
                try:
                    return json_answer(reply(rpc.id, listing(crib, rpc, revision, room)))
                except RpcFault as fault:
                    fault.status = 200
                    raise
            case "tools/call":
                level = rpc.meta.get(META_LOG_LEVEL)
                level = LOG_LEVELS.index(level) if level in LOG_LEVELS else None
                name, elicits = _name(request, rpc), modes(rpc.meta[META_CAPABILITIES])
                calls = Calls(request, self._rooms, rpc, revision, name, {}, level, elicits, Flight())
                return await calls.respond()
            case "subscriptions/listen":
                return self._listen(request, rpc, revision)
            case _:
                raise method_not_found(rpc, 404)

    def _listen(self, request: Request, rpc: Rpc, revision: Revision) -> Response:
        crib, key = services(request), caller(request, "read")
        wanted = rpc.params.get("notifications")
        if not isinstance(wanted, dict):
            raise RpcFault(INVALID_PARAMS, "params.notifications must be an object.")
        about = {META_SUBSCRIPTION: rpc.id}
        name = _name(request, rpc)
        honoured = {"toolsListChanged": True} if wanted.get("toolsListChanged") is True else {}

        async def stream() -> AsyncIterator[bytes]:
            yield event(note("notifications/subscriptions/acknowledged", {"_meta": about, "notifications": honoured}))
            async for changed in changes(
                lambda: tools_of(crib, self._rooms.find(crib, key, name)),
                lambda: crib.readiness.phase is not Phase.DRAINING,
            ):
                told = changed and bool(honoured)
                yield event(note("notifications/tools/list_changed", {"_meta": about}) if told else None)
            yield event(reply(rpc.id, stamped(revision, {"_meta": about})))

        crib.listeners.take(key.tenant)
        return ByteStream(stream(), crib.listeners, key.tenant, {})


def is_stateless(request: Request, body: Any) -> bool:
    """Whether a request is of this kind: by what it says, since nothing went before it."""
    named = REVISIONS.get(request.headers.get("mcp-protocol-version", "").strip(" \t"))
    if named is not None and named.stateless:
        return True
    params = body.get("params") if isinstance(body, dict) else None
    meta = params.get("_meta") if isinstance(params, dict) else None
    return isinstance(meta, dict) and META_VERSION in meta


def _checked(request: Request, rpc: Rpc) -> Revision:
    """The revision, when `_meta` and headers are whole and say the same. Raises RpcFault."""
    given = {name: [value.strip(" \t") for value in request.headers.getlist(name)] for name in _MIRRORED}
    if twice := [name for name, values in given.items() if len(values) > 1]:
        raise RpcFault(HEADER_MISMATCH, f"The header {twice[0]} is given more than once.")
    if missing := [name for name in (META_VERSION, META_CAPABILITIES) if name not in rpc.meta]:
        raise RpcFault(INVALID_PARAMS, f"params._meta lacks {' and '.join(missing)}.")
    requested, capabilities = rpc.meta[META_VERSION], rpc.meta[META_CAPABILITIES]
    if not isinstance(requested, str) or not isinstance(capabilities, dict):
        raise RpcFault(INVALID_PARAMS, f"In params._meta {META_VERSION} must be a text, {META_CAPABILITIES} an object.")
    expected = {"mcp-protocol-version": requested, "mcp-method": rpc.method}
    if (source := _NAMED.get(rpc.method)) is not None:
        value = rpc.params.get(source)
        if not isinstance(value, str):
            raise RpcFault(INVALID_PARAMS, f"params.{source} must be a text.")
        expected["mcp-name"] = value
    for header, value in expected.items():
        told = given[header][0] if given[header] else None
        if told is None:
            raise RpcFault(HEADER_MISMATCH, f"The header {header} is missing.")
        if (_decoded(told) if header == "mcp-name" else told) != value:
            raise RpcFault(HEADER_MISMATCH, f"The header {header} does not say what the body says.")
    revision = REVISIONS.get(requested)
    if revision is None or not revision.stateless:
        raise unsupported(requested)
    return revision


def _decoded(value: str) -> str | None:
    begin, end = _ENCODED
    if not (value.startswith(begin) and value.endswith(end) and len(value) >= len(begin) + len(end)):
        return value if value.isascii() and value.isprintable() else None
    try:
        return base64.b64decode(value[len(begin) : -len(end)], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


def _name(request: Request, rpc: Rpc) -> str:
    """Which of the key's sessions is meant. Raises RpcFault."""
    name = rpc.meta.get(META_SESSION, request.headers.get(SESSION_HEADER, DEFAULT_NAME))
    if not isinstance(name, str) or not is_name(name):
        raise RpcFault(INVALID_PARAMS, f"Toolcrib-Session must be {NAME_FORM}.")
    return name
