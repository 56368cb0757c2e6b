r"""A scripted MCP tool server for the fake runtime: what a sandbox says, when, and how it dies.

A test gives its own tools, or subclasses FakeToolServer and replaces `answer`:

    async def hang(call): await asyncio.Event().wait()
    async def die(call): raise Died("oom")
    async def garbage(call): await call.server.write(b"not json\n"); return text_result("fine")
    FakeRuntime(..., server=lambda spec, workspace: FakeToolServer(spec, workspace, tools=[FakeTool("hang", hang), ...]))
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from toolserver.runtime.base import SandboxSpec
from toolserver.runtime.fake_calls import FakeCalls
from toolserver.runtime.fake_files import FakeFiles
from toolserver.runtime.fake_pipe import FakePipe
from toolserver.runtime.fake_workspace import FakeWorkspace, Refused

ToolHandler = Callable[["FakeCall"], Awaitable[dict[str, Any]]]


class Died(Exception):  # noqa: N818 - reads as the event it is
    """Raised by a script: the sandbox ends now, without another byte."""

    def __init__(
        self, cause: Literal["exited", "killed", "oom", "unknown"] = "exited", exit_code: int | None = 1
    ) -> None:
        super().__init__(cause)
        self.cause, self.exit_code = cause, exit_code


@dataclass
class FakeCall:
    """One `tools/call`. What the script appends to `output` is told to `peek` and kept when the call is stopped."""

    server: FakeToolServer
    tool: str
    arguments: dict[str, Any]
    call_id: str | None
    output: list[str] = field(default_factory=list)
    token: Any = None

    async def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """A progress notification, if the client asked for them."""
        if self.token is not None:
            told = {"progressToken": self.token, "progress": progress, "total": total, "message": message}
            params = {name: value for name, value in told.items() if value is not None}
            line = json.dumps({"jsonrpc": "2.0", "method": "notifications/progress", "params": params})
            await self.server.write(line.encode() + b"\n")


@dataclass(frozen=True)
class FakeTool:
    name: str
    handler: ToolHandler
    input_schema: dict[str, Any] = field(default_factory=lambda: {"type": "object"})
    description: str = ""
    annotations: dict[str, Any] = field(default_factory=dict)

    def listed(self) -> dict[str, Any]:
        described = self.description or f"The tool {self.name}."
        annotations = {"annotations": self.annotations} if self.annotations else {}
        return {"name": self.name, "description": described, "inputSchema": self.input_schema, **annotations}


def text_result(text: str, *, end: str = "done", message: str = "", **outcome: Any) -> dict[str, Any]:
    """An MCP result with the extension's outcome; `outcome` overrides its fields."""
    body = {
        "end": end,
        "message": message,
        "state": None,
        "exit_code": None,
        "signal": None,
        "truncated": None,
        "artifacts": [],
        "usage": {"wall_ms": 1.0, "cpu_ms": 1.0, "memory_peak_bytes": None},
        "workspace_changed": [],
        "workspace_changed_more": False,
        **outcome,
    }
    content = [{"type": "text", "text": text}] if text else []
    return {"content": content, "isError": end != "done", "_meta": {"toolcrib/outcome": body}}


async def _echo(call: FakeCall) -> dict[str, Any]:
    return text_result(str(call.arguments.get("text", "")))


async def _sleep(call: FakeCall) -> dict[str, Any]:
    call.output.append("sleeping\n")
    await asyncio.sleep(float(call.arguments["seconds"]))
    return text_result("sleeping\nslept")


async def _fail(call: FakeCall) -> dict[str, Any]:
    message = str(call.arguments.get("message", "The tool said no."))
    return text_result(message, end="failed", message=message, exit_code=1)


async def _die(_call: FakeCall) -> dict[str, Any]:
    raise Died("killed", 137)


def _schema(required: tuple[str, ...] = (), **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


DEFAULT_TOOLS = (
    FakeTool(
        "echo", _echo, _schema(("text",), text={"type": "string"}), "Gives back its text.", {"readOnlyHint": True}
    ),
    FakeTool("sleep", _sleep, _schema(("seconds",), seconds={"type": "number", "minimum": 0}), "Waits."),
    FakeTool("fail", _fail, _schema(message={"type": "string"}), "Fails with its message."),
    FakeTool("die", _die, _schema(), "Ends its sandbox."),
)


class FakeToolServer:
    """Answers MCP and, unless `extension` is false, `toolcrib/worker` over an in-memory tree."""

    def __init__(
        self,
        spec: SandboxSpec,
        workspace: FakeWorkspace,
        *,
        tools: Iterable[FakeTool] = DEFAULT_TOOLS,
        extension: bool = True,
    ) -> None:
        self.spec, self.workspace, self.extension = spec, workspace, extension
        self.tools = {tool.name: tool for tool in tools}
        self.bound: dict[str, Any] | None = None
        self.door: str | None = None  # as it was last told
        self.unready = False  # the door does not answer
        self.requests: list[dict[str, Any]] = []  # all that came, for assertions
        self._files = FakeFiles(workspace)
        self._calls: dict[str, tuple[FakeCall, asyncio.Task[dict[str, Any]]]] = {}
        self._remembered = FakeCalls()
        self._stdout = FakePipe()

    async def serve(self, stdin: FakePipe, stdout: FakePipe) -> None:
        """Until stdin ends. Raises Died (in a group) when a script says so."""
        self._stdout = stdout
        rest = b""
        async with asyncio.TaskGroup() as tasks:
            while data := await stdin.read():
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    try:
                        message = json.loads(line)
                    except ValueError:  # cut off by the death of a server
                        continue
                    self.requests.append(message)
                    if "id" in message and "method" in message:
                        tasks.create_task(self._respond(message))
            for _, task in self._calls.values():
                task.cancel()

    async def write(self, data: bytes) -> None:
        """Raw bytes on stdout."""
        await self._stdout.write(data)

    async def _respond(self, message: dict[str, Any]) -> None:
        body: dict[str, Any]
        try:
            body = {"result": await self.answer(message["method"], message.get("params") or {})}
        except Refused as no:
            body = {"error": {"code": -32000, "message": no.message, "data": {"kind": no.kind}}}
        except LookupError as unknown:
            code = -32602 if message["method"] == "tools/call" else -32601
            body = {"error": {"code": code, "message": f"unknown: {unknown.args[0]}"}}
        await self.write(json.dumps({"jsonrpc": "2.0", "id": message["id"], **body}).encode() + b"\n")

    async def answer(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """The result of one request. Raises LookupError for an unknown method or tool, Refused, Died."""
        match method:
            case "initialize":
                return self._initialize(params)
            case "ping":
                return {}
            case "tools/list":
                return {"tools": [tool.listed() for tool in self.tools.values()]}
            case "tools/call":
                return await self._call(params)
        if not self.extension or not method.startswith("toolcrib/"):
            raise LookupError(method)
        match method.removeprefix("toolcrib/"):
            case "bind":
                self._remembered.take_epoch(params.get("epoch", 0))
                self.bound = params
                return self._take_door((params.get("egress") or {}).get("door"))
            case "egress":
                return self._take_door(params["door"])
            case "attach":
                self._remembered.take_epoch(params["epoch"])
                calls = self._remembered.states()
                return {"epoch": params["epoch"], "bound": self.bound is not None, "calls": calls}
            case "recall":
                return await self._remembered.recall(params["call_id"], params.get("wait_s", 0))
            case "output":
                return await self._remembered.output(**params)
            case "cancel":
                return {"found": self._cancel(params["call_id"])}
            case "peek":
                call, _ = self._calls.get(params["call_id"], (None, None))
                text = "".join(call.output) if call else ""
                return {"content": [{"type": "text", "text": text}] if text else []}
            case "usage":
                size, count = self.workspace.size(), len(self.workspace.files)
                return {"workspace_bytes": size, "workspace_files": count, "memory_bytes": 1 << 20}
            case rest:
                return self._files.answer(rest, params)

    def _take_door(self, door: str | None) -> dict[str, Any]:
        if door is not None and self.unready:
            raise Refused("egress_unready", "the egress proxy did not answer in time")
        self.door = door
        return {}

    def _initialize(self, params: dict[str, Any]) -> dict[str, Any]:
        capabilities: dict[str, Any] = {"tools": {"listChanged": False}}
        if self.extension:
            capabilities["experimental"] = {"toolcrib/worker": {"version": 2}}
        version = params.get("protocolVersion", "2025-11-25")
        about = {"name": f"fake-{self.spec.image}", "version": "1"}
        return {"protocolVersion": version, "capabilities": capabilities, "serverInfo": about}

    def _cancel(self, call_id: str) -> bool:
        found = self._calls.get(call_id)
        if found is not None:
            found[1].cancel()
        return found is not None

    async def _call(self, params: dict[str, Any]) -> dict[str, Any]:
        tool = self.tools[params["name"]]
        meta = params.get("_meta", {}).get("toolcrib/call", {})
        token = params.get("_meta", {}).get("progressToken")
        call = FakeCall(self, tool.name, params.get("arguments") or {}, meta.get("call_id"), token=token)
        key = call.call_id or f"anonymous-{id(call)}"
        record = self._remembered.admit(key, call.output, meta.get("epoch", 0))
        task = asyncio.ensure_future(tool.handler(call))
        self._calls[key] = (call, task)
        try:
            record.result = await self._result(call, task, meta.get("deadline_s"))
            return record.result
        finally:
            task.cancel()
            del self._calls[key]

    async def _result(
        self, call: FakeCall, task: asyncio.Task[dict[str, Any]], deadline_s: float | None
    ) -> dict[str, Any]:
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.wait([task])
        except TimeoutError:
            task.cancel()
            await asyncio.wait([task])
            return text_result(
                "".join(call.output), end="deadline", message="The call outlived its deadline.", state="kept"
            )
        if task.cancelled():
            return text_result("".join(call.output), end="cancelled", message="The call was cancelled.", state="kept")
        return task.result()
