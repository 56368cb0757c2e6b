"""What follows a call that is still running: waiting for it, its events, cancelling it, answering it, and the tools for that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from math import inf
from typing import Any

from toolserver.calls import live
from toolserver.calls.answer import Answer
from toolserver.calls.carry_out import stop
from toolserver.calls.executor import Executor
from toolserver.calls.live import Event
from toolserver.calls.outcome import empty_fields
from toolserver.calls.questions import as_asked, settle
from toolserver.calls.request import CallRequest
from toolserver.calls.running import Asked, RunningCall
from toolserver.catalog import arguments as schema_check
from toolserver.catalog.image import Tool
from toolserver.catalog.session_tools import CALL_ANSWER, CALL_CANCEL, CALL_WAIT, SESSION_TOOLS
from toolserver.errors import Code, ToolServerError, invalid_all
from toolserver.sessions.registry import Registry
from toolserver.settings import CallSettings

_TOOLS: dict[str, Tool] = {tool.name: tool for tool in SESSION_TOOLS}
_LOOK_S = 2.0
_OUTCOME_FIELDS = (
    "content", "structured", "truncated", "artifacts", "usage", "workspace_changed", "workspace_changed_more", "state",
    "exit_code", "signal", "sandbox_reset", "cancelled_by", "effects",
)  # fmt: skip


class CallDesk:
    """Calls as the HTTP edge knows them: made, waited for, cancelled."""

    def __init__(self, settings: CallSettings, registry: Registry, executor: Executor) -> None:
        self._settings, self._registry, self._executor = settings, registry, executor

    async def call(self, request: CallRequest) -> Answer:
        """Raises ToolServerError when nothing was run."""
        if request.tool in _TOOLS:
            return await self._session_tool(_TOOLS[request.tool], request)
        came = await self._executor.call(request)
        return came if isinstance(came, Answer) else await self.still_running(came)

    async def wait(self, tenant: str, call_id: str, wait_s: float | None, after: int = 0) -> Answer:
        """Its answer, or a 450 with the output past the first `after` characters. Raises call_not_found."""
        wait = (self._settings.wait_s, self._settings.max_wait_s) if wait_s is None else (wait_s,)
        came = await self._executor.look_up(tenant, call_id, *wait)
        return came if isinstance(came, Answer) else await self.still_running(came, after)

    async def cancel(self, tenant: str, call_id: str) -> Answer:
        """200 with what came of the call; `cancelled` says whether it was stopped by this or an earlier cancel. Raises call_not_found."""
        call = self._executor.admission.find(tenant, call_id)
        if call is not None:
            answer = await stop(call, "caller", self._settings.kill_grace_s)
        else:
            came = await self._executor.look_up(tenant, call_id, 0)
            answer = came if isinstance(came, Answer) else await came.answer
        return _cancelled(call_id, answer)

    async def begin(self, request: CallRequest) -> Answer | RunningCall:
        """As `call`, without waiting: for one who follows it by events. Raises ToolServerError when nothing was run."""
        if request.tool in (CALL_WAIT.name, CALL_ANSWER.name):
            await self._check_session_tool(_TOOLS[request.tool], request)
            if request.tool == CALL_ANSWER.name:
                self._take_answer(request)
            return await self.find(request.tenant, request.arguments["call_id"])
        if request.tool in _TOOLS:
            return await self.call(request)
        return await self._executor.call(replace(request, follow=True))

    def patience_s(self, request: CallRequest) -> float | None:
        """How long the events of a request go on at the most: call_wait has its own word on it."""
        waits = request.tool in (CALL_WAIT.name, CALL_ANSWER.name)
        wait_s = request.arguments.get("wait_s") if waits else None
        return request.wait_s if wait_s is None else min(float(wait_s), self._settings.max_wait_s)

    async def find(self, tenant: str, call_id: str) -> Answer | RunningCall:
        """The call, or its answer. Raises call_not_found."""
        return await self._executor.look_up(tenant, call_id, 0)

    def running(self, tenant: str, call_id: str) -> RunningCall | None:
        """The call, as long as it has no outcome."""
        call = self._executor.admission.find(tenant, call_id)
        return None if call is None or call.answer.done() else call

    async def events(
        self, tenant: str, came: Answer | RunningCall, offset: int, wait_s: float | None
    ) -> AsyncIterator[Event | None]:
        """From `started` to `outcome`, which is a 450 when the call goes on past `wait_s` (None: it is followed to its end).

        None among them: nothing new for some seconds. `offset` is the byte of the output to begin at.
        """
        until = inf if wait_s is None else asyncio.get_running_loop().time() + wait_s
        if isinstance(came, RunningCall):
            yield live.started(came)
            try:
                async for event in live.follow(came, offset, until):
                    yield event
            except asyncio.CancelledError:
                came.left()
                raise
            yield live.outcome(came.answer.result() if came.answer.done() else await self.still_running(came))
            return
        body = came.json()
        call_id = body["call_id"] if came.status == 200 else body["detail"].get("call_id")
        yield Event.of("started", {"call_id": call_id})
        if (
            came.replayed
            and call_id is not None
            and (sandbox := await self._executor.sandbox_of(tenant, call_id)) is not None
        ):
            async for event in live.output(sandbox, call_id, offset, until):
                yield event
        yield live.outcome(came)

    async def still_running(self, call: RunningCall, after: int = 0) -> Answer:
        """450 with the output so far and how to go on; the answer itself when it came meanwhile."""
        content: list[dict[str, Any]] = []
        if call.sandbox is not None:
            try:
                async with asyncio.timeout(_LOOK_S):
                    content = await call.sandbox.peek(call.call_id)
            except TimeoutError:
                content = []
        if call.answer.done():
            return call.answer.result()
        if (asked := call.asked) is not None:
            return self._input_required(call, asked, content)
        chars = sum(len(block["text"]) for block in content if isinstance(block.get("text"), str))
        error = ToolServerError(
            Code.STILL_RUNNING,
            "The call is still running. Call call_wait with its call_id to go on waiting, or call_cancel to stop it.",
            call.call_id,
            retry_after_s=0,
            extra={
                "type": "retry",
                "next_calling": CALL_WAIT.name,
                "arguments": {"call_id": call.call_id},
                "content": _past(content, after),
                "output_chars": chars,
                **({"progress": call.news.progress} if call.news.progress is not None else {}),
            },
        )
        return Answer.refusal(error, call.trace_id)

    def _input_required(self, call: RunningCall, asked: Asked, content: list[dict[str, Any]]) -> Answer:
        error = ToolServerError(
            Code.STILL_RUNNING,
            f"The tool asks its user: {asked.question.message[:1000]} Call call_answer with its call_id and an action (accept with "
            "content that fits requested_schema, decline or cancel); the call goes on after that.",
            call.call_id,
            extra={"type": "input_required", **as_asked(call, asked), "content": content},
        )
        return Answer.refusal(error, call.trace_id)

    def _take_answer(self, request: CallRequest) -> None:
        """Raises invalid_arguments. A call that has ended has nothing to answer: its outcome is told."""
        call = self._executor.admission.find(request.tenant, request.arguments["call_id"])
        if call is not None and not call.answer.done():
            settle(call, request.arguments)

    async def _session_tool(self, tool: Tool, request: CallRequest) -> Answer:
        await self._check_session_tool(tool, request)
        call_id = request.arguments["call_id"]
        if tool is CALL_CANCEL:
            return await self.cancel(request.tenant, call_id)
        if tool is CALL_ANSWER:
            self._take_answer(request)
        wait_s = request.arguments.get("wait_s", request.wait_s)
        return await self.wait(
            request.tenant, call_id, wait_s if wait_s is None else min(wait_s, self._settings.max_wait_s)
        )

    async def _check_session_tool(self, tool: Tool, request: CallRequest) -> None:
        await self._registry.find(request.tenant, request.session_id)
        if errors := schema_check.check(tool, request.arguments):
            raise invalid_all([{**error, "pointer": "/arguments" + error["pointer"]} for error in errors])


def _past(content: list[dict[str, Any]], after: int) -> list[dict[str, Any]]:
    """The blocks without the first `after` characters of their text."""
    left: list[dict[str, Any]] = []
    for block in content:
        text = block.get("text")
        if after and isinstance(text, str):
            block = {**block, "text": text[after:]}  # noqa: PLW2901 - the block that is shown
            after = max(0, after - len(text))
            if not block["text"]:
                continue
        left.append(block)
    return left


def _cancelled(call_id: str, answer: Answer) -> Answer:
    body = answer.json()
    detail = body if answer.status == 200 else body["detail"]
    shown: dict[str, Any] = {"call_id": call_id, **empty_fields()}
    shown.update({name: detail[name] for name in _OUTCOME_FIELDS if name in detail})
    shown["cancelled"] = detail.get("code") == Code.CANCELLED
    if answer.status != 200:
        shown.update({name: detail[name] for name in ("code", "message")})
    return Answer.of(200, shown)
