"""Going on with a call whose stream was lost, in this life of the server or with the one before it.

The sandbox is found again, under a term that fences off what was sent before; then its worker tells what came of the call:
ended, still running, forgotten, or never received. A call is never sent a second time.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from toolserver.calls import denials, failure
from toolserver.calls.answer import Answer
from toolserver.calls.conclude import answer_of, last_look, outcome_of
from toolserver.calls.running import RunningCall
from toolserver.errors import RuntimeUnavailable, SandboxGone, ToolServerError
from toolserver.runtime.base import SandboxEnd, SandboxEnded
from toolserver.sandbox.stdio_client import RpcError
from toolserver.sandbox.tool_sandbox import ToolSandbox
from toolserver.sessions.box import Box
from toolserver.settings import CallSettings

_RECALL_S = 30.0  # how long one question waits for the end of the call
_ENGINE_S = 20.0  # how long an engine that is away is waited for, in the middle of a call
_LOOK_EVERY_S = 0.25


async def carry_on(call: RunningCall, settings: CallSettings) -> Answer:
    """As carry_out, for a call that an earlier server left open. Raises the same.

    What was refused to it before this server began stands in the journal alone.
    """
    try:
        return await _carry_on(call, settings)
    except ToolServerError as error:
        raise await denials.told(error, call) from error


async def _carry_on(call: RunningCall, settings: CallSettings) -> Answer:
    row = call.left_open
    assert row is not None  # noqa: S101 - only such calls come here
    box = call.session.boxes[call.tool.image]
    if (
        row.generation is not None and box.generation < row.generation
    ):  # there was no sandbox yet that it could be sent to
        raise _never_received(call)
    loop = asyncio.get_running_loop()
    gone_s = max(0.0, time.time() - row.created_at)
    until = loop.time() + max(0.0, call.deadline_s - gone_s) + settings.kill_grace_s
    try:
        result = await recalled(call, box, None, until)
    except SandboxEnded as ended:
        raise failure.interrupted(call.call_id) from ended
    finally:
        call.sandbox = None
    outcome = outcome_of(result, call.call_id, settings, gone_s * 1000)
    return answer_of(outcome, call, None)


async def recalled(call: RunningCall, box: Box, dead: ToolSandbox | None, until: float) -> dict[str, Any]:
    """The MCP result of a call that was sent over the stream of `dead`, or (None) by an earlier server.

    `until` is the loop's time when its deadline and the grace are over. Raises SandboxEnded, ToolServerError.
    """
    loop = asyncio.get_running_loop()
    while True:
        sandbox = await _reached(box, dead, until)
        if not sandbox.has_worker:
            raise failure.interrupted(call.call_id)
        call.hand_to(sandbox)
        if call.cancelled_by is not None:  # asked for while there was no stream
            await sandbox.cancel(call.call_id, f"cancelled by the {call.cancelled_by}")
        try:
            told = await sandbox.recall(call.call_id, max(0.0, min(_RECALL_S, until - loop.time())))
        except SandboxGone:
            dead = sandbox
            continue
        except (RpcError, TimeoutError) as deaf:
            raise await _stopped(call, box, sandbox) from deaf
        if told.state == "ended":
            return told.result
        if told.state == "never" and _sent_to_no_other(call, box):
            raise _never_received(call)
        if told.state != "running":
            raise failure.interrupted(call.call_id)
        if loop.time() >= until:
            raise await _stopped(call, box, sandbox)


async def _reached(box: Box, dead: ToolSandbox | None, until: float) -> ToolSandbox:
    """Raises SandboxEnded, also when the engine stays away: then nobody can tell."""
    loop = asyncio.get_running_loop()
    patience = loop.time() + _ENGINE_S if dead is not None else max(until, loop.time() + _ENGINE_S)
    while True:
        try:
            return await box.found_again(dead)
        except RuntimeUnavailable as away:
            if loop.time() >= patience:
                end = SandboxEnd("runtime_lost") if dead is None else await box.bury(dead)
                raise SandboxEnded(end) from away
            await asyncio.sleep(_LOOK_EVERY_S)


def _sent_to_no_other(call: RunningCall, box: Box) -> bool:
    """Whether the present sandbox is the only one that can have received it."""
    row = call.left_open
    return row is None or (row.generation is not None and row.generation >= box.generation)


def _never_received(call: RunningCall) -> ToolServerError:
    call.received = False
    return failure.never_received(call.call_id)


async def _stopped(call: RunningCall, box: Box, sandbox: ToolSandbox) -> ToolServerError:
    content = await last_look(call, sandbox)
    await box.bury(sandbox)
    return failure.stopped_hard("deadline", call.call_id, content)
