"""The official Python client of the revisions with sessions: says as one JSON object what it saw."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import httpx
from mcp import ClientSession, McpError, types
from mcp.client.streamable_http import streamable_http_client

SLOW = "echo begun > c.txt; sleep 30; echo done > c.txt"
BEGUN = "until [ -e c.txt ]; do sleep 0.1; done"
SETTLED = "for n in $(seq 50); do pgrep -f '^sleep 30' > /dev/null || break; sleep 0.2; done; cat c.txt; pgrep -cf '^sleep 30'"


def text_of(result: types.CallToolResult) -> str:
    return "\n".join(block.text for block in result.content if isinstance(block, types.TextContent))


class Story:
    def __init__(self, session: ClientSession) -> None:
        self.session = session
        self.seen: dict[str, Any] = {}

    async def tell(self) -> None:
        session, seen = self.session, self.seen
        listed = await session.list_tools()
        seen["tools"] = [tool.name for tool in listed.tools]
        while listed.nextCursor:
            listed = await session.list_tools(params=types.PaginatedRequestParams(cursor=listed.nextCursor))
            seen["tools"] += [tool.name for tool in listed.tools]
        await session.call_tool("python_execute", {"code": "answer = 6 * 7"})
        seen["kept"] = text_of(await session.call_tool("python_execute", {"code": "print(answer)"}))
        seen["shell"] = text_of(await session.call_tool("shell_execute", {"command": "echo written > a.txt; id -u"}))
        seen["read"] = text_of(await session.call_tool("file_read", {"path": "a.txt"}))
        failed = await session.call_tool("python_execute", {"code": "1 / 0"})
        seen["failed"] = [failed.isError, text_of(failed)]
        bad = await session.call_tool("python_execute", {"cod": "1"})
        seen["bad"] = [bad.isError, text_of(bad)]
        try:
            await session.call_tool("no_such_tool", {})
        except McpError as problem:
            seen["unknown"] = [problem.error.code, problem.error.message]
        asked = await session.call_tool("test_elicitation", {"message": "Who are you?"})
        seen["asked"] = [asked.isError, text_of(asked)]
        await self.progress()
        await self.cancel()

    async def progress(self) -> None:
        told: list[list[float | None]] = []

        async def hear(done: float, total: float | None, message: str | None) -> None:
            del message
            told.append([done, total])

        await self.session.call_tool("test_tool_with_progress", {}, progress_callback=hear)
        self.seen["progress"] = told

    async def cancel(self) -> None:
        """This client cancels by a notification that its caller sends."""
        number = self.session._request_id
        call = asyncio.create_task(self.session.call_tool("shell_execute", {"command": SLOW}))
        await asyncio.sleep(0.1)  # so that the call, not the one below, is sent with that number
        await self.session.call_tool("shell_execute", {"command": BEGUN})
        about = types.CancelledNotificationParams(requestId=number, reason="no longer wanted")
        await self.session.send_notification(types.ClientNotification(types.CancelledNotification(params=about)))
        ended = await self.session.call_tool("shell_execute", {"command": SETTLED})
        call.cancel()
        self.seen["cancelled"] = text_of(ended)


async def answer(_context: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
    return types.ElicitResult(action="accept", content={"username": params.message, "email": "ann@example.org"})


async def main() -> None:
    url, key, relay = os.environ["MCP_URL"], os.environ["MCP_KEY"], os.environ["MCP_RELAY"]
    head = {"Authorization": f"Bearer {key}"}
    seen: dict[str, Any]
    async with (
        httpx.AsyncClient(headers=head, timeout=60) as http,
        streamable_http_client(url, http_client=http) as (read, write, session_id),
        ClientSession(read, write, elicitation_callback=answer) as session,
    ):
        begun = await session.initialize()
        story = Story(session)
        seen = story.seen
        seen["revision"], seen["server"] = begun.protocolVersion, begun.serverInfo.name
        seen["session"] = session_id()
        await story.tell()
    async with (
        httpx.AsyncClient(timeout=60) as http,
        streamable_http_client(relay, http_client=http) as (read, write, _),
        ClientSession(read, write) as session,
    ):
        await session.initialize()
        code = "import time\nfor n in range(6):\n    time.sleep(0.3)\nprint('whole')  # cut-this-stream"
        seen["resumed"] = text_of(await session.call_tool("python_execute", {"code": code}))
    print(json.dumps(seen))


asyncio.run(main())
