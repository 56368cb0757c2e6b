"""One call in its sandbox, from the sandbox's start if need be to the body of the answer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from toolserver.calls import failure, output
from toolserver.calls.answer import Answer
from toolserver.calls.outcome import Outcome, blocks_of, from_foreign, from_worker, tell_loss
from toolserver.calls.running import CancelledBy, RunningCall
from toolserver.errors import SandboxGone
from toolserver.runtime.base import SandboxEnd
from toolserver.sandbox.stdio_client import RpcError
from toolserver.sandbox.tool_sandbox import ToolSandbox
from toolserver.settings import CallSettings
from toolserver.telemetry.trace import Stage

_LAST_LOOK_S = 1.0


async def carry_out(call: RunningCall, settings: CallSettings) -> Answer:
    """The 200. Raises ToolServerError for every other end, RuntimeUnavailable when there is no sandbox for it."""
    box = call.session.boxes[call.tool.image]
    sandbox = await box.sandbox()
    if call.cancelled_by is not None:
        raise failure.never_ran(call.call_id, call.cancelled_by)
    lost = box.take_loss()
    begun = time.monotonic()
    call.hand_to(sandbox)
    try:
        with Stage("sandbox") as stage:
            result = await sandbox.call(
                call.tool.name,
                call.arguments,
                call_id=call.call_id,
                deadline_s=call.deadline_s,
                max_text_bytes=settings.max_text_bytes,
                grace_s=settings.kill_grace_s,
                traceparent=stage.traceparent,
                on_progress=call.progress.tell,
            )
    except RpcError as problem:
        raise failure.protocol_error(problem, call.call_id) from problem
    except TimeoutError as problem:
        content = await _last_look(call, sandbox)
        await box.bury(sandbox)
        raise failure.stopped_hard("deadline", call.call_id, content) from problem
    except SandboxGone as problem:
        end = await box.bury(sandbox)
        if call.cancelled_by is not None:
            raise failure.stopped_hard("cancelled", call.call_id, call.last_content, call.cancelled_by) from problem
        raise failure.death(end, call.call_id) from problem
    finally:
        call.sandbox = None
    outcome = _outcome(result, call.call_id, settings, (time.monotonic() - begun) * 1000)
    call.usage = outcome.fields.get("usage")
    return _answer(outcome, call, lost)


def _outcome(result: dict[str, Any], call_id: str, settings: CallSettings, wall_ms: float) -> Outcome:
    told = from_worker(result)
    if told is not None:
        return told
    blocks = blocks_of(result)
    if blocks is None:
        raise failure.unreadable(call_id)
    content, truncated = output.bound(blocks, settings.max_text_bytes)
    if "structuredContent" in result and not output.structured_fits(result["structuredContent"]):
        result = {name: value for name, value in result.items() if name != "structuredContent"}
    return from_foreign(result, content, truncated, round(wall_ms, 3))


def _answer(outcome: Outcome, call: RunningCall, lost: SandboxEnd | None) -> Answer:
    if lost is not None:
        tell_loss(outcome.fields, lost)
    error = failure.refusal(outcome, call.call_id, call.cancelled_by)
    if error is not None:
        raise error
    return Answer.of(200, {"call_id": call.call_id, **outcome.fields})


async def _last_look(call: RunningCall, sandbox: ToolSandbox) -> list[dict[str, Any]]:
    """The output so far of a call whose sandbox is about to be ended, if its worker still tells it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LAST_LOOK_S):
            return await sandbox.peek(call.call_id)
    return []


async def stop(call: RunningCall, by: CancelledBy, grace_s: float) -> Answer:
    """Cancel a call for good: asked first, then with its sandbox. Returns its answer, whatever it came to be.

    One that was not sent yet ends at once. One that has just ended keeps its outcome. The first who cancels is named.
    """
    call.cancelled_by = call.cancelled_by or by
    if not call.placed.done():
        call.abort(failure.never_ran(call.call_id, call.cancelled_by))
        return await asyncio.shield(call.answer)
    sandbox = call.sandbox
    if sandbox is not None:
        with contextlib.suppress(SandboxGone):
            await sandbox.cancel(call.call_id, f"cancelled by the {call.cancelled_by}")
        answer = await call.wait(grace_s)
        if answer is not None:
            return answer
        call.last_content = await _last_look(call, sandbox)
        if call.sandbox is not None:
            await call.session.boxes[call.tool.image].bury(sandbox)
    return await asyncio.shield(call.answer)
