"""The revisions of MCP that are spoken at /mcp, and what differs between them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

from toolserver.api.mcp_messages import UNSUPPORTED_VERSION, RpcFault


@dataclass(frozen=True)
class Revision:
    """`stateless`: no initialize, no sessions of the protocol; what a request needs is in its `_meta` and headers."""

    name: str
    stateless: bool = False
    batches: bool = False  # several messages in one body
    tells_bad_arguments: bool = False  # as a failed call, which a model sees, not as an error of the protocol
    primes: bool = False  # streams begin with an empty event that only has an id
    links: bool = True  # content may be a resource_link
    audio: bool = True  # content may be audio
    any_structure: bool = False  # structured content and its schema may be other than an object


_ALL = (
    Revision("2026-07-28", stateless=True, tells_bad_arguments=True, any_structure=True),
    Revision("2025-11-25", tells_bad_arguments=True, primes=True),
    Revision("2025-06-18"),
    Revision("2025-03-26", batches=True, links=False),
    Revision("2024-11-05", links=False, audio=False),
)
REVISIONS = {revision.name: revision for revision in _ALL}
SUPPORTED = [revision.name for revision in _ALL]
NEWEST_WITH_SESSIONS = _ALL[1]

META_VERSION = "io.modelcontextprotocol/protocolVersion"
META_CAPABILITIES = "io.modelcontextprotocol/clientCapabilities"
META_SERVER = "io.modelcontextprotocol/serverInfo"
META_LOG_LEVEL = "io.modelcontextprotocol/logLevel"
META_SUBSCRIPTION = "io.modelcontextprotocol/subscriptionId"

CAPABILITIES: dict[str, Any] = {"tools": {"listChanged": True}, "logging": {}}
_INSTRUCTIONS = (
    "The tools run in an isolated sandbox. Files in /workspace, Python variables and shells persist from call to call of one session; "
    "a session that was not used for {idle} minutes is closed and its files are deleted. Long calls go on until their deadline; "
    "a failed call says in its text what happened and what to do."
)


def instructions(idle_s: float) -> str:
    return _INSTRUCTIONS.format(idle=f"{idle_s / 60:g}")


@cache
def server_info() -> dict[str, str]:
    return {"name": "toolcrib", "title": "Toolcrib ToolServer", "version": version("toolcrib")}


def unsupported(requested: Any) -> RpcFault:
    shown = requested[:80] if isinstance(requested, str) else None
    data = {"supported": SUPPORTED, "requested": shown}
    return RpcFault(UNSUPPORTED_VERSION, f"Unsupported protocol version; supported are {', '.join(SUPPORTED)}.", data)
