"""Following a call that outlived its wait: asked for under the same id up to a limit, then stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from agent.settings import ToolServerSettings
from agent.tools.retry_policy import Sleep
from agent.toolserver_client.client import ToolServerClient
from agent.toolserver_client.errors import ToolServerAnswer
from agent.toolserver_client.wire import RemoteOutcome

_STOP_WAIT_S = 10.0  # for a cancelled call to end and tell its output so far
_MARGIN_S = 15.0  # past the deadline, for the server's own ladder of interrupt and kill
_QUICK_SHARE = 0.2  # a server that answers sooner than this share of the asked wait is given a pause


class Continuation:
    """A 450 names `call_wait` as what to call next; `GET /v1/calls/{id}` is the same without an id of its own."""

    def __init__(
        self,
        client: ToolServerClient,
        settings: ToolServerSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._client, self._settings, self._clock, self._sleep = client, settings, clock, sleep

    async def follow(self, call_id: str, running: ToolServerAnswer, already: int = 0) -> RemoteOutcome:
        """The outcome of a running call. Raises ToolServerAnswer for every other end, NoAnswer.

        Still running after all continuations, or past its deadline, it is cancelled; the answer is then the last 450,
        with the output so far. So is one that asks its user something.
        """
        until = self._clock() + self._settings.deadline_s + _MARGIN_S
        for turn in range(already, self._settings.max_continuations):
            left = until - self._clock()
            if left <= 0 or _asks(running):
                break
            asked, started = min(self._settings.wait_s, left), self._clock()
            try:
                return await self._client.get_call(call_id, wait_s=asked)
            except ToolServerAnswer as answer:
                if not _is_running(answer):
                    raise
                running = answer
            if self._clock() - started < asked * _QUICK_SHARE:
                await self._sleep(min(asked, 0.1 * 2**turn))
        return await self._stop(call_id, running)

    async def _stop(self, call_id: str, running: ToolServerAnswer) -> RemoteOutcome:
        """It may have ended by itself a moment before: its own record has the last word."""
        with suppress(ToolServerAnswer):  # over already, for example
            await self._client.cancel_call(call_id)
        try:
            return await self._client.get_call(call_id, wait_s=_STOP_WAIT_S)
        except ToolServerAnswer as answer:
            if answer.code == "cancelled":
                raise _stopped(running, answer) from answer
            raise


def _is_running(answer: ToolServerAnswer) -> bool:
    return answer.status == 450 and (answer.code == "still_running" or answer.detail.get("type") == "retry")


def _asks(answer: ToolServerAnswer) -> bool:
    """Whether the tool waits for an answer of its user, who is not here."""
    return answer.detail.get("type") == "input_required"


def _stopped(running: ToolServerAnswer, cancelled: ToolServerAnswer) -> ToolServerAnswer:
    """The end of a call that we stopped ourselves: its time was up, whatever the record calls it."""
    detail = running.detail | cancelled.detail | {"code": "still_running", "type": "timeout", "effects": "possible"}
    detail["message"] = "It was still running after the longest wait and was stopped."
    if _asks(running):
        asked = (running.detail.get("elicitation") or {}).get("message", "")
        detail["message"] = f"The tool asked its user, whom it can't reach from here, and was stopped: {asked}"[:1500]
    return ToolServerAnswer(450, "still_running", detail)
