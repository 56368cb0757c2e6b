"""A call while it runs: who waits for it, who follows it, what it asks its caller, and how it can be stopped."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

from toolserver.calls.answer import Answer
from toolserver.calls.news import News
from toolserver.catalog.image import Tool
from toolserver.errors import Code, ToolServerError
from toolserver.sandbox.call_place import CallPlace
from toolserver.sandbox.questions import Question, Reply
from toolserver.sessions.session import Ending, Session
from toolserver.store.calls import CallRow

CancelledBy = Literal["caller", "shutdown"]
_LAST_S, _LAST_SHARE = 2.0, 0.1  # of the time to the deadline: what is left to the tool when nobody answered


@dataclass(eq=False)
class Asked:
    """A question that is open. `reply` is set by whoever answers it first."""

    number: int  # from 1, within its call
    question: Question
    reply: asyncio.Future[Reply] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass
class RunningCall:
    """`answer` is set once, when the call is written down as ended. `sandbox` is set while a sandbox works on it.

    `left_open` is its row when an earlier server began it; its arguments are not known then. `received` turns false when it is
    certain that no sandbox has received it or will. `placed` is the sandbox that it was sent to: from then on it may have had effects, and its output can be followed.
    """

    tenant: str
    call_id: str
    session: Session
    tool: Tool
    arguments: dict[str, Any]
    deadline_s: float
    request_hash: str
    trace_id: str
    key_id: str | None = None
    arguments_digest: str | None = None
    queued: bool = False  # it waits for its turn, and nothing of it ran
    waiters: int = 0
    usage: dict[str, Any] | None = None  # as its sandbox told it
    left_open: CallRow | None = None
    received: bool = True
    answer: asyncio.Future[Answer] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    task: asyncio.Task[None] | None = None
    task_began: bool = False  # before its first step a task can't be cancelled: it looks for `abort_error` itself
    sandbox: CallPlace | None = None
    placed: asyncio.Future[CallPlace] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    news: News = field(default_factory=News)
    cancelled_by: CancelledBy | None = None  # the first who asked
    last_content: list[dict[str, Any]] = field(default_factory=list)  # seen before its sandbox was ended for a cancel
    abort_error: ToolServerError | None = None
    denied: list[dict[str, Any]] = field(default_factory=list)  # what the egress proxy refused while it ran
    settling: bool = False  # how it ended is known and is being written down
    questions: int = 0  # asked so far
    ask_until: float = inf  # the loop's time up to which an answer is waited for
    _asked: Asked | None = None
    _turn_to_ask: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def asked(self) -> Asked | None:
        """What it asks its caller now, as long as nobody answered."""
        return self._asked if self._asked is not None and not self._asked.reply.done() else None

    async def ask(self, question: Question) -> Reply:
        """Put it to the caller; the answer, or after the time that is left for one: cancel. One question at a time."""
        async with self._turn_to_ask:
            self.questions += 1
            self._asked = asked = Asked(self.questions, question)
            self.news.ring()
            try:
                await asyncio.wait([asked.reply], timeout=max(0.0, self.ask_until - asyncio.get_running_loop().time()))
                return asked.reply.result() if asked.reply.done() else Reply("cancel")
            finally:
                asked.reply.cancel()
                self._asked = None

    def expect_answers_until(self, begun: float) -> None:
        """`begun`: the loop's time when it was sent. Shortly before its deadline an open question is cancelled."""
        self.ask_until = begun + self.deadline_s - min(_LAST_S, self.deadline_s * _LAST_SHARE)

    def ask_no_more(self) -> None:
        """Whatever it asks, or asks from now on, is cancelled."""
        self.ask_until = 0.0
        if (asked := self.asked) is not None:
            asked.reply.set_result(Reply("cancel"))

    def hand_to(self, sandbox: CallPlace) -> None:
        self.sandbox = sandbox
        if not self.placed.done():
            self.placed.set_result(sandbox)
        elif sandbox is not self.placed.result():  # found again, by another stream
            self.placed = asyncio.get_running_loop().create_future()
            self.placed.set_result(sandbox)
        self.news.ring()

    def abort(self, error: ToolServerError) -> None:
        """End it now with this error, whatever its sandbox does."""
        if self.abort_error is None and not self.settling and not self.answer.done():
            self.abort_error = error
            if self.task is not None and self.task_began:
                self.task.cancel()

    def begin_task(self) -> None:
        """The first step of its task. Raises CancelledError when it was to end before that."""
        self.task_began = True
        if self.abort_error is not None:
            raise asyncio.CancelledError

    @contextlib.contextmanager
    def ended_with_session(self) -> Iterator[None]:
        """Within it the end of the session ends the call."""

        def on_end(ending: Ending) -> None:
            error = ending.error(self.session.session_id)
            error.call_id, error.effects = self.call_id, "possible"
            self.abort(error)

        self.session.watchers.add(on_end)
        try:
            yield
        finally:
            self.session.watchers.discard(on_end)

    def left(self) -> None:
        """Someone who waited for it hung up. While it waits for its turn it is given up with the last one; else it goes on."""
        if self.queued and self.waiters == 0:
            told = "The client hung up while the call waited for its turn. Nothing was run."
            self.abort(ToolServerError(Code.CANCELLED, told, self.call_id, effects="none"))

    async def wait(self, wait_s: float, most_s: float = 0.0) -> Answer | None:
        """Its answer; None when it has none within `wait_s`, or asks something of its caller.

        While it tells progress it is waited for longer, up to `most_s`. Any number may wait; one that goes away stops nothing.
        """
        if not self.answer.done():
            self.waiters += 1
            try:
                await self._wait(wait_s, most_s)
            finally:
                self.waiters -= 1
        return self.answer.result() if self.answer.done() else None

    async def ended(self, within_s: float) -> Answer | None:
        """As `wait`, whatever it asks meanwhile."""
        await asyncio.wait([self.answer], timeout=within_s)
        return self.answer.result() if self.answer.done() else None

    async def _wait(self, wait_s: float, most_s: float) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0)  # a call that was begun just now has its first step before anything else is done with it
        until, latest, progress = loop.time() + wait_s, loop.time() + most_s, self.news.progress
        while not self.answer.done() and self.asked is None:
            if (left := until - loop.time()) <= 0:
                if self.news.progress is progress or latest <= until:
                    return
                until, progress = min(latest, loop.time() + wait_s), self.news.progress
                continue
            news: set[asyncio.Future[Any]] = {self.answer, self.news.changed}
            await asyncio.wait(news, timeout=left, return_when=asyncio.FIRST_COMPLETED)
