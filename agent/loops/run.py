"""A run from its goal to its end: started, or gone on with from where its journal stops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from agent.budget import Allowances, Budget, worst_case
from agent.errors import AgentError, JournalBroken, UsageProblem
from agent.events import Event, EventKind
from agent.llm.model import ChatModel
from agent.loops.plan_loop import PlanLoop
from agent.planning.task import TaskState
from agent.roles.desk import Desk
from agent.roles.summariser import condense, partial_answer
from agent.settings import LoopSettings, Settings
from agent.store.base import Journal
from agent.store.fold import RunState
from agent.tools.outcome import Tools
from agent.trajectory.keys import SUMMARY

log = logging.getLogger(__name__)

ModelFactory = Callable[[str], ChatModel]  # role → model; called often, so the models are kept by the factory

_EXIT_WAITING = 4
_EXIT_INTERRUPTED = 130
_OVER = frozenset({"done", "failed"})
_SHOWN_OF_LLM = {"model", "role_models", "max_tokens", "context_tokens", "temperature"}  # no key, no address


@dataclass(frozen=True)
class RunResult:
    """`state` is done, failed, stopped or interrupted; `exit_code` is the command's. All of it is in RUN_ENDED too."""

    state: str
    answer: str
    reason: str
    exit_code: int


@dataclass(frozen=True)
class Goal:
    """`files` are {path, bytes, sha256} of what lies in the workspace at the start; paths as the tools name them."""

    text: str
    files: tuple[dict[str, Any], ...] = ()


class Run:
    """One run, executed once. The journal, models and tools stay the caller's: it closes them after `execute`.

    Tool calls are reserved in the budget here, before they reach `tools`; a handler that sends a call again asks `budget` itself.
    """

    def __init__(
        self, *, journal: Journal, models: ModelFactory, tools: Tools, settings: Settings, goal: Goal | None = None
    ) -> None:
        """`goal` for a new run; a journal that has events already goes on with its own goal, loop limits and bound.

        The budget's allowances are those of `settings`: a stopped run is resumed with higher ones, and what was spent stays spent.
        """
        self._journal, self._models, self._tools, self._goal = journal, models, tools, goal
        self.state = RunState()
        past = list(journal.events())
        for event in past:
            self.state.apply(event)
        self._new = self.state.state == "new"
        loop = settings.loop if self._new else _limits_of(self.state)
        self._settings = settings.model_copy(update={"loop": loop})
        self.bound = worst_case(loop) if self._new else self.state.bound
        self.budget = Budget(Allowances.of(settings.budget, self.bound))
        self._desk = Desk(journal, self.budget, models, settings.llm, loop.max_corrections)
        self._summaries = 0
        for event in past:
            self._apply(event)
        self._work: asyncio.Task[RunResult] | None = None
        self._interrupted = False
        self._fault: Exception | None = None

    async def execute(self) -> RunResult:
        """Work until the run ends. What ends it (a budget, the model gone, an interrupt) is in the result, not raised.

        Raises UsageProblem for a new run without a goal, JournalBroken when the run was taken over. A cancelled `execute` journals
        RUN_ENDED and passes the cancellation on.
        """
        if self.state.state in _OVER:
            return RunResult(self.state.state, self.state.answer, self.state.reason, self.state.exit_code or 0)
        self._journal.subscribe(self._take_in)
        self._begin()
        self._work = asyncio.create_task(self._run_to_end(), name=f"run {self._journal.run_id}")
        if self._interrupted:
            self._work.cancel()
        try:
            return await self._work
        except asyncio.CancelledError:
            if not self._interrupted:
                await self._stop_work()
                if self.state.ended_at is None:
                    self._end("interrupted", "the run was cancelled; resume it to go on", _EXIT_INTERRUPTED)
                raise
            return self._end("interrupted", "the run was interrupted; resume it to go on", _EXIT_INTERRUPTED)

    async def condense(self, text: str, max_chars: int) -> str:
        """A tool's long output made short by the model; empty when it can't be, or when the run has had its share of that."""
        if self._summaries >= self._settings.loop.max_summaries:
            return ""
        return await condense(self._desk, text, max_chars)

    def interrupt(self) -> None:
        """For a signal handler: `execute` ends soon with state interrupted and exit code 130."""
        self._interrupted = True
        if self._work is not None:
            self._work.cancel()

    async def _stop_work(self) -> None:
        if self._work is not None and not self._work.done():
            self._work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._work

    def _take_in(self, event: Event) -> None:
        try:
            self.state.apply(event)
            self._apply(event)
        except Exception as fault:
            self._fault = fault  # a journal only logs what its listeners raise
            raise

    def _apply(self, event: Event) -> None:
        self.budget.apply(event)
        self._desk.apply(event)
        asked = event.kind is EventKind.LLM_REQUESTED and event.data["key"].startswith(f"{SUMMARY}/")
        self._summaries += asked

    def _emit(self, kind: EventKind, data: dict[str, Any]) -> Event:
        event = self._journal.append(kind, data)
        if self._fault is not None:
            raise JournalBroken(
                f"run {event.run_id} can't go on: an event does not fit its state ({self._fault})"
            ) from self._fault
        return event

    def _begin(self) -> None:
        if not self._new:
            answered = self.state.exit_code == _EXIT_WAITING
            budget = self._settings.budget.model_dump(mode="json")
            reason = self.state.reason or "the process had ended"
            self._emit(EventKind.RUN_RESUMED, {"pid": os.getpid(), "reason": reason, "budget": budget})
            if answered:
                self._try_again()
            return
        if self._goal is None or not self._goal.text.strip():
            raise UsageProblem("a new run needs a goal: say what is to be achieved")
        shown = self._settings.model_dump(mode="json", include={"llm": _SHOWN_OF_LLM, "loop": True, "budget": True})
        data = {
            "goal": self._goal.text,
            "files": list(self._goal.files),
            "settings": shown,
            "bound": asdict(self.bound),
        }
        self._emit(EventKind.RUN_STARTED, {**data, "version": _version()})

    def _try_again(self) -> None:
        """A person resumed a run that waited for one: the tasks that wait get another attempt."""
        for node in list(self.state.plan):
            if node.state is TaskState.WAITING:
                change = {
                    "task_id": node.id,
                    "from": str(node.state),
                    "to": str(TaskState.REVISED),
                    "attempt": node.attempt,
                }
                self._emit(EventKind.TASK_CHANGED, {**change, "role": "person", "reason": "the run was resumed"})

    async def _run_to_end(self) -> RunResult:
        loop = PlanLoop(
            state=self.state,
            emit=self._emit,
            journal=self._journal,
            desk=self._desk,
            budget=self.budget,
            tools=self._tools,
            settings=self._settings,
        )
        try:
            ending, answer = await loop.run()
        except JournalBroken:
            raise  # the journal is not ours any more: nothing can be written
        except AgentError as stop:  # a budget, the model or the ToolServer gone, settings that don't do
            return self._end("stopped", stop.message, stop.exit_code)
        except Exception as fault:
            log.exception("run %s stopped by a fault", self._journal.run_id)
            return self._end("stopped", f"a fault in the agent stopped the run: {type(fault).__name__}: {fault}", 1)
        exit_code = {"done": 0, "stopped": _EXIT_WAITING}.get(ending.state, 1)
        return self._end(ending.state, ending.reason, exit_code, answer)

    def _end(self, state: str, reason: str, exit_code: int, answer: str | None = None) -> RunResult:
        told = answer or partial_answer(self.state.plan, reason)
        self._emit(EventKind.RUN_ENDED, {"state": state, "reason": reason, "answer": told, "exit_code": exit_code})
        return RunResult(state, told, reason, exit_code)


def _limits_of(state: RunState) -> LoopSettings:
    """The limits that the run began with: its bound rests on them."""
    known = {name: value for name, value in state.settings.get("loop", {}).items() if name in LoopSettings.model_fields}
    return LoopSettings(**known)


def _version() -> str:
    try:
        return version("toolcrib")
    except PackageNotFoundError:
        return "unknown"
