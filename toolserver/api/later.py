"""Endpoints of the contract that this version answers with not_implemented, after the checks that come first anyway."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from toolserver.api.services import caller
from toolserver.errors import Code, ToolServerError


def _not_yet(what: str) -> ToolServerError:
    return ToolServerError(Code.NOT_IMPLEMENTED, f"This version of the server does not have {what} yet.")


async def mcp(request: Request) -> Response:
    caller(request, "use")
    raise _not_yet("the MCP endpoint")
