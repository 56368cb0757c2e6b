"""The first words with an MCP server of either era, whatever it makes of them.

    Refused       it speaks no version that is known here, or says no to all of them
    StartOver     it died of the first words, or took them without a word: greet a fresh one in another way

An error to a first word is answered in the same process by the first word of the other era. Silence and death are not:
what a server has half understood decides what it will accept next, so that takes a fresh process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toolserver.errors import SandboxGone
from toolserver.sandbox.eras import LATEST_LEGACY, LEGACY_VERSIONS, MODERN_VERSION, is_modern
from toolserver.sandbox.stdio_client import RpcError, StdioClient

CLIENT = {"name": "toolcrib-toolserver", "version": "1"}
CAPABILITIES: dict[str, Any] = {"elicitation": {"form": {}, "url": {}}}
PROBE_S = 8.0  # for an answer of a server of which nothing is known
UNSUPPORTED_VERSION = -32022
_MODERN_ERRORS = frozenset({UNSUPPORTED_VERSION, -32021, -32020})


class Refused(Exception):  # noqa: N818 - reads as what it names
    """The message is a sentence for the operator."""


class StartOver(Exception):  # noqa: N818
    """`instead` is the version to begin with."""

    def __init__(self, instead: str, problem: BaseException) -> None:
        super().__init__(instead)
        self.instead, self.problem = instead, problem


@dataclass(frozen=True)
class Welcome:
    """`version` was agreed on. `capabilities` are the server's."""

    version: str
    capabilities: dict[str, Any]


def meta() -> dict[str, Any]:
    """What each request of the modern era carries."""
    prefix = "io.modelcontextprotocol/"
    return {
        f"{prefix}protocolVersion": MODERN_VERSION,
        f"{prefix}clientInfo": CLIENT,
        f"{prefix}clientCapabilities": CAPABILITIES,
    }


async def greet(client: StdioClient, hint: str | None, timeout_s: float) -> Welcome:
    """`hint`: the version to begin with; None: nothing is known. Raises Refused, StartOver, SandboxGone, TimeoutError."""
    if hint is not None and not is_modern(hint):
        return await _legacy_first(client, timeout_s)
    return await _modern_first(client, min(PROBE_S, timeout_s) if hint is None else timeout_s / 2, timeout_s)


async def _modern_first(client: StdioClient, probe_s: float, timeout_s: float) -> Welcome:
    try:
        return await _discover(client, probe_s)
    except _TryLegacy as no:
        reason = no.reason
    except (SandboxGone, TimeoutError) as problem:
        raise StartOver(LATEST_LEGACY, problem) from problem
    try:
        return await _initialize(client, LATEST_LEGACY, timeout_s)
    except RpcError as no:  # what it made of the probe may stand in the way
        raise StartOver(LATEST_LEGACY, Refused(f"{reason}; {_said(no)}")) from no
    except (SandboxGone, TimeoutError) as problem:
        raise StartOver(LATEST_LEGACY, problem) from problem


async def _legacy_first(client: StdioClient, timeout_s: float) -> Welcome:
    try:
        return await _initialize(client, LATEST_LEGACY, timeout_s)
    except SandboxGone as problem:
        raise StartOver(MODERN_VERSION, problem) from problem
    except RpcError as no:
        first = _said(no)
    try:
        return await _discover(client, timeout_s)
    except _TryLegacy as no:
        raise Refused(f"to initialize it said {first}, to server/discover {no.reason}") from no
    except (SandboxGone, TimeoutError) as problem:
        raise StartOver(MODERN_VERSION, problem) from problem


async def _initialize(client: StdioClient, version: str, timeout_s: float) -> Welcome:
    """Raises RpcError, Refused, SandboxGone, TimeoutError."""
    hello = {"protocolVersion": version, "capabilities": CAPABILITIES, "clientInfo": CLIENT}
    try:
        result = await client.request("initialize", hello, timeout_s)
    except RpcError as no:
        other = _offered(no, LEGACY_VERSIONS)
        if other is None or other == version:
            raise
        result = await client.request("initialize", {**hello, "protocolVersion": other}, timeout_s)
    agreed = result.get("protocolVersion", LEGACY_VERSIONS[-1])
    if agreed not in LEGACY_VERSIONS:
        raise Refused(f"it wants the MCP version {str(agreed)[:40]!r}, which is not known here")
    await client.notify("notifications/initialized", {})
    return Welcome(agreed, _object(result.get("capabilities")))


async def _discover(client: StdioClient, timeout_s: float) -> Welcome:
    """Raises _TryLegacy, Refused, SandboxGone, TimeoutError."""
    client.meta = meta()
    modern = False
    try:
        result = await client.request("server/discover", {}, timeout_s)
        supported = result.get("supportedVersions")
        if not isinstance(supported, list):
            raise _TryLegacy("its answer to server/discover names no versions")
        if MODERN_VERSION in supported:
            modern = True
            return Welcome(MODERN_VERSION, _object(result.get("capabilities")))
        if any(version in LEGACY_VERSIONS for version in supported):
            raise _TryLegacy(f"it speaks {_listed(supported)}")
        raise Refused(f"it speaks {_listed(supported)} of MCP, none of which is known here")
    except RpcError as no:
        if no.code in _MODERN_ERRORS and _offered(no, LEGACY_VERSIONS) is None:
            raise Refused(_said(no)) from no
        raise _TryLegacy(_said(no)) from no
    finally:
        if not modern:
            client.meta = {}


class _TryLegacy(Exception):  # noqa: N818
    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def _offered(no: RpcError, known: tuple[str, ...]) -> str | None:
    """The latest version among those that an error names as supported."""
    supported = no.data.get("supported") if isinstance(no.data, dict) else None
    return next((v for v in known if v in supported), None) if isinstance(supported, list) else None


def _said(no: RpcError) -> str:
    return f"{no.message[:300] or 'an error without a word'!r} ({no.code})"


def _listed(versions: list[Any]) -> str:
    return ", ".join(str(version)[:40] for version in versions[:6])


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
