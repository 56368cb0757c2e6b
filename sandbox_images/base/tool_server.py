"""The MCP server on stdin and stdout of images whose tools are coroutines. Every call is a task with a deadline of its own."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox_images.base import mcp_stdio as mcp
from sandbox_images.base.call_memory import CallMemory
from sandbox_images.base.call_tasks import CallTasks, MakeTools
from sandbox_images.base.door import Door
from sandbox_images.base.lease import Lease
from sandbox_images.base.orphans import reap_orphans
from sandbox_images.base.pipe_writer import PipeWriter
from sandbox_images.base.pollable import pollable

_VERSION = "1"  # of the tools; the image's tag is that of the package, whose metadata is not in the image
_NO_FILES = ("toolcrib/file.", "toolcrib/archive.", "toolcrib/snapshot.", "toolcrib/restore.")


@dataclass(frozen=True)
class ToolServer:
    """What an image tells of itself.

    tools: its tools.json. make_tools: called in a thread before the first call, since what it imports may take a while; it
    gets what the session has bound. max_running: calls at a time, more wait.
    """

    name: str
    tools: Path
    make_tools: MakeTools
    max_running: int = 16

    def run(self) -> int:
        """Serves until stdin ends or the lease is over. Returns the exit code."""
        if not pollable(0):
            print(f"{self.name}: stdin must be a pipe, a socket or a terminal", file=sys.stderr)
            return 2
        asyncio.run(_serve(self))
        return 0


async def _serve(image: ToolServer) -> None:
    reader, writer = await _streams()
    over = asyncio.Event()
    lease = Lease(asyncio.get_running_loop().call_later, over.set)
    server = Server(image, writer, lease)
    reading = asyncio.create_task(_read(reader, writer, server, lease))
    waiting = asyncio.create_task(over.wait())
    reaping = asyncio.create_task(reap_orphans()) if os.getpid() == 1 else None
    try:
        done, _ = await asyncio.wait([reading, waiting], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        reading.cancel()
        waiting.cancel()
        await asyncio.gather(reading, waiting, return_exceptions=True)
        if reaping is not None:
            reaping.cancel()
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
    """Takes lines and answers them. A call's answer comes when it is done; almost everything else is answered at once."""

    def __init__(self, image: ToolServer, writer: PipeWriter, lease: Lease) -> None:
        self._image, self._writer = image, writer
        self._memory = CallMemory(asyncio.get_running_loop().call_later, lease)
        self._door = Door()
        self._tools: list[dict[str, Any]] = json.loads(image.tools.read_text(encoding="utf-8"))["tools"]
        self._calls = CallTasks(
            image.make_tools,
            frozenset(tool["name"] for tool in self._tools),
            self._memory,
            self.send,
            max_running=image.max_running,
        )
        self._later: set[asyncio.Task[None]] = set()
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
                mcp.error(request_id, mcp.ProtocolError(mcp.INTERNAL_ERROR, "the tool itself broke on this request"))
            )

    async def close(self) -> None:
        for task in self._later:
            task.cancel()
        await asyncio.gather(*self._later, return_exceptions=True)
        await self._calls.close()
        await self._door.close()

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
        elif method in self._remembered:
            self._remembered[method](params, lambda value: self._reply(message["id"], value))
        elif method == "toolcrib/bind":
            self._bind(message["id"], params)
        elif method == "toolcrib/egress":
            self._open_door(message["id"], params)
        else:
            self.send(mcp.result(message["id"], self._answer(str(method), params)))

    def _reply(self, request_id: Any, value: dict[str, Any] | mcp.Encoded | mcp.ProtocolError) -> None:
        self.send(
            mcp.error(request_id, value) if isinstance(value, mcp.ProtocolError) else mcp.result(request_id, value)
        )

    def _bind(self, request_id: Any, params: dict[str, Any]) -> None:
        self._memory.bind(params)
        env = params.get("env")
        if isinstance(env, Mapping):
            self._calls.bind({str(name): str(value) for name, value in env.items()})
        egress = params.get("egress")
        if isinstance(egress, dict):
            self._open_door(request_id, egress)
        else:
            self.send(mcp.result(request_id, {}))

    def _open_door(self, request_id: Any, params: dict[str, Any]) -> None:
        """Answers once the way out has been tried."""
        door = Door.named(params)

        async def work() -> None:
            try:
                await self._door.open(door)
            except mcp.ProtocolError as problem:
                self.send(mcp.error(request_id, problem))
            else:
                self.send(mcp.result(request_id, {}))

        task = asyncio.create_task(work())
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    def _answer(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        if method == "initialize":
            return mcp.initialize_result(params, self._image.name, _VERSION, worker=True)
        if method == "ping":
            return {}
        if method == "tools/list":
            return {"tools": self._tools}
        if method == "toolcrib/cancel":
            return {"found": self._calls.cancel(params.get("call_id"))}
        if method == "toolcrib/peek":
            return {"content": self._calls.peek(params.get("call_id"))}
        if method == "toolcrib/usage":
            return {"workspace_bytes": 0, "workspace_files": 0, "memory_bytes": _memory_bytes()}
        if method.startswith(_NO_FILES):
            raise mcp.ProtocolError(
                mcp.METHOD_NOT_FOUND, f"{method}: files are the workspace image's, not those of {self._image.name}"
            )
        raise mcp.ProtocolError(mcp.METHOD_NOT_FOUND, f"there is no method {method[:100]}")


def _memory_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
