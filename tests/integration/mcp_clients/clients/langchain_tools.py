"""Our tools as those of LangChain, loaded and invoked. Says as one JSON object what it saw."""

from __future__ import annotations

import asyncio
import json
import os

from langchain_core.tools import ToolException
from langchain_mcp_adapters.client import MultiServerMCPClient
from langchain_mcp_adapters.tools import load_mcp_tools


def text_of(content: object) -> str:
    return content if isinstance(content, str) else json.dumps(content)


async def main() -> None:
    head = {"Authorization": f"Bearer {os.environ['MCP_KEY']}"}
    client = MultiServerMCPClient(
        {"crib": {"transport": "streamable_http", "url": os.environ["MCP_URL"], "headers": head}}
    )
    async with client.session("crib") as session:
        tools = {tool.name: tool for tool in await load_mcp_tools(session)}
        python, shell = tools["python_execute"], tools["shell_execute"]
        await python.ainvoke({"code": "answer = 6 * 7"})
        seen = {
            "tools": list(tools),
            "schema": python.args_schema["properties"] if isinstance(python.args_schema, dict) else {},
            "kept": text_of(await python.ainvoke({"code": "print(answer)"})),
            "shell": text_of(await shell.ainvoke({"command": "echo written > a.txt; cat a.txt"})),
        }
        call = {"name": "python_execute", "args": {"code": "1 / 0"}, "id": "call-1", "type": "tool_call"}
        try:
            failed = await python.ainvoke(call)
            seen["failed"] = [failed.status, text_of(failed.content)]
        except ToolException as problem:
            seen["failed"] = ["error", str(problem)]
    alone = {tool.name: tool for tool in await client.get_tools()}  # each call is a session of its own
    seen["alone"] = text_of(await alone["python_execute"].ainvoke({"code": "print(answer)"}))
    print(json.dumps(seen))


asyncio.run(main())
