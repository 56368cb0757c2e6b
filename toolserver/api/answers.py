"""Answers: JSON bodies, the one error shape, and what an error becomes."""

from __future__ import annotations

import logging
import math
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from toolserver.calls.answer import Answer, encode_body
from toolserver.errors import (
    Code,
    JournalUnavailable,
    RuntimeUnavailable,
    StoreUnavailable,
    ToolServerError,
    runtime_unavailable,
)
from toolserver.telemetry.trace import trace_id

_log = logging.getLogger(__name__)
_WITH_RETRY_AFTER = (429, 503)
_STATUSES = {404: Code.NOT_FOUND, 405: Code.METHOD_NOT_ALLOWED}


def json_answer(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode_body(body), status, headers, media_type="application/json")


def call_answer(answer: Answer, *, replayable: bool) -> Response:
    """`replayable`: the request had an Idempotency-Key, so its answer says when it is a stored one."""
    headers = {"Idempotent-Replay": "true"} if replayable and answer.replayed else {}
    if answer.status in _WITH_RETRY_AFTER:
        headers["Retry-After"] = _retry_after(answer.json()["detail"])
    return Response(answer.body, answer.status, headers, media_type="application/json")


def _retry_after(detail: dict[str, Any]) -> str:
    return str(max(1, math.ceil(detail.get("retry_after_s", 1))))


def as_error(problem: Exception) -> ToolServerError:
    """Every exception in the contract's words. What is not foreseen is `internal`: the log has it, the answer has not."""
    if isinstance(problem, ToolServerError):
        return problem
    if isinstance(problem, RuntimeUnavailable):
        _log.warning("runtime_unavailable", extra={"fields": {"problem": str(problem)}})
        return runtime_unavailable(problem)
    if isinstance(problem, StoreUnavailable):
        what = "journal" if isinstance(problem, JournalUnavailable) else "database"
        _log.error("store_unavailable", extra={"fields": {"what": what, "problem": str(problem)}})
        return ToolServerError(
            Code.RUNTIME_UNAVAILABLE,
            f"Nothing was run: the server's {what} can't be used now (locked, or its disk is full). Try again.",
        )
    if isinstance(problem, HTTPException) and (code := _STATUSES.get(problem.status_code)) is not None:
        what = "There is no such path" if code is Code.NOT_FOUND else "This path does not know the method"
        return ToolServerError(code, f"{what}. GET /openapi.json describes the API.")
    _log.error("request_failed", exc_info=problem)
    return ToolServerError(Code.INTERNAL, "The server failed on this request; its log says how, under this trace_id.")


def error_answer(problem: Exception) -> Response:
    error = as_error(problem)
    detail = error.detail(trace_id())
    headers = dict(problem.headers or {}) if isinstance(problem, HTTPException) else {}
    if error.status in _WITH_RETRY_AFTER:
        headers["Retry-After"] = _retry_after(detail)
    if error.code is Code.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    if error.code is Code.REQUEST_TIMEOUT:
        headers["Connection"] = "close"
    if "content_range" in error.extra:
        headers["Content-Range"] = error.extra["content_range"]
    return Response(encode_body({"detail": detail}), error.status, headers, media_type="application/json")


async def handle(_request: Request, problem: Exception) -> Response:
    return error_answer(problem)
