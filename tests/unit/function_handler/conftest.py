from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agent.events import Event, EventKind
from agent.settings import ToolServerSettings
from agent.store.memory_store import MemoryJournal
from agent.tools.function_handler import FunctionHandler
from agent.tools.outcome import Invocation, Outcome
from agent.tools.workspace_store import WorkspaceStore
from agent.toolserver_client.client import ToolServerClient
from tests.unit.function_handler.fake_toolserver import KEY, FakeToolServer


async def until(condition: Callable[[], object], limit_s: float = 10.0) -> None:
    """Return as soon as the condition holds; fail after `limit_s`."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - it is the other side's state that is looked at
            await asyncio.sleep(0.002)


QUICK = ToolServerSettings(
    wait_s=0.3, deadline_s=5, connect_s=1, max_attempts=6, max_continuations=4, breaker_failures=50
)


class Allowance:
    """Counts what is reserved; `refuse` stands for a budget that is used up."""

    def __init__(self) -> None:
        self.reserved = 0
        self.refuse: Exception | None = None

    def reserve_tool_call(self) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.reserved += 1


@dataclass
class Agent:
    """What one agent process has; `again()` is the process after it, on the same journal and folder."""

    server: FakeToolServer
    folder: Path
    events: list[Event] = field(default_factory=list)
    settings: ToolServerSettings = QUICK
    options: dict[str, Any] = field(default_factory=dict)
    key: str = KEY
    run_id: str = "run-1"

    def __post_init__(self) -> None:
        self.journal = MemoryJournal(self.run_id, self.events)
        self.client = ToolServerClient(self.server.url, self.key, connect_s=1, answer_s=1.0, trace_seed=self.run_id)
        self.server.clients.append(self.client)
        self.store = WorkspaceStore(self.folder)
        self.allowance = Allowance()
        self.waits: list[float] = []
        self.handler = FunctionHandler(
            self.client,
            self.journal,
            self.settings,
            self.run_id,
            self.store,
            self.allowance,
            sleep=self._sleep,
            **self.options,
        )

    async def _sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        await asyncio.sleep(min(seconds, 0.01))

    def again(self, **changes: Any) -> Agent:
        keep = {"settings": self.settings, "options": self.options, "key": self.key, "run_id": self.run_id, **changes}
        return Agent(self.server, self.folder, self.events, **keep)

    async def call(self, tool: str = "note", arguments: Any = None, *, key: str = "t1/a1/actor/s1/c0") -> Outcome:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments or {"text": "a"})
        return await self.handler.call(Invocation(key, key.partition("/")[0], tool, text))

    def kinds(self) -> list[EventKind]:
        return [event.kind for event in self.events]

    def of(self, kind: EventKind) -> list[dict[str, Any]]:
        return [event.data for event in self.events if event.kind is kind]

    def notes(self) -> str:
        return "\n".join(data["text"] for data in self.of(EventKind.NOTE))


@pytest.fixture
async def server() -> AsyncIterator[FakeToolServer]:
    server = await FakeToolServer().start()
    yield server
    for client in server.clients:
        await client.close()
    await server.close()


@pytest.fixture
def agent(server: FakeToolServer, tmp_path: Path) -> Agent:
    return Agent(server, tmp_path / "workspace")
