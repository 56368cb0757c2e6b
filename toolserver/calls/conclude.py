"""From what a sandbox answered to what the caller gets, the same way whoever asked it, and when."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from toolserver.calls import failure, output
from toolserver.calls.answer import Answer
from toolserver.calls.outcome import Outcome, blocks_of, from_foreign, from_worker, tell_loss
from toolserver.calls.running import RunningCall
from toolserver.catalog.arguments import output_errors
from toolserver.catalog.image import Tool
from toolserver.runtime.base import SandboxEnd
from toolserver.sandbox.call_place import CallPlace
from toolserver.settings import CallSettings

_LAST_LOOK_S = 1.0


def outcome_of(
    result: dict[str, Any], call_id: str, settings: CallSettings, wall_ms: float, foreign: Tool | None = None
) -> Outcome:
    """Of an MCP result; `foreign`: its tool, when its image has no worker whose word on it would count.

    Raises ToolServerError when it is no result, or not what the output schema promises.
    """
    told = from_worker(result) if foreign is None else None
    if told is not None:
        return told
    blocks = blocks_of(result)
    if blocks is None:
        raise failure.unreadable(call_id)
    content, truncated = output.bound(blocks, settings.max_text_bytes)
    result, note = output.without_huge_structure(result)
    outcome = from_foreign(result, [*content, *note], truncated, round(wall_ms, 3))
    if foreign is not None and outcome.end == "done" and not note and (errors := output_errors(foreign, result)):
        raise failure.misfit(
            errors, call_id, {name: value for name, value in outcome.fields.items() if name != "structured"}
        )
    return outcome


def answer_of(outcome: Outcome, call: RunningCall, lost: SandboxEnd | None) -> Answer:
    """The 200. Raises ToolServerError for every other end. `lost`: how the sandbox before this one ended, if that is to be told."""
    call.usage = outcome.fields.get("usage")
    if lost is not None:
        tell_loss(outcome.fields, lost)
    error = failure.refusal(outcome, call.call_id, call.cancelled_by)
    if error is not None:
        raise error
    return Answer.of(200, {"call_id": call.call_id, **outcome.fields})


async def last_look(call: RunningCall, sandbox: CallPlace) -> list[dict[str, Any]]:
    """The output so far of a call whose sandbox is about to be ended, if its worker still tells it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LAST_LOOK_S):
            return await sandbox.peek(call.call_id)
    return []
