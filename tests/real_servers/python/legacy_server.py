"""A server of the era of `initialize`, with the Python SDK of that era."""

import asyncio
from typing import Any

from mcp.server.fastmcp import Context, FastMCP
from mcp.server.fastmcp.exceptions import ToolError
from mcp.types import AudioContent, EmbeddedResource, SamplingMessage, TextContent, TextResourceContents
from pydantic import BaseModel

server = FastMCP("legacy")
ended: list[str] = []


class Wish(BaseModel):
    colour: str
    count: int = 1


@server.tool()
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


@server.tool(structured_output=False)
def hear() -> list[AudioContent | EmbeddedResource]:
    """A sound, and a text that is a resource."""
    resource = TextResourceContents(uri="memo://1", text="a memo", mimeType="text/plain")  # type: ignore[arg-type]
    return [
        AudioContent(type="audio", data="UklGRg==", mimeType="audio/wav"),
        EmbeddedResource(type="resource", resource=resource),
    ]


@server.tool()
def fail(why: str) -> str:
    """Raises."""
    raise ToolError(why)


@server.tool()
async def count(ctx: Context[Any, Any, Any], to: int, pause_s: float = 0.0) -> str:
    """Counts, and tells so."""
    try:
        for number in range(1, to + 1):
            await asyncio.sleep(pause_s)
            await ctx.report_progress(number, to, f"at {number}")
    except BaseException as end:
        ended.append(type(end).__name__)
        raise
    return f"counted to {to}"


@server.tool()
def cancelled() -> list[str]:
    """How earlier counts were ended."""
    return ended


@server.tool()
async def ask(ctx: Context[Any, Any, Any]) -> str:
    """Asks its user."""
    answer = await ctx.elicit("Which colour?", Wish)
    return f"{answer.action}: {answer.data.model_dump_json()}" if answer.action == "accept" else answer.action


@server.tool()
async def sample(ctx: Context[Any, Any, Any]) -> str:
    """Asks for a model's word."""
    message = SamplingMessage(role="user", content=TextContent(type="text", text="hello"))
    await ctx.session.create_message([message], max_tokens=9)
    return "sampled"


@server.tool()
async def roots(ctx: Context[Any, Any, Any]) -> str:
    """Asks where it may look."""
    await ctx.session.list_roots()
    return "listed"


@server.tool()
async def grow(ctx: Context[Any, Any, Any]) -> str:
    """Has one more tool from now on."""

    def grown() -> str:
        """Was not there before."""
        return "grown"

    server.add_tool(grown)
    await ctx.session.send_tool_list_changed()
    return "grown"


server.run("stdio")
