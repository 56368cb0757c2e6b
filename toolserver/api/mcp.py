"""/mcp: the tools over MCP streamable HTTP. What every request must be first; then the revision's own part takes it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from toolserver.api import strict_json
from toolserver.api.body import raw_body
from toolserver.api.events import MEDIA_TYPE, qualities
from toolserver.api.mcp_messages import INVALID_REQUEST, RpcFault, fault_of, unread
from toolserver.api.mcp_revisions import REVISIONS, unsupported
from toolserver.api.mcp_rooms import Rooms
from toolserver.api.mcp_stateless import Stateless, is_stateless
from toolserver.api.mcp_with_sessions import WithSessions
from toolserver.api.origins import takes_host, takes_origin
from toolserver.api.services import caller, services
from toolserver.errors import ToolServerError

_JSON = "application/json"


class McpEndpoint:
    """The endpoint, with what it remembers of its clients."""

    def __init__(self) -> None:
        rooms = Rooms()
        self._stateless, self._with_sessions = Stateless(rooms), WithSessions(rooms)

    async def post(self, request: Request) -> Response:
        try:
            _check_where(request)
            caller(request, "read")
            _check_form(request, _JSON, MEDIA_TYPE)
            if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _JSON:
                raise RpcFault(INVALID_REQUEST, f"The body must be sent as {_JSON}.", status=415)
            try:
                body = strict_json.read_value(await raw_body(request))
            except ToolServerError as problem:
                raise unread(problem) from problem
            if is_stateless(request, body):
                return await self._stateless.post(request, body)
            named = request.headers.get("mcp-protocol-version")
            if named is not None and named not in REVISIONS:
                raise unsupported(named)
            return await self._with_sessions.post(request, body)
        except Exception as problem:  # noqa: BLE001 - whatever went wrong, it is told in JSON-RPC
            return fault_of(problem).answer()

    async def get(self, request: Request) -> Response:
        try:
            _check_where(request)
            _check_sessions(request)
            caller(request, "read")
            _check_form(request, MEDIA_TYPE)
            return await self._with_sessions.get(request)
        except Exception as problem:  # noqa: BLE001
            return fault_of(problem).answer()

    async def delete(self, request: Request) -> Response:
        try:
            _check_where(request)
            _check_sessions(request)
            caller(request, "read")
            return await self._with_sessions.delete(request)
        except Exception as problem:  # noqa: BLE001
            return fault_of(problem).answer()


def _check_sessions(request: Request) -> None:
    """GET and DELETE are for the revisions that have sessions. Raises RpcFault."""
    named = request.headers.get("mcp-protocol-version")
    revision = REVISIONS.get(named or "")
    if request.method == "HEAD" or (revision is not None and revision.stateless):
        told = "This revision knows POST alone; open a stream with subscriptions/listen."
        raise RpcFault(INVALID_REQUEST, told, status=405, headers={"Allow": "POST"})
    if named is not None and revision is None:
        raise unsupported(named)


def _check_form(request: Request, *needed: str) -> None:
    """Raises RpcFault: the client does not take what is answered here."""
    given = request.headers.getlist("accept")
    accepts = qualities(",".join(given)) if given else {"*/*": 1.0}
    for kind in needed:
        ranges = (kind, kind.partition("/")[0] + "/*", "*/*")
        if not any(accepts.get(one, 0.0) > 0 for one in ranges):
            raise RpcFault(INVALID_REQUEST, f"The Accept header must name {' and '.join(needed)}.", status=406)


def _check_where(request: Request) -> None:
    """Against web pages that reach the server through a name of theirs, or from where the operator wants none. Raises RpcFault."""
    http = services(request).settings.http
    if not takes_host(http, request.headers.getlist("host")):
        raise _foreign("Host", "http.allowed_hosts")
    for origin in request.headers.getlist("origin"):
        if not takes_origin(http, origin):
            raise _foreign("Origin", "http.allowed_origins")


def _foreign(header: str, setting: str) -> RpcFault:
    told = f"Requests with this {header} are not taken here. The server's setting {setting} names those that are."
    return RpcFault(403, told, status=403)
