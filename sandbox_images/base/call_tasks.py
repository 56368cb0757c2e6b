"""Running calls of an asyncio worker: started, looked at, stopped, answered exactly once."""

from __future__ import annotations

import asyncio
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from sandbox_images.base import mcp_stdio as mcp
from sandbox_images.base.call_memory import CallMemory, CallRecord, encode_result
from sandbox_images.base.outcome import Ended, Outcome
from sandbox_images.base.progress import Progress

DEFAULT_DEADLINE_S = 120.0
DEFAULT_TEXT_BYTES = 65_536


class Tools(Protocol):
    """What an image can do."""

    async def call(self, name: str, arguments: dict[str, Any], progress: Progress, max_text_bytes: int) -> Outcome:
        """Raises Ended. Cancelling stops the work."""

    async def close(self) -> None:
        """End whatever was started."""


@dataclass
class Session:
    """What `toolcrib/bind` brought: the session's environment, secrets among it."""

    env: Mapping[str, str] = field(default_factory=dict, repr=False)


MakeTools = Callable[[Session], Tools]


@dataclass
class _Call:
    """`stop` is why the task was cancelled: `cancel` is answered, `abandon` (MCP's own) is not, as MCP says."""

    request_id: Any
    record: CallRecord
    tool: str
    arguments: dict[str, Any]
    deadline_s: float
    max_text_bytes: int
    progress: Progress = field(default_factory=Progress)
    task: asyncio.Task[None] | None = None
    stop: str | None = None


class CallTasks:
    """Owns the tasks of the calls, and the tools. Call `close` at the end."""

    def __init__(
        self,
        make_tools: MakeTools,
        names: frozenset[str],
        memory: CallMemory,
        send: Callable[[bytes], None],
        *,
        max_running: int,
    ) -> None:
        self._make_tools, self._names, self._memory, self._send = make_tools, names, memory, send
        self._session = Session()
        self._running: dict[str, _Call] = {}
        self._slots = asyncio.Semaphore(max_running)
        self._loading = asyncio.Lock()
        self._tools: Tools | None = None

    def bind(self, env: Mapping[str, str]) -> None:
        self._session.env = env

    def start(self, request_id: Any, params: dict[str, Any]) -> None:
        """Raises ProtocolError when it is no call of one of the tools; else its answer will be sent."""
        name, arguments = params.get("name"), params.get("arguments", {})
        if not isinstance(name, str) or name not in self._names:
            raise mcp.ProtocolError(mcp.INVALID_PARAMS, f"Unknown tool: {str(name)[:100]}")
        if not isinstance(arguments, dict):
            raise mcp.ProtocolError(mcp.INVALID_PARAMS, "arguments must be an object")
        meta = params.get("_meta")
        about = meta.get("toolcrib/call") if isinstance(meta, dict) else None
        about = about if isinstance(about, dict) else {}
        call_id = about.get("call_id")
        call_id = call_id if isinstance(call_id, str) and call_id else os.urandom(8).hex()
        record = self._memory.admit(call_id, about.get("epoch"))
        deadline_s = _positive(about.get("deadline_s"), DEFAULT_DEADLINE_S)
        text_bytes = int(_positive(about.get("max_text_bytes"), DEFAULT_TEXT_BYTES))
        call = _Call(request_id, record, name, arguments, deadline_s, text_bytes)
        self._running[call_id] = call
        call.task = asyncio.create_task(self._run(call), name=call_id)
        call.task.add_done_callback(lambda _: self._running.pop(call_id, None))

    def cancel(self, call_id: Any) -> bool:
        """Whether there was such a call to stop; it then answers with end `cancelled`."""
        return self._stop(self._running.get(str(call_id)), "cancel")

    def abandon(self, request_id: Any) -> None:
        """MCP's own cancelling, by request: nothing is answered."""
        for call in list(self._running.values()):
            if call.request_id == request_id:
                self._stop(call, "abandon")

    def peek(self, call_id: Any) -> list[dict[str, Any]]:
        call = self._running.get(str(call_id))
        return [{"type": "text", "text": call.progress.note}] if call is not None else []

    async def close(self) -> None:
        tasks = [call.task for call in self._running.values() if call.task is not None and self._stop(call, "abandon")]
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._tools is not None:
            await self._tools.close()

    @staticmethod
    def _stop(call: _Call | None, why: str) -> bool:
        if call is None or call.task is None or call.task.done():
            return False
        if call.stop is None:
            call.stop = why
            # after its first step: a task that is cancelled before never runs, so it could not answer
            asyncio.get_running_loop().call_soon(call.task.cancel)
        return True

    async def _run(self, call: _Call) -> None:
        started = time.monotonic()
        try:
            outcome = await self._outcome(call)
        except asyncio.CancelledError:
            if call.stop is None:
                raise
            outcome = Outcome("cancelled", "The call was cancelled before it was done.", [call.progress.note])
        result = encode_result(outcome.as_result(round((time.monotonic() - started) * 1000)))
        self._memory.ended(call.record, result, ran=outcome.end != "invalid")
        if call.stop != "abandon":
            self._send(mcp.result(call.request_id, result))

    async def _outcome(self, call: _Call) -> Outcome:
        try:
            async with asyncio.timeout(call.deadline_s) as scope, self._slots:
                return await (await self._made()).call(call.tool, call.arguments, call.progress, call.max_text_bytes)
        except Ended as ended:
            return ended.outcome
        except TimeoutError:
            if not scope.expired():
                return _broken()
            message = f"The call was stopped at its deadline of {call.deadline_s:g} s. {call.progress.note}."
            return Outcome("deadline", message, [call.progress.note])
        except Exception:  # the outermost boundary of a call
            return _broken()

    async def _made(self) -> Tools:
        async with self._loading:
            if self._tools is None:
                self._tools = await asyncio.to_thread(self._make_tools, self._session)
            return self._tools


def _broken() -> Outcome:
    traceback.print_exc(file=sys.stderr)
    kind = sys.exc_info()[0]
    return Outcome(
        "crashed",
        f"The tool itself broke ({kind.__name__ if kind else 'unknown'}). Trying again may help; the log says more.",
    )


def _positive(value: Any, default: float) -> float:
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
    return float(cast("float", value)) if usable else default
