"""The protocol part that every tool image of ours shares: MCP messages as lines, standard library only.

It knows nothing of files or processes: a server feeds it lines and gets answers to write. See
docs/reference/sandbox-protocol.md.
"""

from __future__ import annotations

import json

from sandbox_images.base import path_text
from sandbox_images.base.annotations import Any

PROTOCOL_VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")  # newest first
WORKER_EXTENSION, WORKER_VERSION = "toolcrib/worker", 2
MAX_LINE_BYTES = 8 << 20

PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS, INTERNAL_ERROR = -32700, -32600, -32601, -32602, -32603
REFUSED = -32000  # ours; data.kind says why


class ProtocolError(Exception):
    """An answer of kind error: `code`, `message`, and for REFUSED a `kind`."""

    def __init__(self, code: int, message: str, kind: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.kind = code, message, kind


def refused(kind: str, message: str) -> ProtocolError:
    """The refusal of an extension method, with its `data.kind`."""
    return ProtocolError(REFUSED, message, kind)


class Encoded(bytes):
    """A value that is JSON already, without a newline."""

    __slots__ = ()


_DECODER = json.JSONDecoder()
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def encode_value(value: Any) -> Encoded:
    """A line is always valid UTF-8: names of files that are not are spelled, other lone surrogates replaced. Raises ValueError, RecursionError."""
    return Encoded(_ENCODER.encode(value).encode("utf-8", path_text.ERRORS))


def encode(message: dict[str, Any]) -> bytes:
    """One line."""
    return encode_value({"jsonrpc": "2.0", **message}) + b"\n"


def result(request_id: Any, value: dict[str, Any] | Encoded) -> bytes:
    if isinstance(value, Encoded):
        return b'{"jsonrpc":"2.0","id":%b,"result":%b}\n' % (encode_value(request_id), value)
    return encode({"id": request_id, "result": value})


def error(request_id: Any, problem: ProtocolError) -> bytes:
    body: dict[str, Any] = {"code": problem.code, "message": problem.message}
    if problem.kind is not None:
        body["data"] = {"kind": problem.kind}
    return encode({"id": request_id, "error": body})


def decode(line: bytes) -> dict[str, Any]:
    """A message out of a line. Raises ProtocolError (PARSE_ERROR or INVALID_REQUEST)."""
    try:
        message = _DECODER.decode(line.decode())
    except (ValueError, RecursionError) as problem:
        raise ProtocolError(PARSE_ERROR, f"not JSON: {problem}") from problem
    if not isinstance(message, dict) or message.get("jsonrpc") != "2.0":
        raise ProtocolError(INVALID_REQUEST, "not a JSON-RPC 2.0 message")
    return message


def initialize_result(params: dict[str, Any], name: str, version: str, *, worker: bool) -> dict[str, Any]:
    """The answer to `initialize`: the client's protocol version when known, else our newest."""
    asked = params.get("protocolVersion")
    capabilities: dict[str, Any] = {"tools": {"listChanged": False}}
    if worker:
        capabilities["experimental"] = {WORKER_EXTENSION: {"version": WORKER_VERSION}}
    return {
        "protocolVersion": asked if asked in PROTOCOL_VERSIONS else PROTOCOL_VERSIONS[0],
        "capabilities": capabilities,
        "serverInfo": {"name": name, "version": version},
    }
