"""The official Python client of the revision 2026-07-28: says as one JSON object what it saw."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import httpx2
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult, ElicitRequestParams, ElicitResult, TextContent

SLOW = "echo begun > c.txt; sleep 30; echo done > c.txt"
BEGUN = "until [ -e c.txt ]; do sleep 0.1; done"
SETTLED = "for n in $(seq 50); do pgrep -f '^sleep 30' > /dev/null || break; sleep 0.2; done; cat c.txt; pgrep -cf '^sleep 30'"


def text_of(result: CallToolResult) -> str:
    return "\n".join(block.text for block in result.content if isinstance(block, TextContent))


async def tell(client: Client, seen: dict[str, Any]) -> None:
    listed = await client.list_tools()
    seen["tools"] = [tool.name for tool in listed.tools]
    while listed.next_cursor:
        listed = await client.list_tools(cursor=listed.next_cursor)
        seen["tools"] += [tool.name for tool in listed.tools]
    await client.call_tool("python_execute", {"code": "answer = 6 * 7"})
    seen["kept"] = text_of(await client.call_tool("python_execute", {"code": "print(answer)"}))
    seen["shell"] = text_of(await client.call_tool("shell_execute", {"command": "echo written > a.txt; id -u"}))
    seen["read"] = text_of(await client.call_tool("file_read", {"path": "a.txt"}))
    failed = await client.call_tool("python_execute", {"code": "1 / 0"})
    seen["failed"] = [failed.is_error, text_of(failed)]
    bad = await client.call_tool("python_execute", {"cod": "1"})
    seen["bad"] = [bad.is_error, text_of(bad)]
    try:
        await client.call_tool("no_such_tool", {})
    except MCPError as problem:
        seen["unknown"] = [problem.error.code, problem.error.message]
    asked = await client.call_tool("test_elicitation", {"message": "Who are you?"})
    seen["asked"] = [asked.is_error, text_of(asked)]
    told: list[list[float | None]] = []

    async def hear(done: float, total: float | None, message: str | None) -> None:
        del message
        told.append([done, total])

    await client.call_tool("test_tool_with_progress", {}, progress_callback=hear)
    seen["progress"] = told
    call = asyncio.create_task(client.call_tool("shell_execute", {"command": SLOW}))
    await client.call_tool("shell_execute", {"command": BEGUN})
    call.cancel()
    await asyncio.wait([call])
    ended = await client.call_tool("shell_execute", {"command": SETTLED})
    seen["cancelled"] = text_of(ended)


async def answer(_context: Any, params: ElicitRequestParams) -> ElicitResult:
    return ElicitResult(action="accept", content={"username": params.message, "email": "ann@example.org"})


async def main() -> None:
    head = {"Authorization": f"Bearer {os.environ['MCP_KEY']}", "Toolcrib-Session": os.environ["MCP_SESSION"]}
    seen: dict[str, Any] = {}
    for again in (False, True):
        async with (
            httpx2.AsyncClient(headers=head, timeout=60) as http,
            Client(
                streamable_http_client(os.environ["MCP_URL"], http_client=http), elicitation_callback=answer
            ) as client,
        ):
            if again:  # as another process of the same user would come
                seen["resumed"] = text_of(await client.call_tool("python_execute", {"code": "print(answer)"}))
            else:
                seen["revision"], seen["server"] = client.protocol_version, client.server_info.name
                await tell(client, seen)
    print(json.dumps(seen))


asyncio.run(main())
