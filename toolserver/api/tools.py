"""The tool list and the search in it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from toolserver.api import wire
from toolserver.api.answers import json_answer
from toolserver.api.services import caller, services


async def listing(request: Request) -> Response:
    caller(request, "read")
    catalog = services(request).catalog
    withheld = [{"image": one.name, "state": one.state, "reason": one.reason} for one in catalog.withheld()]
    return json_answer(
        {"tools": [tool.as_json() for tool in catalog.tools(None)], **({"withheld": withheld} if withheld else {})}
    )


async def search(request: Request) -> Response:
    caller(request, "read")
    query = wire.read_query(wire.SearchQuery, request.query_params.multi_items())
    found = services(request).catalog.search(query.q, query.k, None)
    return json_answer({"tools": [tool.as_json() for tool in found]})
