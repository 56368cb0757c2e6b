"""An agent of the OpenAI Agents SDK that has our tools over MCP; its model is scripted. Says as one JSON object what it saw."""

from __future__ import annotations

import asyncio
import json
import os

from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from agents.items import ToolCallOutputItem
from agents.mcp import MCPServerStreamableHttp
from openai import AsyncOpenAI


async def main() -> None:
    set_tracing_disabled(disabled=True)
    head = {"Authorization": f"Bearer {os.environ['MCP_KEY']}"}
    tools = MCPServerStreamableHttp(
        {"url": os.environ["MCP_URL"], "headers": head, "timeout": 30}, client_session_timeout_seconds=60
    )
    model = OpenAIChatCompletionsModel("scripted", AsyncOpenAI(base_url=os.environ["MODEL_URL"], api_key="none"))
    async with tools:
        agent = Agent("counter", instructions="Use the tools.", model=model, mcp_servers=[tools])
        done = await Runner.run(agent, "How many lines has the file?", max_turns=8)
        outputs = [str(item.output) for item in done.new_items if isinstance(item, ToolCallOutputItem)]
        names = [tool.name for tool in await tools.list_tools()]
    print(json.dumps({"answer": done.final_output, "outputs": outputs, "tools": names}))


asyncio.run(main())
