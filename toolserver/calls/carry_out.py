"""One call in its sandbox, from the sandbox's start if need be to the body of the answer."""

from __future__ import annotations

import asyncio
import contextlib
import time

from toolserver.calls import denials, failure
from toolserver.calls.answer import Answer
from toolserver.calls.carry_on import recalled
from toolserver.calls.command_call import carry_out_command
from toolserver.calls.conclude import answer_of, last_look, outcome_of
from toolserver.calls.running import CancelledBy, RunningCall
from toolserver.errors import SandboxGone, ToolServerError
from toolserver.runtime.base import SandboxEnded
from toolserver.sandbox.foreign_calls import Stopped
from toolserver.sandbox.stdio_client import RpcError
from toolserver.sandbox.tool_sandbox import ToolSandbox
from toolserver.settings import CallSettings
from toolserver.telemetry.trace import Stage


async def carry_out(call: RunningCall, settings: CallSettings) -> Answer:
    """The 200. Raises ToolServerError for every other end, RuntimeUnavailable when there is no sandbox for it."""
    try:
        return await _carry_out(call, settings)
    except ToolServerError as error:
        raise await denials.told(error, call) from error


async def _carry_out(call: RunningCall, settings: CallSettings) -> Answer:
    box = call.session.boxes[call.tool.image]
    if box.plan.image.kind == "cli":
        return await carry_out_command(call, settings)
    sandbox = await box.sandbox()
    if call.cancelled_by is not None:
        raise failure.never_ran(call.call_id, call.cancelled_by)
    lost = box.take_loss()
    begun = time.monotonic()
    call.hand_to(sandbox)
    call.expect_answers_until(asyncio.get_running_loop().time())
    try:
        with Stage("sandbox") as stage:
            result = await sandbox.call(
                call.tool.own_name,
                call.arguments,
                call_id=call.call_id,
                deadline_s=call.deadline_s,
                max_text_bytes=settings.max_text_bytes,
                grace_s=settings.kill_grace_s,
                traceparent=stage.traceparent,
                on_progress=call.news.tell,
                on_log=call.news.log,
                owner=call.session.session_id,
                ask=call.ask,
            )
    except RpcError as problem:
        if call.cancelled_by is not None:  # many servers confirm it so
            raise failure.confirmed("cancelled", call.call_id, call.cancelled_by) from problem
        raise failure.protocol_error(problem, call.call_id) from problem
    except Stopped as problem:
        raise failure.confirmed("deadline", call.call_id) from problem
    except TimeoutError as problem:
        if sandbox.foreign_calls:
            sandbox.runaway = True
            raise failure.left_alone("deadline", call.call_id) from problem
        content = await last_look(call, sandbox)
        await box.bury(sandbox)
        raise failure.stopped_hard("deadline", call.call_id, content) from problem
    except SandboxGone as problem:
        until = asyncio.get_running_loop().time() + begun + call.deadline_s + settings.kill_grace_s - time.monotonic()
        try:
            result = await recalled(call, box, sandbox, until)
        except SandboxEnded as ended:
            if call.cancelled_by is not None:
                raise failure.stopped_hard("cancelled", call.call_id, call.last_content, call.cancelled_by) from problem
            raise failure.death(ended.end, call.call_id) from problem
    finally:
        call.sandbox = None
        if sandbox.runaway and not sandbox.foreign_calls and sandbox.alive:
            await box.bury(sandbox)
    wall_ms = (time.monotonic() - begun) * 1000
    outcome = outcome_of(result, call.call_id, settings, wall_ms, None if sandbox.has_worker else call.tool)
    return answer_of(outcome, call, lost)


async def stop(call: RunningCall, by: CancelledBy, grace_s: float) -> Answer:
    """Cancel a call for good: asked first, then with its sandbox. Returns its answer, whatever it came to be.

    One that was not sent yet ends at once. One that has just ended keeps its outcome. The first who cancels is named. A sandbox in
    which other calls run is not ended with it, but after them.
    """
    call.cancelled_by = call.cancelled_by or by
    if not call.placed.done() and call.left_open is None:
        call.abort(failure.never_ran(call.call_id, call.cancelled_by))
        return await asyncio.shield(call.answer)
    sandbox = call.sandbox
    call.ask_no_more()
    if sandbox is not None:
        with contextlib.suppress(SandboxGone):
            await sandbox.cancel(call.call_id, f"cancelled by the {call.cancelled_by}")
        answer = await call.ended(grace_s)
        if answer is not None:
            return answer
        if isinstance(sandbox, ToolSandbox) and sandbox.foreign_calls > 1:
            sandbox.runaway = True
            call.abort(failure.left_alone("cancelled", call.call_id, call.cancelled_by))
            return await asyncio.shield(call.answer)
        call.last_content = await last_look(call, sandbox)
        if isinstance(call.sandbox, ToolSandbox) and isinstance(sandbox, ToolSandbox):
            await call.session.boxes[call.tool.image].bury(sandbox)
    return await asyncio.shield(call.answer)
