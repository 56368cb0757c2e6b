"""Calls of MCP servers without our extension: found again for a cancel, for progress and logs, and for what the server asks meanwhile."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toolserver.sandbox.questions import Ask, Question, answers_to
from toolserver.sandbox.stdio_client import INTERNAL_ERROR, RpcError, StdioClient

MAX_ROUNDS = 32  # in which one call may ask for more input
_PAUSE_S = 0.2  # before a call is sent again that asked for nothing, times the round
INPUT_REQUIRED, COMPLETE = "input_required", "complete"
META_LOG_LEVEL = "io.modelcontextprotocol/logLevel"
_LOG_LEVEL = "info"  # from which on servers are asked to log, in the era that wants to be asked


class Stopped(TimeoutError):  # noqa: N818 - reads as what it names
    """The call outlived its deadline, and its server has answered since: nothing of it goes on."""


@dataclass
class _Open:
    owner: str
    ask: Ask | None
    on_log: Callable[[dict[str, Any]], None] | None
    number: int | None = None  # of the request that is open now


class ForeignCalls:
    def __init__(self, client: StdioClient) -> None:
        self._client = client
        self._open: dict[str, _Open] = {}  # by call id, oldest first

    def __len__(self) -> int:
        return len(self._open)

    async def run(
        self,
        call_id: str,
        params: dict[str, Any],
        deadline_s: float,
        grace_s: float,
        *,
        owner: str,
        ask: Ask | None,
        on_progress: Callable[[dict[str, Any]], None] | None,
        on_log: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        """The result, with the deadline kept from here: asked to end at it, TimeoutError after the grace (Stopped: it did end).

        Raises as a request does.
        """
        if on_progress is not None:
            params = {**params, "_meta": {**params.get("_meta", {}), "progressToken": call_id}}
            self._client.progressed[call_id] = on_progress
        if on_log is not None and self._client.meta:
            params = {**params, "_meta": {**params.get("_meta", {}), META_LOG_LEVEL: _LOG_LEVEL}}
        entry = self._open[call_id] = _Open(owner, ask, on_log)
        work = asyncio.ensure_future(self._rounds(entry, params, deadline_s + grace_s))
        try:
            done, _ = await asyncio.wait([work], timeout=deadline_s)
            if not done:
                await self.cancel(call_id, "the call outlived its deadline")
                done, _ = await asyncio.wait([work], timeout=grace_s)
                if done and (problem := work.exception()) is not None and not isinstance(problem, RpcError):
                    raise problem
                raise Stopped if done else TimeoutError
            return work.result()
        finally:
            self._open.pop(call_id, None)
            self._client.progressed.pop(call_id, None)
            work.cancel()
            await asyncio.wait([work])

    async def _rounds(self, entry: _Open, params: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Sent again with what it asked for, as often as it asks."""

        def numbered(number: int) -> None:
            entry.number = number

        for turn in itertools.count(1):
            result = await self._client.request("tools/call", params, timeout_s, numbered)
            entry.number = None
            kind = result.get("resultType", COMPLETE)
            if not self._client.meta or kind == COMPLETE:
                return result
            if kind != INPUT_REQUIRED:
                raise RpcError(INTERNAL_ERROR, f"its result is of the kind {str(kind)[:60]!r}, which is not known here")
            if turn >= MAX_ROUNDS:
                raise RpcError(INTERNAL_ERROR, f"it asked for more input {MAX_ROUNDS} times, and was not asked again")
            params = await self._with_input(entry, params, result, turn)
        raise AssertionError("unreachable")

    async def _with_input(
        self, entry: _Open, params: dict[str, Any], result: dict[str, Any], turn: int
    ) -> dict[str, Any]:
        again = {name: value for name, value in params.items() if name not in ("inputResponses", "requestState")}
        if "requestState" in result:
            again["requestState"] = result["requestState"]
        if "inputRequests" in result:
            if entry.ask is None:
                raise RpcError(INTERNAL_ERROR, "it asks its user, and there is nobody to ask")
            again["inputResponses"] = await answers_to(result["inputRequests"], entry.ask)
        else:
            await asyncio.sleep(_PAUSE_S * turn)
        return again

    async def cancel(self, call_id: str, reason: str) -> bool:
        """Whether it is known. Raises SandboxGone."""
        entry = self._open.get(call_id)
        if entry is None:
            return False
        if entry.number is not None:
            await self._client.notify("notifications/cancelled", {"requestId": entry.number, "reason": reason})
        return True

    async def elicited(self, params: dict[str, Any]) -> dict[str, Any]:
        """What the server asked in a request of its own, which does not say to which call it belongs. Raises RpcError.

        It is the latest call's, as long as all that run are of one owner: what one session's tool asks, no other may see.
        """
        question = Question.read(params)
        asking = [entry for entry in self._open.values() if entry.ask is not None]
        if not asking:
            raise RpcError(INTERNAL_ERROR, "No call is running, so there is nobody to ask.")
        if len({entry.owner for entry in asking}) > 1:
            raise RpcError(INTERNAL_ERROR, "Calls of several sessions are running, and it can't be told whose this is.")
        ask = asking[-1].ask
        assert ask is not None  # noqa: S101 - filtered above
        return (await ask(question)).as_result()

    def noticed(self, method: str, params: dict[str, Any]) -> None:
        """A notification that does not say to which call it belongs: of the log, it is the latest call's, under the same condition."""
        calls = list(self._open.values())
        if method != "notifications/message" or len({entry.owner for entry in calls}) != 1:
            return
        if (on_log := calls[-1].on_log) is not None:
            on_log(params)
