"""A whole ToolServer in this process over the fake runtime, and a client for it."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from toolserver.app import ToolServer
from toolserver.catalog.catalog import Catalog
from toolserver.catalog.image import LimitsOverride, Tool, ToolImage
from toolserver.egress.policy import EgressPolicy
from toolserver.runtime.base import SandboxSpec
from toolserver.runtime.fake_runtime import FakeRuntime
from toolserver.runtime.fake_server import DEFAULT_TOOLS, Died, FakeCall, FakeTool, FakeToolServer, text_result
from toolserver.runtime.fake_workspace import FakeWorkspace
from toolserver.settings import Settings

KEY = "test-key"


async def _exit(call: FakeCall) -> dict[str, Any]:
    raise Died(call.arguments["cause"])


async def _end(call: FakeCall) -> dict[str, Any]:
    arguments = call.arguments
    return text_result("output so far", end=arguments["end"], message=arguments.get("message", ""), exit_code=3)


async def _count(call: FakeCall) -> dict[str, Any]:
    files = call.server.workspace.files
    files["count"] = files.get("count", b"") + b"x"
    await asyncio.sleep(call.arguments.get("seconds", 0))
    return text_result(f"count {len(files['count'])}")


async def _for_ever(_call: FakeCall) -> dict[str, Any]:
    """The fake server does not act on notifications/cancelled: only the end of its sandbox stops it."""
    await asyncio.Event().wait()
    return {}


async def _result(call: FakeCall) -> dict[str, Any]:
    return dict(call.arguments["result"])


async def _say(call: FakeCall) -> dict[str, Any]:
    """Says the lines, `times` over, with a pause after each."""
    for line in call.arguments["lines"] * call.arguments.get("times", 1):
        call.output.append(line)
        await asyncio.sleep(call.arguments.get("pause_s", 0))
    return text_result("".join(call.output))


async def _steps(call: FakeCall) -> dict[str, Any]:
    for step in (1, 2, 3):
        await call.progress(step, 3, f"step {step}")
        await asyncio.sleep(0.05)
    return {"content": [{"type": "text", "text": "done"}]}


async def _later(call: FakeCall) -> dict[str, Any]:
    await asyncio.sleep(call.arguments["seconds"])
    return text_result("", end="failed", message="It came to nothing.")


OBJECT: dict[str, Any] = {"type": "object"}
TOOLS = (
    *DEFAULT_TOOLS,
    FakeTool("exit", _exit, OBJECT, "Ends its sandbox with a cause."),
    FakeTool("end", _end, OBJECT, "Ends with the end that is asked for."),
    FakeTool("count", _count, OBJECT, "Counts its runs in the workspace."),
    FakeTool("later", _later, OBJECT, "Fails after a while."),
    FakeTool("say", _say, OBJECT, "Says lines."),
)
FOREIGN_TOOLS = (
    FakeTool("foreign_result", _result, OBJECT, "Gives back a raw MCP result."),
    FakeTool("foreign_wait", _for_ever, OBJECT),
    FakeTool("foreign_steps", _steps, OBJECT),
)
WEB_TOOLS = (
    FakeTool("web_echo", DEFAULT_TOOLS[0].handler, OBJECT, "An echo from afar.", annotations={"openWorldHint": True}),
)


def tool(fake: FakeTool, image: str) -> Tool:
    described = fake.description or f"The tool {fake.name}."
    return Tool(fake.name, described, fake.input_schema, None, fake.annotations, image)


def image(name: str, tools: Iterable[FakeTool], **over: Any) -> ToolImage:
    fields: dict[str, Any] = {
        "name": name, "reference": f"fake/{name}:1", "command": ("serve",), "workspace": "none", "egress": EgressPolicy(),
        "start": "lazy", "env": {}, "limits": LimitsOverride(), "tools": tuple(tool(t, name) for t in tools),
    }  # fmt: skip
    return ToolImage(**{**fields, **over})


def catalog() -> Catalog:
    images = (
        image("workspace", TOOLS, workspace="rw", start="eager", egress=EgressPolicy("open")),
        image("web", WEB_TOOLS, egress=EgressPolicy("open")),
        image("foreign", FOREIGN_TOOLS),
    )
    return Catalog({one.name: one for one in images})


def serve_spec(spec: SandboxSpec, workspace: FakeWorkspace) -> FakeToolServer:
    offered = {"workspace": TOOLS, "web": WEB_TOOLS, "foreign": FOREIGN_TOOLS}[spec.image]
    return FakeToolServer(spec, workspace, tools=offered, extension=spec.image != "foreign")


def settings(state_dir: Path, **sections: Any) -> Settings:
    call = {"kill_grace_s": 0.3, **sections.pop("call", {})}
    pool = {"enabled": False, **sections.pop("pool", {})}  # else it would start what no test asked for
    return Settings(state_dir=state_dir, api_key=KEY, call=call, pool=pool, runtime={"name": "fake"}, **sections)


@dataclass
class Crib:
    """`client` speaks with the first admin key."""

    server: ToolServer
    runtime: FakeRuntime
    client: httpx.AsyncClient

    async def session(self, **body: Any) -> str:
        answer = await self.client.post("/v1/sessions", json={"images": ["workspace"], **body})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    async def call(self, session_id: str, name: str, arguments: Any = None, **more: Any) -> httpx.Response:
        key = more.pop("key", None)
        headers = {"Idempotency-Key": key} if key is not None else {}
        body = {"arguments": {} if arguments is None else arguments, **more}
        return await self.client.post(f"/v1/sessions/{session_id}/tools/{name}", json=body, headers=headers)

    def workspace_id(self, session_id: str) -> str:
        """As the store has it, of sessions that are gone too."""
        with closing(sqlite3.connect(self.server.database.path)) as database:
            query = "SELECT workspace_id FROM sessions WHERE session_id = ?"
            return str(database.execute(query, (session_id,)).fetchone()[0])

    def sandbox(self, session_id: str, name: str = "workspace") -> FakeToolServer:
        place = (self.workspace_id(session_id), name)
        found = [s.server for s in self.runtime.sandboxes.values() if (s.spec.workspace_id, s.spec.image) == place]
        assert len(found) == 1
        assert isinstance(found[0], FakeToolServer)
        return found[0]


def new_runtime(chosen: Settings) -> FakeRuntime:
    return FakeRuntime("test", chosen.state_dir, chosen.runtime, server=serve_spec)


@asynccontextmanager
async def running(chosen: Settings, runtime: FakeRuntime | None = None) -> AsyncIterator[Crib]:
    runtime = runtime or new_runtime(chosen)
    server = ToolServer(chosen, runtime, catalog())
    await server.start()
    transport = httpx.ASGITransport(app=server.asgi, raise_app_exceptions=False)
    try:
        await server.begun.wait()
        async with httpx.AsyncClient(
            transport=transport, base_url="http://crib", headers={"Authorization": f"Bearer {KEY}"}, timeout=30
        ) as client:
            yield Crib(server, runtime, client)
    finally:
        await server.close()


async def crash(server: ToolServer) -> None:
    """What a kill leaves: nothing is ended, answered or written down any more, and the sandboxes run on."""
    tasks = [*server._tasks, *server.executor._tasks._tasks, *server.registry.background._tasks]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for session in server.registry.live():
        for box in session.boxes.values():
            await box.release()
    server.database.close()
    server._lock.release()


@asynccontextmanager
async def crashing(chosen: Settings, runtime: FakeRuntime) -> AsyncIterator[Crib]:
    """A server that crashes at the end."""
    server = ToolServer(chosen, runtime, catalog())
    await server.start()
    await server.begun.wait()
    transport = httpx.ASGITransport(app=server.asgi, raise_app_exceptions=False)
    head = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://crib", headers=head, timeout=30) as client:
        yield Crib(server, runtime, client)
    await crash(server)


def detail(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The detail of an error that must have this status and code; its fixed fields are checked."""
    body = answer.json()
    assert (answer.status_code, body.get("detail", {}).get("code")) == (status, code), json.dumps(body)[:500]
    told: dict[str, Any] = body["detail"]
    assert len(told["message"]) > 8
    assert told["fault"] in {"caller", "tool", "infra", "policy"}
    assert isinstance(told["retryable"], bool)
    assert told["effects"] in {"none", "possible"}
    assert len(told["trace_id"]) == 32
    if status in (429, 503):
        assert int(answer.headers["Retry-After"]) >= 1
    return told
