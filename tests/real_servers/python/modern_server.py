"""A server of the era without `initialize`, with the Python SDK of that era."""

import asyncio
from typing import Annotated, Any

from mcp.server.elicitation import ElicitationResult
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.resolve import Elicit, Resolve
from pydantic import BaseModel

server = MCPServer("modern")
ended: list[str] = []


class Wish(BaseModel):
    colour: str
    count: int = 1


class Sum(BaseModel):
    total: int


@server.tool()
def add(a: int, b: int) -> Sum:
    """Adds."""
    return Sum(total=a + b)


@server.tool()
def fail(why: str) -> str:
    """Raises."""
    raise ToolError(why)


@server.tool()
async def count(ctx: Context[Any, Any], to: int, pause_s: float = 0.0) -> str:
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


def which_colour() -> Elicit[Wish]:
    return Elicit("Which colour?", Wish)


@server.tool()
def ask(wish: Annotated[ElicitationResult[Wish], Resolve(which_colour)]) -> str:
    """Asks its user."""
    return f"{wish.action}: {wish.data.model_dump_json()}" if wish.action == "accept" else wish.action


@server.tool()
async def grow(ctx: Context[Any, Any]) -> str:
    """Has one more tool from now on."""

    def grown() -> str:
        """Was not there before."""
        return "grown"

    server.add_tool(grown)
    await ctx.notify_tools_changed()
    return "grown"


server.run("stdio")
