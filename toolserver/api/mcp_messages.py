"""JSON-RPC as MCP has it over HTTP: messages as they come in, answers as they go out, and what an error is called.

    RpcFault        what is answered with a JSON-RPC error: its code, and the HTTP status where nothing was streamed yet

Codes: JSON-RPC's own, those that MCP defines, and for what is left (quotas, a server that is full or away) the HTTP status that
the contract has for it, which lies outside of JSON-RPC's reserved range. `data` is always the contract's error detail.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.responses import Response

from toolserver.api.answers import as_error, json_answer
from toolserver.errors import CODES, Code, ToolServerError
from toolserver.telemetry.trace import trace_id

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
HEADER_MISMATCH = -32020
UNSUPPORTED_VERSION = -32022

_MAX_ID = 256  # characters
_CODES = {
    Code.INVALID_ARGUMENTS: INVALID_PARAMS,
    Code.TOOL_NOT_FOUND: INVALID_PARAMS,
    Code.CALL_NOT_FOUND: INVALID_PARAMS,
    Code.IDEMPOTENCY_CONFLICT: INVALID_PARAMS,
}
RpcId = str | int
Kind = Literal["request", "notification", "response"]


@dataclass
class RpcFault(Exception):  # noqa: N818 - reads as what it is
    """`status` is the HTTP one, `id` the request's where it could be read."""

    code: int
    message: str
    data: Any = None
    status: int = 400
    id: RpcId | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        error: dict[str, Any] = {"code": self.code, "message": self.message}
        if self.data is not None:
            error["data"] = self.data
        return {"jsonrpc": "2.0", "id": self.id, "error": error}

    def answer(self) -> Response:
        return json_answer(self.as_json(), self.status, self.headers)


@dataclass(frozen=True)
class Rpc:
    """One message of a client. A request has an id; a response has neither method nor params of its own."""

    kind: Kind
    id: RpcId | None
    method: str
    params: dict[str, Any]

    @property
    def meta(self) -> dict[str, Any]:
        meta = self.params.get("_meta")
        return meta if isinstance(meta, dict) else {}

    @property
    def progress_token(self) -> RpcId | None:
        token = self.meta.get("progressToken")
        return token if is_id(token) else None


def is_id(value: Any) -> bool:
    """A string or an integer, of a sane length."""
    if isinstance(value, str):
        return len(value) <= _MAX_ID
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63


def read(message: Any) -> Rpc:
    """Raises RpcFault."""
    if not isinstance(message, dict):
        raise RpcFault(INVALID_REQUEST, "The body must be a JSON-RPC message: an object.")
    given = message.get("id")
    known = given if is_id(given) else None
    if message.get("jsonrpc") != "2.0":
        raise RpcFault(INVALID_REQUEST, 'The message must have "jsonrpc": "2.0".', id=known)
    if "id" in message and known is None and "error" not in message:
        raise RpcFault(INVALID_REQUEST, "The id must be a string or an integer.")
    if "method" not in message:
        if ("result" in message) == ("error" in message):
            raise RpcFault(INVALID_REQUEST, "The message is no request, notification or response.", id=known)
        return Rpc("response", known, "", message)
    method, params = message["method"], message.get("params", {})
    if not isinstance(method, str) or not 0 < len(method) <= _MAX_ID:
        raise RpcFault(INVALID_REQUEST, "The method must be a text.", id=known)
    if not isinstance(params, dict):
        raise RpcFault(INVALID_PARAMS, "The params must be an object.", id=known)
    if not isinstance(params.get("_meta", {}), dict):
        raise RpcFault(INVALID_PARAMS, "params._meta must be an object.", id=known)
    return Rpc("request" if "id" in message else "notification", known, method, params)


def fault_of(problem: Exception, of: Rpc | None = None, status: int | None = None) -> RpcFault:
    """Any failure as a JSON-RPC error. `status`: the HTTP one; None: the contract's own."""
    rpc_id = of.id if of is not None else None
    if isinstance(problem, RpcFault):
        if problem.id is None:
            problem.id = rpc_id
        return problem
    error = as_error(problem)
    code = _CODES.get(error.code, INTERNAL_ERROR if error.status == 500 else error.status)
    fault = RpcFault(code, error.message, error.detail(trace_id()), status or error.status, rpc_id)
    if CODES[error.code].retryable and "retry_after_s" in fault.data:
        fault.headers["Retry-After"] = str(max(1, round(fault.data["retry_after_s"])))
    return fault


def unread(problem: ToolServerError) -> RpcFault:
    """For a body that is no JSON that is taken; the others keep their status."""
    fault = fault_of(problem)
    if problem.code is Code.INVALID_ARGUMENTS:
        fault.code, fault.status = PARSE_ERROR, 400
    return fault


def method_not_found(of: Rpc, status: int) -> RpcFault:
    return RpcFault(METHOD_NOT_FOUND, f"There is no method {of.method[:80]!r} here.", status=status, id=of.id)


def invalid_params(message: str, status: int = 200) -> RpcFault:
    return RpcFault(INVALID_PARAMS, message, status=status)


def reply(rpc_id: RpcId | None, result: dict[str, Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": rpc_id, "result": result}


def note(method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
    message: dict[str, Any] = {"jsonrpc": "2.0", "method": method}
    return message if params is None else {**message, "params": params}
