"""The official Python client of the revisions with sessions, told that the tools changed. Says `watching`, then what is there."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import httpx
from mcp import ClientSession, types
from mcp.client.streamable_http import streamable_http_client


async def main() -> None:
    head = {"Authorization": f"Bearer {os.environ['MCP_KEY']}"}
    told = asyncio.Event()

    async def hear(message: Any) -> None:
        if isinstance(message, types.ServerNotification) and isinstance(
            message.root, types.ToolListChangedNotification
        ):
            told.set()

    async with (
        httpx.AsyncClient(headers=head, timeout=90) as http,
        streamable_http_client(os.environ["MCP_URL"], http_client=http) as (read, write, _),
        ClientSession(read, write, message_handler=hear) as session,
    ):
        await session.initialize()
        await session.list_tools()
        print("watching", flush=True)
        async with asyncio.timeout(60):
            await told.wait()
        print(json.dumps([tool.name for tool in (await session.list_tools()).tools]))


asyncio.run(main())
