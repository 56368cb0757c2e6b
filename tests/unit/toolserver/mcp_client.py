"""A client of /mcp that does no more than a test tells it: of the revisions with sessions, and of the stateless one."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.unit.toolserver.crib import KEY, Crib

HEAD = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json", "Host": "localhost"}
_PREFIX = "io.modelcontextprotocol/"


@dataclass
class McpClient:
    """`modern`: of 2026-07-28. `heard` has all messages that came, answers among them."""

    http: httpx.AsyncClient
    modern: bool = False
    key: str = KEY
    capabilities: dict[str, Any] = field(default_factory=dict)
    session: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    heard: list[dict[str, Any]] = field(default_factory=list)
    numbers: Any = field(default_factory=itertools.count)

    def head(self, method: str, params: dict[str, Any]) -> dict[str, str]:
        head = {**HEAD, "Authorization": f"Bearer {self.key}", **self.headers}
        if self.modern:
            head |= {"MCP-Protocol-Version": "2026-07-28", "Mcp-Method": method}
            head |= {"Mcp-Name": params["name"]} if isinstance(params.get("name"), str) else {}
        return head | ({"Mcp-Session-Id": self.session} if self.session is not None else {})

    def message(self, method: str, params: dict[str, Any], number: Any = None) -> dict[str, Any]:
        if self.modern:
            about = {"protocolVersion": "2026-07-28", "clientCapabilities": self.capabilities}
            meta = {_PREFIX + name: value for name, value in about.items()}
            params = {**params, "_meta": {**meta, **params.get("_meta", {})}}
        number = next(self.numbers) if number is None else number
        return {"jsonrpc": "2.0", "id": number, "method": method, "params": params}

    async def post(self, message: Any, **headers: str) -> httpx.Response:
        """Anything at all, as it is."""
        known = message if isinstance(message, dict) else {}
        params = known.get("params")
        head = self.head(str(known.get("method", "")), params if isinstance(params, dict) else {})
        return await self.http.post("/mcp", content=json.dumps(message), headers={**head, **headers})

    async def ask(self, method: str, params: dict[str, Any] | None = None, **headers: str) -> dict[str, Any]:
        """The answer to a request, whatever it is."""
        message = self.message(method, params or {})
        answer = await self.post(message, **headers)
        found = messages(answer)
        self.heard += found
        mine = [one for one in found if one.get("id") == message["id"] and "method" not in one]
        assert len(mine) == 1, (answer.status_code, answer.text)
        return mine[0]

    async def result(self, method: str, params: dict[str, Any] | None = None, **headers: str) -> dict[str, Any]:
        answer = await self.ask(method, params, **headers)
        assert "result" in answer, answer
        return dict(answer["result"])

    async def call(self, tool: str, arguments: Any = None, **meta: Any) -> dict[str, Any]:
        """The result of a call. `meta`: its `_meta`, with `__` for a slash."""
        params = {"name": tool, "arguments": {} if arguments is None else arguments}
        told = {name.replace("__", "/"): value for name, value in meta.items()}
        return await self.result("tools/call", {**params, **({"_meta": told} if told else {})})

    async def begin(self, version: str = "2025-11-25") -> dict[str, Any]:
        """Initialize, and say so."""
        params = {
            "protocolVersion": version,
            "capabilities": self.capabilities,
            "clientInfo": {"name": "test", "version": "1"},
        }
        answer = await self.post(self.message("initialize", params))
        assert answer.status_code == 200, answer.text
        self.session = answer.headers["mcp-session-id"]
        assert (await self.post(note("notifications/initialized"))).status_code == 202
        return dict(answer.json()["result"])

    async def end(self) -> httpx.Response:
        return await self.http.delete("/mcp", headers=self.head("", {}))


def note(method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "method": method, "params": params or {}}


def messages(answer: httpx.Response) -> list[dict[str, Any]]:
    """Of an answer, plain or as events."""
    if not answer.headers.get("content-type", "").startswith("text/event-stream"):
        found = json.loads(answer.content) if answer.content else []
        return found if isinstance(found, list) else [found]
    lines = answer.text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ") and line != "data: "]


async def events(answer: httpx.Response) -> AsyncIterator[tuple[str | None, dict[str, Any] | None]]:
    """The events of a stream as they come: id, and the message or None."""
    mark, data = None, None
    async for line in answer.aiter_lines():
        if line.startswith("id: "):
            mark = line[4:]
        elif line.startswith("data: "):
            data = line[6:]
        elif not line and (data is not None or mark is not None):
            yield mark, json.loads(data) if data else None
            mark, data = None, None


async def connected(crib: Crib, version: str = "2025-11-25", **fields: Any) -> McpClient:
    """A client of that revision that is ready for calls."""
    client = McpClient(crib.client, modern=version == "2026-07-28", **fields)
    if not client.modern:
        await client.begin(version)
    return client


def text_of(result: dict[str, Any]) -> str:
    return "\n".join(block["text"] for block in result["content"] if block["type"] == "text")
