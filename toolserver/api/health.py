"""Health, readiness and metrics."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from toolserver.api.answers import json_answer
from toolserver.api.services import caller, services

_PATIENCE_S = 2.0  # with the engine, so that the other metrics come in time when it hangs


async def alive(_request: Request) -> Response:
    """The process answers; nothing else is looked at."""
    return json_answer({"status": "ok"})


async def ready(request: Request) -> Response:
    """200, or 503 with the reason."""
    caller(request, "read")
    await services(request).readiness.check()
    return json_answer({"status": "ready"})


async def metrics(request: Request) -> Response:
    caller(request, "metrics")  # they are sums over all tenants
    await services(request).readiness.look(_PATIENCE_S)
    return Response(services(request).metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")
