"""What tools exist: the live list of the ToolServer, kept until something says that it is out of date."""

from __future__ import annotations

import difflib

from agent.tools.outcome import ToolInfo
from agent.toolserver_client.client import ToolServerClient
from agent.toolserver_client.wire import RemoteTool

# the handler follows and cancels calls itself; a model that does so too would only be in its way
_OURS = frozenset({"call_wait", "call_cancel", "call_answer"})
MAX_SUGGESTIONS = 3


class ToolCatalog:
    def __init__(self, client: ToolServerClient) -> None:
        self._client = client
        self._tools: dict[str, ToolInfo] | None = None
        self._stale = False

    @property
    def known(self) -> dict[str, ToolInfo] | None:
        """The last list seen, None when there was none."""
        return self._tools

    @property
    def fresh(self) -> bool:
        return self._tools is not None and not self._stale

    def outdated(self) -> None:
        """The next use asks the server again."""
        self._stale = True

    async def refresh(self) -> dict[str, ToolInfo]:
        """Raises ToolServerAnswer, NoAnswer; the old list is kept then."""
        tools = await self._client.tools()
        self._tools = {tool.name: _info(tool) for tool in tools if tool.name not in _OURS}
        self._stale = False
        return self._tools


def _info(tool: RemoteTool) -> ToolInfo:
    return ToolInfo(tool.name, tool.description, tool.input_schema, _effect(tool))


def _effect(tool: RemoteTool) -> str:
    """Where the operator said whether a tool may be repeated, what its image says of itself does not count."""
    if tool.retry is not None:
        return "idempotent" if tool.retry == "idempotent" else "once"
    hints = tool.annotations
    return (
        "read" if hints.get("readOnlyHint") is True else "idempotent" if hints.get("idempotentHint") is True else "once"
    )


def nearest(name: str, known: list[str]) -> list[str]:
    """The names that were probably meant, best first. They are told, never called in its place."""
    flat = {candidate.lower().replace("-", "_"): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower().replace("-", "_")[:200], list(flat), MAX_SUGGESTIONS, 0.55)
    return [flat[candidate] for candidate in close]
