"""How one call reaches its end: sent under our own id, asked for by that id whenever it may have run, sent again only when
the ToolServer is known never to have received it. docs/explanation/calls-once.md tells the whole story.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from typing import Any

from agent.settings import ToolServerSettings
from agent.tools.answer_table import TABLE, Mark, Meaning, Move, meaning_of
from agent.tools.breaker import BreakerOpen, Breakers, Pass
from agent.tools.continuation import Continuation
from agent.tools.outcome import OutcomeKind
from agent.tools.retry_policy import StepRetries, Transient
from agent.tools.session_keeper import SessionKeeper, cause_of
from agent.toolserver_client.client import ToolServerClient
from agent.toolserver_client.errors import ClientProblem, NoAnswer, ToolServerAnswer
from agent.toolserver_client.wire import RemoteOutcome, outcome_in_detail

_log = logging.getLogger(__name__)
_CANCEL_S = 4.0
_DONE = TABLE[200, ""]
_GONE = ("session_gone", "session_not_found")
_UNKNOWN = Meaning(OutcomeKind.UNKNOWN, Move.TAKE, executed="possible")


@dataclass
class Delivery:
    """One call on its way, and what is known of it. `session_id` is the session that it was or will be sent to.

    Whoever makes one releases its `permits` in the end; they may be others by then.
    """

    call_id: str
    tool: str
    permits: Pass
    arguments: dict[str, Any] = field(default_factory=dict)
    session_id: str = ""
    deadline_s: float = 300.0
    may_have_arrived: bool = False
    was_sent: bool = False
    session_lost: bool = False
    follow_ups: int = 0


@dataclass(frozen=True)
class Settled:
    """How a call ended. `code` and `message` are empty for 200; `known` is what the ToolServer told of its output."""

    meaning: Meaning
    code: str = ""
    message: str = ""
    known: RemoteOutcome = field(default_factory=RemoteOutcome)
    detail: dict[str, Any] = field(default_factory=dict)
    retry_in_s: float | None = None

    @classmethod
    def refused(cls, kind: OutcomeKind, code: str, message: str) -> Settled:
        """By ourselves: nothing was sent."""
        return cls(Meaning(kind, Move.TAKE), code, message)


class Deliverer:
    def __init__(
        self,
        client: ToolServerClient,
        settings: ToolServerSettings,
        keeper: SessionKeeper,
        breakers: Breakers,
        waiting: Continuation,
    ) -> None:
        self._client, self._settings, self._keeper, self._breakers = client, settings, keeper, breakers
        self._continuation = waiting

    async def open_session(self, delivery: Delivery, retries: StepRetries) -> Settled | None:
        """Make sure of a session before anything is journalled; why there is none."""
        try:
            async for attempt in retries.attempts():
                with attempt:
                    await self._session(delivery)
        except Transient as last:
            return unreachable(last.cause)
        except BreakerOpen as closed:
            return breaker_open(closed)
        except ToolServerAnswer as refused:
            return unreachable(refused)
        return None

    async def settle(self, delivery: Delivery, retries: StepRetries) -> Settled:
        """Bring a call to its end. Never raises for the ToolServer. Cancelled, it leaves the call as it is: see `stop`."""
        try:
            async for attempt in retries.attempts():
                with attempt:
                    return await self._round(delivery)
        except Transient as last:
            return _given_up(delivery, last)
        raise AssertionError("a retrying loop ends by returning or raising")

    async def stop(self, delivery: Delivery) -> Settled | None:
        """Cancel a sent call where it runs; how it ended, None when that can't be told now. Never raises for the ToolServer."""
        try:
            async with asyncio.timeout(_CANCEL_S):
                await self._client.cancel_call(delivery.call_id)
            outcome = await self._client.get_call(delivery.call_id)
        except (NoAnswer, TimeoutError) as problem:
            _log.warning("the call %s could not be cancelled at the ToolServer: %s", delivery.call_id, problem)
            return None
        except ToolServerAnswer as refused:
            meaning = meaning_of(refused)
            stored = refused.detail.get("call_id") == delivery.call_id
            return _ended(meaning, refused) if stored and meaning.move is Move.TAKE else None
        return Settled(_DONE, known=outcome)

    async def _round(self, delivery: Delivery) -> Settled:
        if delivery.may_have_arrived:
            found = await self._ask(delivery)
            if found is not None:
                return found
            delivery.may_have_arrived = delivery.session_lost = False
        return await self._send(delivery)

    async def _send(self, delivery: Delivery) -> Settled:
        try:
            await self._session(delivery)
        except BreakerOpen as closed:
            return breaker_open(closed)
        except ToolServerAnswer as refused:
            return unreachable(refused)
        delivery.was_sent = True
        try:
            outcome = await self._client.call(
                delivery.session_id,
                delivery.tool,
                delivery.arguments,
                call_id=delivery.call_id,
                wait_s=self._settings.wait_s,
                deadline_s=delivery.deadline_s,
            )
        except NoAnswer as lost:
            raise self._no_answer(delivery, lost) from lost
        except ToolServerAnswer as refused:
            return await self._judge(delivery, refused)
        delivery.permits.worked()
        return Settled(_DONE, known=outcome)

    async def _session(self, delivery: Delivery) -> None:
        """The session to send to. Raises Transient, BreakerOpen, and ToolServerAnswer for what no retry mends."""
        if not delivery.permits.valid:  # the breaker has opened since
            delivery.permits.release()
            delivery.permits = self._breakers.admit(delivery.tool)
        try:
            delivery.session_id = await self._keeper.ensure()
        except NoAnswer as lost:
            delivery.permits.server.failed()
            raise Transient(lost) from lost
        except ToolServerAnswer as refused:
            if refused.code in _GONE:  # it ended while it was being filled
                raise Transient(refused, at_once=True) from refused
            if refused.status >= 500 and refused.status != 501:
                delivery.permits.server.failed()
                raise Transient(refused) from refused
            if meaning_of(refused).move is Move.RETRY:
                raise Transient(refused) from refused
            raise

    async def _judge(self, delivery: Delivery, refused: ToolServerAnswer) -> Settled:
        """What follows from the answer to a sent call."""
        meaning = meaning_of(refused)
        self._mark(delivery, meaning.mark)
        match meaning.move:
            case Move.FOLLOW:
                return await self._follow(delivery, refused)
            case Move.RETRY:
                raise Transient(refused)
            case Move.ASK:
                delivery.may_have_arrived = True
                raise Transient(refused)
            case Move.REOPEN:
                self._keeper.lost(delivery.session_id, cause_of(refused))
                # gone may mean: gone under this very call. Never known means that nothing can have run
                delivery.session_lost = delivery.may_have_arrived = refused.code == "session_gone"
                raise Transient(refused, at_once=True)
            case _:
                return _ended(meaning, refused)

    async def _ask(self, delivery: Delivery) -> Settled | None:
        """What became of a call that may have run; None when the server never received it, so that it can be sent again."""
        try:
            outcome = await self._client.get_call(delivery.call_id, wait_s=self._settings.wait_s)
        except NoAnswer as lost:
            raise self._no_answer(delivery, lost) from lost
        except ToolServerAnswer as refused:
            return await self._judge_asked(delivery, refused)
        delivery.permits.worked()
        return Settled(_DONE, known=outcome)

    async def _judge_asked(self, delivery: Delivery, refused: ToolServerAnswer) -> Settled | None:
        meaning = meaning_of(refused)
        if refused.code == "call_not_found":
            return await self._never_received(delivery, refused)
        # the stored end of the call names it; without that it is only how the question was answered
        stored = refused.detail.get("call_id") == delivery.call_id
        self._mark(delivery, meaning.mark)
        if meaning.move is Move.FOLLOW:
            return await self._follow(delivery, refused)
        if meaning.move is Move.RETRY or (meaning.move is Move.ASK and not stored):
            delivery.may_have_arrived = not (stored and refused.detail.get("effects") == "none")
            raise Transient(refused)
        if refused.code in _GONE:
            delivery.session_lost = True
            self._keeper.lost(delivery.session_id, cause_of(refused))
        if meaning.move is Move.TAKE and (stored or meaning.executed != "none"):
            return _ended(meaning, refused)
        return _ended(_UNKNOWN, refused)

    async def _never_received(self, delivery: Delivery, refused: ToolServerAnswer) -> Settled | None:
        """A server without memory of the call has proved that nothing ran only if it remembers the session it was sent to.

        One that does not know the session either has lost its state, or is another one.
        """
        try:
            await self._client.session(delivery.session_id)
        except NoAnswer as lost:
            raise self._no_answer(delivery, lost) from lost
        except ToolServerAnswer as about:
            if about.code == "session_gone":
                self._keeper.lost(delivery.session_id, cause_of(about))
                if about.detail.get("effects") == "possible":  # gone with its machine: the server's memory has a gap
                    delivery.session_lost = True
                    return _ended(_UNKNOWN, refused)
                return None
            if meaning_of(about).move is Move.RETRY:
                raise Transient(about) from about
            self._keeper.lost(delivery.session_id, cause_of(about))
            delivery.session_lost = True
            return _ended(_UNKNOWN, refused)
        return None

    async def _follow(self, delivery: Delivery, running: ToolServerAnswer) -> Settled:
        delivery.was_sent = delivery.may_have_arrived = True
        try:
            outcome = await self._continuation.follow(delivery.call_id, running, delivery.follow_ups)
        except NoAnswer as lost:
            delivery.follow_ups += 1
            raise self._no_answer(delivery, lost) from lost
        except ToolServerAnswer as refused:
            if meaning_of(refused).move is Move.FOLLOW:  # it was told to stop and does not end
                return _ended(meaning_of(refused), refused)
            settled = await self._judge_asked(delivery, refused)
            return settled if settled is not None else _ended(_UNKNOWN, refused)
        delivery.permits.worked()
        return Settled(_DONE, known=outcome)

    def _no_answer(self, delivery: Delivery, lost: NoAnswer) -> Transient:
        delivery.permits.server.failed()
        delivery.may_have_arrived |= lost.may_have_arrived
        return Transient(lost)

    def _mark(self, delivery: Delivery, mark: Mark) -> None:
        match mark:
            case Mark.WORKED:
                delivery.permits.worked()
            case Mark.FAILED_TOOL:
                delivery.permits.tool.failed()
            case Mark.FAILED_SERVER:
                delivery.permits.server.failed()


def breaker_open(closed: BreakerOpen) -> Settled:
    meaning = Meaning(OutcomeKind.UNAVAILABLE, Move.TAKE)
    return Settled(meaning, "breaker_open", str(closed), retry_in_s=closed.retry_in_s)


def unreachable(problem: ClientProblem) -> Settled:
    """No call can be made, and none was."""
    if isinstance(problem, ToolServerAnswer):
        kind = OutcomeKind.DENIED if problem.status == 403 else OutcomeKind.UNAVAILABLE
        return Settled(Meaning(kind, Move.TAKE), problem.code, problem.message, retry_in_s=problem.retry_after_s)
    code = str(problem.kind) if isinstance(problem, NoAnswer) else "unreachable"
    return Settled(Meaning(OutcomeKind.UNAVAILABLE, Move.TAKE), code, problem.message)


def _ended(meaning: Meaning, refused: ToolServerAnswer) -> Settled:
    return Settled(
        meaning, refused.code, refused.message, outcome_in_detail(refused.detail), refused.detail, refused.retry_after_s
    )


def _given_up(delivery: Delivery, last: Transient) -> Settled:
    settled = unreachable(last.cause)
    return replace(settled, meaning=_UNKNOWN, retry_in_s=None) if delivery.may_have_arrived else settled
