"""The MCP server of the `web` image on stdin and stdout. One event loop; every call is a task with a deadline of its own."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from sandbox_images.base import mcp_stdio as mcp
from sandbox_images.base.call_memory import CallMemory
from sandbox_images.base.lease import Lease
from sandbox_images.base.pollable import pollable
from sandbox_images.web import settings as web_settings
from sandbox_images.web.calls import Calls
from sandbox_images.web.pipe_writer import PipeWriter

_TOOLS = Path(__file__).with_name("tools.json")
_VERSION = "1"  # of the tools; the image's tag is that of the package, whose metadata is not in the image
_NO_WORKSPACE = ("toolcrib/file.", "toolcrib/archive.")


def run() -> int:
    """Serves until stdin ends or the lease is over. Returns the exit code."""
    try:
        settings = web_settings.read(os.environ)
    except ValueError as problem:
        print(f"web: {problem}", file=sys.stderr)
        return 2
    if not pollable(0):
        print("web: stdin must be a pipe, a socket or a terminal", file=sys.stderr)
        return 2
    asyncio.run(_serve(settings))
    return 0


async def _serve(settings: web_settings.Settings) -> None:
    reader, writer = await _streams()
    over = asyncio.Event()
    lease = Lease(asyncio.get_running_loop().call_later, over.set)
    server = Server(writer, settings, lease)
    reading = asyncio.create_task(_read(reader, writer, server, lease))
    waiting = asyncio.create_task(over.wait())
    try:
        done, _ = await asyncio.wait([reading, waiting], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        reading.cancel()
        waiting.cancel()
        await asyncio.gather(reading, waiting, return_exceptions=True)
        await server.close()


async def _read(reader: asyncio.StreamReader, writer: PipeWriter, server: Server, lease: Lease) -> None:
    """Until stdin ends. While nobody takes the answers, no more requests are read: so they stay few."""
    try:
        while True:
            try:
                line = await reader.readline()
            except ValueError:  # longer than the limit; what follows of it is refused as well
                server.send(
                    mcp.error(
                        None, mcp.ProtocolError(mcp.PARSE_ERROR, f"a line is longer than {mcp.MAX_LINE_BYTES} bytes")
                    )
                )
                continue
            if not line.endswith(b"\n"):
                return
            lease.heard()
            server.receive(line)
            await writer.drain()
    except ConnectionError:
        return  # nobody reads the answers any more


async def _streams() -> tuple[asyncio.StreamReader, PipeWriter]:
    """Stdin and stdout, moved away from their numbers, so that no library reads or prints there."""
    loop = asyncio.get_running_loop()
    source, sink = os.fdopen(os.dup(0), "rb", buffering=0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    reader = asyncio.StreamReader(limit=mcp.MAX_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), source)
    return reader, PipeWriter(sink)


class Server:
    """Takes lines and answers them. A call's answer comes when it is done; everything else is answered at once."""

    def __init__(self, writer: PipeWriter, settings: web_settings.Settings, lease: Lease) -> None:
        self._writer = writer
        self._memory = CallMemory(asyncio.get_running_loop().call_later, lease)
        self._tools: list[dict[str, Any]] = json.loads(_TOOLS.read_text(encoding="utf-8"))["tools"]
        self._calls = Calls(settings, frozenset(tool["name"] for tool in self._tools), self._memory, self.send)
        self._remembered = {
            "toolcrib/attach": self._memory.attach,
            "toolcrib/recall": self._memory.recall,
            "toolcrib/output": self._memory.output,
        }

    def send(self, line: bytes) -> None:
        self._writer.write(line)

    def receive(self, line: bytes) -> None:
        if not line.strip():
            return
        request_id = None
        try:
            message = mcp.decode(line)
            request_id = message.get("id")
            self._dispatch(message)
        except mcp.ProtocolError as problem:
            self.send(mcp.error(request_id, problem))
        except Exception:  # the outermost boundary of a request: one that is odd must not end the others
            traceback.print_exc(file=sys.stderr)
            self.send(
                mcp.error(
                    request_id, mcp.ProtocolError(mcp.INTERNAL_ERROR, "the web tool itself broke on this request")
                )
            )

    async def close(self) -> None:
        await self._calls.close()

    def _dispatch(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method is None:
            return  # an answer; nothing was asked
        if not isinstance(params, dict):
            raise mcp.ProtocolError(mcp.INVALID_PARAMS, "params must be an object")
        if "id" not in message:
            if method == "notifications/cancelled":
                self._calls.abandon(params.get("requestId"))
            return
        if method == "tools/call":
            self._calls.start(message["id"], params)
            return
        if method in self._remembered:
            self._remembered[method](params, lambda value: self._reply(message["id"], value))
            return
        self.send(mcp.result(message["id"], self._answer(str(method), params)))

    def _reply(self, request_id: Any, value: dict[str, Any] | mcp.Encoded | mcp.ProtocolError) -> None:
        self.send(
            mcp.error(request_id, value) if isinstance(value, mcp.ProtocolError) else mcp.result(request_id, value)
        )

    def _answer(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        if method == "initialize":
            return mcp.initialize_result(params, "toolcrib-web", _VERSION, worker=True)
        if method == "ping":
            return {}
        if method == "tools/list":
            return {"tools": self._tools}
        if method == "toolcrib/bind":
            self._memory.bind(params)
            self._calls.bind(params.get("env"))
            return {}
        if method == "toolcrib/cancel":
            return {"found": self._calls.cancel(params.get("call_id"))}
        if method == "toolcrib/peek":
            return {"content": self._calls.peek(params.get("call_id"))}
        if method == "toolcrib/usage":
            return {"workspace_bytes": 0, "workspace_files": 0, "memory_bytes": _memory_bytes()}
        if method.startswith(_NO_WORKSPACE):
            raise mcp.ProtocolError(mcp.METHOD_NOT_FOUND, f"{method}: the web image has no workspace and no files")
        raise mcp.ProtocolError(mcp.METHOD_NOT_FOUND, f"there is no method {method[:100]}")


def _memory_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
