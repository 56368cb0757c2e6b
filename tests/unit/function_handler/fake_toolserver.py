"""A small ToolServer over real HTTP: it runs each call id once, counts effects, and can fail in every way a wire can."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from agent.toolserver_client.client import ToolServerClient

KEY = "secret-key-of-the-fake"
Body = dict[str, Any]
Behaviour = Callable[[str, Body], Awaitable[tuple[int, Body]]]


@dataclass
class Request:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


@dataclass
class Reply:
    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def json(cls, status: int, value: Any, **headers: str) -> Reply:
        return cls(status, json.dumps(value).encode(), {"content-type": "application/json", **headers})


@dataclass
class Fault:
    """What befalls one request. `before`: it is never read as one; `after`: it is carried out, and the answer is lost or spoilt."""

    kind: str  # reply, drop_before, drop_after, cut_after, hang_before, hang_after, raw
    reply: Reply | None = None
    raw: bytes = b""
    seconds: float = 30.0


@dataclass
class Call:
    tool: str
    session_id: str
    request: str
    task: asyncio.Task[None] | None = None
    answer: Reply | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)


def refusal(status: int, code: str, message: str = "as the test wants it", **extra: Any) -> Reply:
    detail = {
        "code": code,
        "message": message,
        "fault": "infra",
        "retryable": status in (429, 503),
        "effects": "none",
        **extra,
    }
    return Reply.json(status, {"detail": {**detail, "trace_id": "t" * 32}})


def done(text: str = "ok", **fields: Any) -> Body:
    usage = {"wall_ms": 1, "cpu_ms": 1, "memory_peak_bytes": 1}
    content = [{"type": "text", "text": text}] if text else []
    return {"content": content, "artifacts": [], "usage": usage, "workspace_changed": [], "later_field": 1, **fields}


class FakeToolServer:
    """`effects` has a line for each time a tool really ran. State outlives `stop` and `start`."""

    def __init__(self) -> None:
        self.tools: dict[str, Body] = {}
        self.behaviours: dict[str, Behaviour] = {}
        self.effects: list[tuple[str, Body]] = []
        self.calls: dict[str, Call] = {}
        self.sessions: dict[str, dict[str, bytes]] = {}
        self.gone: dict[str, str] = {}
        self.requests: list[Request] = []
        self.clients: list[ToolServerClient] = []  # closed with the server
        self.faults: deque[tuple[str, str, Fault]] = deque()
        self.key: str | None = KEY
        self.port = 0
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()
        self._answering: set[asyncio.Task[None]] = set()
        for name, hints in (("note", {}), ("peek", {"readOnlyHint": True}), ("put", {"idempotentHint": True})):
            self.add_tool(name, hints)

    def add_tool(self, name: str, hints: Body | None = None, schema: Body | None = None) -> None:
        properties = {"text": {"type": "string"}, "seconds": {"type": "number"}, "number": {"type": "integer"}}
        schema = schema or {"type": "object", "properties": properties, "additionalProperties": False}
        self.tools[name] = {
            "name": name,
            "description": f"The tool {name}.",
            "input_schema": schema,
            "annotations": hints or {},
        }

    def fault(self, method: str, part: str, kind: str, **options: Any) -> None:
        """For the next request of that method whose path holds `part`."""
        self.faults.append((method, part, Fault(kind, **options)))

    def answer_with(self, method: str, part: str, *replies: Reply) -> None:
        for reply in replies:
            self.fault(method, part, "reply", reply=reply)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def sent(self, method: str, part: str = "") -> list[Request]:
        return [request for request in self.requests if request.method == method and part in request.path]

    async def start(self) -> FakeToolServer:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        """Refuse connections from now on, and drop those that are open."""
        if self._server is not None:
            self._server.close()
            for writer in list(self._connections):
                writer.transport.abort()
            for task in self._answering:
                task.cancel()
            await asyncio.gather(*self._answering, return_exceptions=True)
            await self._server.wait_closed()
            self._server = None

    async def close(self) -> None:
        await self.stop()
        tasks = [call.task for call in self.calls.values() if call.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def crash(self) -> None:
        """What a kill -9 does to running calls: nobody can say how they ended."""
        for call_id, call in self.calls.items():
            if call.answer is None:
                if call.task is not None:
                    call.task.cancel()
                call.answer = refusal(500, "outcome_unknown", call_id=call_id, effects="possible")
                call.done.set()

    def end_session(self, session_id: str, cause: str = "idle") -> None:
        self.gone[session_id] = cause
        self.sessions.pop(session_id, None)

    def forget(self) -> None:
        """Another server, or one whose state was lost."""
        self.sessions.clear()
        self.gone.clear()
        self.calls.clear()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        self._connections.add(writer)
        try:
            while await self._serve(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            self._connections.discard(writer)
            self._answering.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        request = await _read(reader)
        self.requests.append(request)
        fault = self._fault_for(request)
        if fault is not None and await self._before(fault, writer):
            return False
        reply = fault.reply if fault is not None and fault.reply is not None else await self._answer(request)
        data = _encode(reply)
        if fault is not None and fault.kind.endswith("_after"):
            if fault.kind == "hang_after":
                await asyncio.sleep(fault.seconds)
            if fault.kind == "cut_after":
                writer.write(data[:-5])
                await writer.drain()
                writer.close()
            return False
        writer.write(data)
        await writer.drain()
        return True

    async def _before(self, fault: Fault, writer: asyncio.StreamWriter) -> bool:
        if fault.kind == "hang_before":
            await asyncio.sleep(fault.seconds)
        if fault.kind == "raw":
            writer.write(fault.raw)
            await writer.drain()
            writer.close()
        return fault.kind in ("drop_before", "hang_before", "raw")

    def _fault_for(self, request: Request) -> Fault | None:
        for entry in self.faults:
            method, part, fault = entry
            if method == request.method and part in request.path:
                self.faults.remove(entry)
                return fault
        return None

    async def _answer(self, request: Request) -> Reply:
        if request.path == "/healthz":
            return Reply.json(200, {"status": "ok"})
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return refusal(401, "unauthorized", "no or wrong key", fault="caller")
        match [unquote(part) for part in request.path.strip("/").split("/")]:
            case ["readyz"]:
                return Reply.json(200, {"status": "ready"})
            case ["v1", "tools"]:
                return Reply.json(200, {"tools": list(self.tools.values()), "later_field": True})
            case ["v1", "sessions"]:
                session_id = f"s-{len(self.sessions) + len(self.gone) + 1}"
                self.sessions[session_id] = {}
                return Reply.json(
                    201, {"id": session_id, "state": "ready", "labels": json.loads(request.body).get("labels")}
                )
            case ["v1", "sessions", session_id, *rest]:
                return await self._in_session(request, session_id, rest)
            case ["v1", "calls", call_id]:
                return await self._call(request, call_id)
        return refusal(404, "not_found", "no such route", fault="caller")

    async def _in_session(self, request: Request, session_id: str, rest: list[str]) -> Reply:
        if rest[:1] == ["tools"] and request.headers.get("idempotency-key") in self.calls:
            return await self._run(request, session_id, rest[1])
        if session_id in self.gone:
            if request.method == "DELETE" and not rest:
                return Reply(204, b"")
            return refusal(410, "session_gone", "the session has ended", cause=self.gone[session_id])
        if session_id not in self.sessions:
            return refusal(404, "session_not_found", "no such session", fault="caller")
        files = self.sessions[session_id]
        match rest:
            case []:
                if request.method == "DELETE":
                    self.end_session(session_id, "deleted")
                    return Reply(204, b"")
                return Reply.json(200, {"id": session_id, "state": "ready"})
            case ["tools", tool]:
                return await self._run(request, session_id, tool)
            case ["files"]:
                return Reply.json(
                    200, {"path": "", "entries": [{"name": n, "bytes": len(c)} for n, c in files.items()]}
                )
            case ["files", *parts]:
                return _file(request, files, "/".join(parts))
            case ["archive"] if request.method == "GET":
                return Reply(200, _tar(files), {"content-type": "application/x-tar"})
            case ["archive"]:
                files.update(_untar(request.body))
                return Reply.json(201, {"files": len(files)})
        return refusal(404, "not_found", "no such route", fault="caller")

    async def _run(self, request: Request, session_id: str, tool: str) -> Reply:
        asked = json.loads(request.body)
        call_id = request.headers["idempotency-key"]
        digest = json.dumps([session_id, tool, asked["arguments"], asked["deadline_s"]], sort_keys=True)
        call = self.calls.get(call_id)
        if call is None:
            if tool not in self.tools:
                return refusal(404, "tool_not_found", f"no tool {tool}", suggestions=["note"], fault="caller")
            call = self.calls[call_id] = Call(tool, session_id, digest)
            call.task = asyncio.create_task(self._carry_out(call_id, call, asked["arguments"]))
        elif call.request != digest:
            return refusal(409, "idempotency_conflict", "another request had this key", call_id=call_id, fault="caller")
        return await self._outcome(call_id, call, asked["wait_s"])

    async def _carry_out(self, call_id: str, call: Call, arguments: Body) -> None:
        try:
            if arguments.get("seconds"):
                await asyncio.sleep(arguments["seconds"])
            self.effects.append((call.tool, arguments))
            behaviour = self.behaviours.get(call.tool)
            status, fields = (200, done()) if behaviour is None else await behaviour(call.session_id, arguments)
        except asyncio.CancelledError:
            if call.answer is None:
                call.answer = refusal(
                    500, "cancelled", "the call was cancelled", call_id=call_id, effects="possible", content=[]
                )
            call.done.set()
            return
        value = {"call_id": call_id, **fields}
        call.answer = (
            Reply.json(200, value)
            if status == 200
            else refusal(status, fields.pop("code"), **{"call_id": call_id, **fields})
        )
        call.done.set()

    async def _outcome(self, call_id: str, call: Call, wait_s: float) -> Reply:
        try:
            if not call.done.is_set():
                await asyncio.wait_for(call.done.wait(), wait_s)
        except TimeoutError:
            content = [{"type": "text", "text": "partial output"}]
            next_step = {"type": "retry", "next_calling": "call_wait", "arguments": {"call_id": call_id}}
            return refusal(
                450, "still_running", "it runs on", call_id=call_id, content=content, effects="possible", **next_step
            )
        assert call.answer is not None
        return call.answer

    async def _call(self, request: Request, call_id: str) -> Reply:
        call = self.calls.get(call_id)
        if call is None:
            return refusal(404, "call_not_found", "no such call", fault="caller")
        if request.method == "DELETE":
            if call.task is not None and not call.done.is_set():
                call.task.cancel()
                await call.done.wait()
            return Reply.json(200, {"call_id": call_id, **done(""), "cancelled": True})
        return await self._outcome(call_id, call, float(request.query.get("wait_s", 0)))


def _file(request: Request, files: dict[str, bytes], path: str) -> Reply:
    if request.method == "PUT":
        files[path] = request.body
        return Reply.json(201, {"path": path, "bytes": len(request.body)})
    if path not in files:
        if any(name.startswith(path + "/") for name in files):
            return refusal(422, "invalid_arguments", "is a directory", errors=[], fault="caller")
        return refusal(404, "file_not_found", f"no file {path}", fault="caller")
    if request.method == "DELETE":
        del files[path]
        return Reply(204, b"")
    return Reply(200, files[path], {"content-type": "application/octet-stream"})


def _tar(files: dict[str, bytes]) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as tar:
        for folder in sorted({name.rpartition("/")[0] for name in files} - {""}):
            member = tarfile.TarInfo(folder)
            member.type = tarfile.DIRTYPE
            tar.addfile(member)
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("a-link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    return target.getvalue()


def _untar(body: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(body)) as tar:
        return {
            member.name: content.read() for member in tar if member.isreg() and (content := tar.extractfile(member))
        }


async def _read(reader: asyncio.StreamReader) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = head[0].split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    if headers.get("transfer-encoding") == "chunked":
        body = b""
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
    else:
        body = await reader.readexactly(int(headers.get("content-length", 0)))
    parts = urlsplit(target)
    return Request(method, parts.path, {name: value[0] for name, value in parse_qs(parts.query).items()}, headers, body)


def _encode(reply: Reply) -> bytes:
    headers = {"content-length": str(len(reply.body)), **reply.headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {reply.status} X\r\n{head}\r\n".encode("latin-1") + reply.body
