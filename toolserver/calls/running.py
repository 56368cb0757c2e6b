"""A call while it runs: who waits for it, and how it can be stopped."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from toolserver.calls.answer import Answer
from toolserver.catalog.image import Tool
from toolserver.errors import ToolServerError
from toolserver.sandbox.tool_sandbox import ToolSandbox
from toolserver.sessions.session import Session


@dataclass
class RunningCall:
    """`answer` is set once, when the call is written down as ended. `sandbox` is set while a sandbox works on it."""

    tenant: str
    call_id: str
    session: Session
    tool: Tool
    arguments: dict[str, Any]
    deadline_s: float
    request_hash: str
    trace_id: str
    answer: asyncio.Future[Answer] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    task: asyncio.Task[None] | None = None
    sandbox: ToolSandbox | None = None
    cancel_reason: str | None = None
    abort_error: ToolServerError | None = None

    def abort(self, error: ToolServerError) -> None:
        """End it now with this error, whatever its sandbox does."""
        if self.abort_error is None and not self.answer.done():
            self.abort_error = error
            if self.task is not None:
                self.task.cancel()

    async def wait(self, wait_s: float) -> Answer | None:
        """Its answer; None when it has none within `wait_s`. Any number may wait; a waiter that goes away stops nothing."""
        if not self.answer.done():
            await asyncio.wait([self.answer], timeout=wait_s)
        return self.answer.result() if self.answer.done() else None
