"""Calls that wait for their turn while the server is full. Each waits by itself: who has its key may join it, or cancel it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from toolserver.calls.admission import Admission
from toolserver.calls.answer import Answer
from toolserver.calls.running import RunningCall
from toolserver.errors import StoreUnavailable, ToolServerError
from toolserver.sandbox.background import Background

_log = logging.getLogger(__name__)


class Turns:
    """`begin` starts a call that has its place, which is `begin`'s from then on. `keep` stores the answer of a cancelled one."""

    def __init__(
        self,
        admission: Admission,
        tasks: Background,
        begin: Callable[[RunningCall], Awaitable[Any]],
        keep: Callable[[RunningCall, Answer], Awaitable[None]],
    ) -> None:
        self._admission, self._tasks, self._begin, self._keep = admission, tasks, begin, keep

    def queue(self, call: RunningCall, wait_s: float) -> None:
        """It begins in its turn, or gets the answer why not after `wait_s` seconds."""
        call.queued = True
        call.task = self._tasks.spawn(self._wait(call, wait_s), f"queue {call.call_id}")

    async def _wait(self, call: RunningCall, wait_s: float) -> None:
        try:
            call.begin_task()
            with call.ended_with_session():
                await self._admission.wait_for_place(call.tenant, wait_s)
            call.queued, call.task, call.task_began = (
                False,
                None,
                False,
            )  # not to be stopped half way: what runs it looks for a cancel first
            await self._begin(call)
        except ToolServerError as error:
            error.call_id = call.call_id
            self.give_up(call, Answer.refusal(error, call.trace_id))
        except StoreUnavailable as problem:
            _log.warning("call_not_begun", extra={"fields": {"call_id": call.call_id, "problem": str(problem)}})
        except asyncio.CancelledError:
            if call.abort_error is None:
                self.give_up(call, asyncio.CancelledError())
                raise
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            call.abort_error.effects = "none"
            answer = Answer.refusal(call.abort_error, call.trace_id)
            if call.cancelled_by is not None:
                await self._keep(call, answer)
            self.give_up(call, answer)

    def give_up(self, call: RunningCall, told: Answer | BaseException) -> None:
        """Of a call that never ran: its name is free again."""
        call.queued = False
        self._admission.forget(call)
        if call.answer.done():
            return
        if isinstance(told, Answer):
            call.answer.set_result(told)
        elif isinstance(told, asyncio.CancelledError):
            call.answer.cancel()
        else:
            call.answer.set_exception(told)
            call.answer.exception()  # nobody may be waiting for it


async def wait_unless_gone(
    call: RunningCall,
    wait: Coroutine[Any, Any, Answer | RunningCall],
    gone: Callable[[], Coroutine[Any, Any, None]],
) -> Answer | RunningCall:
    """What `wait` returns. A caller that hangs up leaves the queue, unless another one waits for the same call."""
    waiting = asyncio.ensure_future(wait)
    hung_up = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({waiting, hung_up}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            await asyncio.wait({waiting})
            call.left()
            return call
        return waiting.result()
    finally:
        waiting.cancel()
        hung_up.cancel()
