"""FunctionHandler: the only way to a tool. The order of its steps is the guarantee; docs/explanation/calls-once.md says why.

exact name → arguments → permission → breaker → session → budget → TOOL_INTENDED → send → settle → fetch files → TOOL_SETTLED

A call that the journal knows as settled is answered from it. One that was intended and never settled is asked for first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agent.errors import JournalBroken, Unreachable
from agent.events import EventKind
from agent.settings import ToolServerSettings
from agent.store.base import Journal
from agent.tools.allowance import Allowance
from agent.tools.arguments import Refused, read_arguments
from agent.tools.breaker import BreakerOpen, Breakers
from agent.tools.call_id import call_id_of
from agent.tools.catalog import ToolCatalog
from agent.tools.continuation import Continuation
from agent.tools.delivery import Deliverer, Delivery, Settled, breaker_open, unreachable
from agent.tools.outcome import Invocation, Outcome, OutcomeKind, ToolInfo
from agent.tools.result_summary import Summariser
from agent.tools.retry_policy import Sleep, StepRetries, Transient
from agent.tools.session_keeper import SessionKeeper
from agent.tools.settlement import NotFetched, Settlement
from agent.tools.workspace_store import WorkspaceStore
from agent.tools.workspace_sync import WorkspaceSync
from agent.toolserver_client.client import ToolServerClient
from agent.toolserver_client.errors import ClientProblem, NoAnswer, ToolServerAnswer

Permission = Callable[[Invocation, ToolInfo, dict[str, Any]], str | None]
"""Why this call may not be made, None when it may."""

_log = logging.getLogger(__name__)
_MARGIN_S = 60.0  # of a step past the deadline of its call: opening a session, retries
_CUT_OFF_S = 6.0  # what the end of a run gives a call that is under way
_AGAIN = "/again"  # the key of the one repetition of a call whose outcome is unknown


@dataclass(frozen=True)
class _Refusal:
    """A call that ends before it is intended."""

    settled: Settled
    names: tuple[str, ...] = ()


class FunctionHandler:
    """Implements agent.tools.outcome.Tools. One per run; owns `client` and closes it.

    `session` are fields of `POST /v1/sessions` for the run's sessions, such as egress or limits. `kept` are ended
    sessions whose last files `workspace_store` has already.
    """

    def __init__(  # noqa: PLR0917 - the six that every run has; they differ in kind
        self,
        client: ToolServerClient,
        journal: Journal,
        settings: ToolServerSettings,
        run_id: str,
        workspace_store: WorkspaceStore,
        allowance: Allowance,
        *,
        summarise: Summariser | None = None,
        permission: Permission | None = None,
        session: Mapping[str, Any] | None = None,
        kept: frozenset[str] = frozenset(),
        clock: Callable[[], float] = time.monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._client, self._journal, self._settings, self._run_id = client, journal, settings, run_id
        self._allowance, self._permission, self._clock, self._sleep = allowance, permission, clock, sleep
        self._seen_session: str | None = None
        sync = WorkspaceSync(client, workspace_store, self._note)
        self._catalog = ToolCatalog(client)
        self._keeper = SessionKeeper(client, journal, sync, session or {})
        self._breakers = Breakers(
            failures=settings.breaker_failures,
            reset_s=settings.breaker_reset_s,
            on_change=self._breaker_changed,
            clock=clock,
        )
        continuation = Continuation(client, settings, clock=clock, sleep=sleep)
        self._deliverer = Deliverer(client, settings, self._keeper, self._breakers, continuation)
        self._settlement = Settlement(
            client.url, self._keeper, sync, settings.max_observation_chars, summarise, self._note, kept
        )
        self._left_open = False

    async def catalog(self) -> tuple[ToolInfo, ...]:
        """The live tool list, tools withheld by an open breaker left out. Raises Unreachable when it was never seen."""
        try:
            tools = await self._tools()
        except ClientProblem as problem:
            if self._catalog.known is None:
                advice = self._settlement.advice_for(unreachable(problem))
                raise Unreachable(f"There is no list of tools: {problem.message} {advice}".strip()) from problem
            tools = self._catalog.known
        return tuple(tool for name, tool in tools.items() if not self._breakers.withheld(name))

    async def call(self, invocation: Invocation) -> Outcome:
        """Never raises for what a tool or the ToolServer does. Raises BudgetExhausted, JournalBroken; cancellation passes through.

        Raises Unreachable only for a call that an earlier process sent, when this one has never reached the ToolServer.
        """
        known = self._journal.settled(EventKind.TOOL_SETTLED, invocation.key)
        if known is not None:
            return Outcome.from_json(known.data["outcome"])
        started = self._clock()
        intent = self._journal.settled(EventKind.TOOL_INTENDED, invocation.key)
        if intent is not None:
            outcome = await self._resume(invocation, intent.data)
        else:
            outcome = await self._fresh(invocation)
        self._settle(invocation, outcome, started)
        return outcome

    def _settle(self, invocation: Invocation, outcome: Outcome, started: float) -> None:
        self._journal.append(
            EventKind.TOOL_SETTLED,
            {
                "key": invocation.key,
                "call_id": outcome.call_id,
                "task_id": invocation.task_id,
                "tool": invocation.tool,
                "outcome": outcome.as_json(),
                "ms": round((self._clock() - started) * 1000),
            },
        )

    async def close(self) -> None:
        """End the session and the connections. Never raises: what can't be done is one warning.

        The session of a call that stays open is left as it is: whoever resumes the run looks for the call's files there.
        """
        if self._left_open:
            self._keeper.leave()
        await self._keeper.close()
        await self._client.close()

    async def _fresh(self, invocation: Invocation) -> Outcome:
        call_id = call_id_of(self._run_id, invocation.key)
        retries = self._retries()
        checked = await self._check(invocation, retries)
        if isinstance(checked, _Refusal):
            return await self._end(invocation, call_id, checked.settled, names=checked.names)
        tool, arguments = checked
        try:
            permits = self._breakers.admit(tool.name)
        except BreakerOpen as closed:
            return await self._end(invocation, call_id, breaker_open(closed))
        delivery = Delivery(call_id, tool.name, permits, arguments, deadline_s=self._settings.deadline_s)
        try:
            no_session = await self._deliverer.open_session(delivery, retries)
            if no_session is not None:
                return await self._end(invocation, call_id, no_session)
            self._intend(invocation.key, invocation, delivery, tool.effect)
            return await self._deliver(invocation, delivery, tool.effect, retries)
        finally:
            delivery.permits.release()

    async def _resume(self, invocation: Invocation, intent: dict[str, Any]) -> Outcome:
        """A call that an earlier process intended: what the journal says of it is what was, or would have been, sent.

        Raises Unreachable when this process has never reached the ToolServer: the call stays open for the next resume.
        """
        if self._catalog.known is None:
            await self.catalog()
        again = self._journal.settled(EventKind.TOOL_INTENDED, invocation.key + _AGAIN)
        sent = again.data if again is not None else intent
        delivery = Delivery(
            sent["call_id"],
            sent["tool"],
            self._breakers.bystander(sent["tool"]),
            sent["arguments"],
            sent.get("session_id", ""),
            sent.get("deadline_s", self._settings.deadline_s),
            may_have_arrived=True,
            was_sent=True,
        )
        try:
            return await self._deliver(invocation, delivery, sent["effect"], self._retries(), repeatable=again is None)
        finally:
            delivery.permits.release()

    async def _deliver(
        self, invocation: Invocation, delivery: Delivery, effect: str, retries: StepRetries, *, repeatable: bool = True
    ) -> Outcome:
        """Bring an intended call to its outcome. Cancelled, it first settles the call if the ToolServer helps in time."""
        started = self._clock()
        try:
            return await self._bring(invocation, delivery, effect, retries, repeatable=repeatable)
        except BaseException as end:
            settled = False
            if isinstance(end, asyncio.CancelledError) and delivery.was_sent:
                settled = await self._settle_interrupted(invocation, delivery, started)
            self._left_open |= delivery.was_sent and not settled
            raise

    async def _settle_interrupted(self, invocation: Invocation, delivery: Delivery, started: float) -> bool:
        """Whether the call is settled. In a task of its own: the cancellation that led here must not end it, a second one does."""
        task = asyncio.create_task(self._cut_off(invocation, delivery, started), name=f"cut off {delivery.call_id}")
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return False

    async def _cut_off(self, invocation: Invocation, delivery: Delivery, started: float) -> bool:
        """Stop the call where it runs and fetch its files while its session lives; False leaves it for the next process."""
        try:
            async with asyncio.timeout(_CUT_OFF_S):
                settled = await self._deliverer.stop(delivery)
                if settled is None:
                    return False
                outcome = await self._settlement.outcome(
                    invocation, delivery.call_id, settled, session_id=delivery.session_id, interrupted=True
                )
            self._settle(invocation, outcome, started)
        except (TimeoutError, NotFetched, JournalBroken) as problem:
            _log.warning("the call %s stays open: %s", delivery.call_id, str(problem) or "there was no time left")
            return False
        return True

    async def _bring(
        self, invocation: Invocation, delivery: Delivery, effect: str, retries: StepRetries, *, repeatable: bool
    ) -> Outcome:
        """One of unknown end is repeated once, if its effect allows that."""
        settled = await self._deliverer.settle(delivery, retries)
        if settled.meaning.kind is OutcomeKind.UNKNOWN and effect != "once" and repeatable:
            delivery.call_id = call_id_of(self._run_id, invocation.key, 1)
            delivery.may_have_arrived = delivery.session_lost = False
            delivery.follow_ups = 0
            self._intend(invocation.key + _AGAIN, invocation, delivery, effect)
            settled = await self._deliverer.settle(delivery, self._retries())
        names: tuple[str, ...] = ()
        if settled.meaning.kind is OutcomeKind.UNKNOWN_TOOL:
            names = await self._names_anew()
        return await self._end(invocation, delivery.call_id, settled, names=names, delivery=delivery)

    async def _end(
        self,
        invocation: Invocation,
        call_id: str,
        settled: Settled,
        *,
        names: tuple[str, ...] = (),
        delivery: Delivery | None = None,
    ) -> Outcome:
        """A refused key, or another session than before, are signs of another server: its tools may differ."""
        session_id = self._keeper.session_id
        if settled.code == "unauthorized" or self._seen_session not in (None, session_id):
            self._catalog.outdated()
        self._seen_session = session_id or self._seen_session
        sent_to, lost = (delivery.session_id, delivery.session_lost) if delivery is not None else ("", False)
        return await self._settlement.outcome(
            invocation, call_id, settled, names=names, session_id=sent_to, session_lost=lost
        )

    async def _check(self, invocation: Invocation, retries: StepRetries) -> tuple[ToolInfo, dict[str, Any]] | _Refusal:
        """Name, arguments, permission: all that can be known without sending the call."""
        try:
            tools = await self._tools(retries)
        except ClientProblem as problem:
            if self._catalog.known is None:
                return _Refusal(unreachable(problem))
            tools = self._catalog.known
        if invocation.tool not in tools:
            names = await self._names_anew()
            if invocation.tool not in names:
                return _Refusal(Settled.refused(OutcomeKind.UNKNOWN_TOOL, "tool_not_found", ""), names)
            tools = self._catalog.known or {}
        tool = tools[invocation.tool]
        arguments = read_arguments(invocation.arguments, tool)
        if isinstance(arguments, Refused):
            return _Refusal(Settled.refused(OutcomeKind.INVALID, arguments.code, arguments.message))
        denied = self._permission(invocation, tool, arguments.value) if self._permission else None
        if denied is not None:
            return _Refusal(Settled.refused(OutcomeKind.DENIED, "not_permitted", denied))
        return tool, arguments.value

    def _intend(self, key: str, invocation: Invocation, delivery: Delivery, effect: str) -> None:
        """Reserve and journal in one go: nothing may come between the two."""
        self._allowance.reserve_tool_call()
        self._journal.append(
            EventKind.TOOL_INTENDED,
            {
                "key": key,
                "call_id": delivery.call_id,
                "tool": delivery.tool,
                "arguments": delivery.arguments,
                "task_id": invocation.task_id,
                "effect": effect,
                "session_id": delivery.session_id,
                "deadline_s": delivery.deadline_s,
            },
        )

    async def _tools(self, retries: StepRetries | None = None) -> dict[str, ToolInfo]:
        """The tool list, asked for only when there is none or it is out of date. Raises ToolServerAnswer, NoAnswer."""
        if self._catalog.known is not None and self._catalog.fresh:
            return self._catalog.known
        try:
            async for attempt in (retries or self._retries()).attempts():
                with attempt:
                    return await self._refresh()
        except Transient as last:
            raise last.cause from last
        raise AssertionError("a retrying loop ends by returning or raising")

    async def _refresh(self) -> dict[str, ToolInfo]:
        try:
            return await self._catalog.refresh()
        except NoAnswer as lost:
            raise Transient(lost) from lost
        except ToolServerAnswer as refused:
            if refused.status in (429, 500, 502, 503, 504):
                raise Transient(refused) from refused
            raise

    async def _names_anew(self) -> tuple[str, ...]:
        """The names of all tools, asked for once more: the list may have changed since it was last seen."""
        self._catalog.outdated()
        try:
            await self._catalog.refresh()
        except ClientProblem as problem:
            _log.warning("the tool list could not be refreshed: %s", problem)
        return tuple(self._catalog.known or ())

    def _retries(self) -> StepRetries:
        within_s = self._settings.deadline_s + _MARGIN_S
        return StepRetries(self._settings.max_attempts, within_s, clock=self._clock, sleep=self._sleep)

    def _breaker_changed(self, name: str, state: str, failures: int) -> None:
        self._journal.append(EventKind.BREAKER_CHANGED, {"name": name, "state": state, "failures": failures})

    def _note(self, text: str) -> None:
        self._journal.append(EventKind.NOTE, {"text": text})
