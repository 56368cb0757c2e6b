"""Where requests to /mcp may come from: names that the server goes by, and web pages that may use it from a browser.

Cors    lets the pages of allowed origins read answers of /mcp, and answers what browsers ask before (without a key)
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toolserver.settings import HttpSettings

MCP_PATH = "/mcp"
_PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, POST, DELETE",
    "Access-Control-Allow-Headers": (
        "Authorization, Content-Type, Accept, Last-Event-ID, Mcp-Session-Id, MCP-Protocol-Version, Mcp-Method, Mcp-Name, "
        "Toolcrib-Session"
    ),
    "Access-Control-Max-Age": "600",
}
_EXPOSED = "Mcp-Session-Id, X-Request-Id, Retry-After"


class Cors:
    def __init__(self, app: ASGIApp, settings: HttpSettings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = Headers(scope=scope).get("origin") if scope["type"] == "http" and scope["path"] == MCP_PATH else None
        if origin is None or not takes_origin(self._settings, origin):
            await self._app(scope, receive, send)
            return
        told = {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}
        if scope["method"] == "OPTIONS":
            await Response(None, 204, told | _PREFLIGHT)(scope, receive, send)
            return

        async def send_shared(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(told | {"Access-Control-Expose-Headers": _EXPOSED})
            await send(message)

        await self._app(scope, receive, send_shared)


def takes_origin(settings: HttpSettings, origin: str) -> bool:
    return origin in settings.allowed_origins or _is_loopback(_host_of(origin))


def takes_host(settings: HttpSettings, hosts: list[str]) -> bool:
    """A server on a loopback address knows the names it goes by; another one does when they are set."""
    if not settings.allowed_hosts and not _is_loopback(settings.host):
        return True
    host = _host_of("//" + hosts[0]) if len(hosts) == 1 else None
    return _is_loopback(host) or _is_address(host) or host in (settings.host, *settings.allowed_hosts)


def _host_of(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _is_address(host: str | None) -> bool:
    try:
        ipaddress.ip_address(host or "")
    except ValueError:
        return False
    return True


def _is_loopback(host: str | None) -> bool:
    if host is not None and (host == "localhost" or host.endswith(".localhost")):
        return True
    return _is_address(host) and ipaddress.ip_address(host or "").is_loopback
