"""The composition root: settings become a store, models, a ToolServer, tools and a Run; all are closed in order at the end."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agent.bootstrap import inputs
from agent.bootstrap.embedded_toolserver import Address, EmbeddedToolServer, kept_in
from agent.bootstrap.interrupts import Interrupts
from agent.bootstrap.places import folder_of, open_store
from agent.budget import Allowances, Bound, worst_case
from agent.errors import Unreachable, UsageProblem
from agent.llm.model import ChatModel
from agent.llm.openai_model import OpenAIModel
from agent.loops.run import Goal, Run, RunResult
from agent.report import folder as run_folder
from agent.report.live import Progress
from agent.settings import BudgetSettings, Settings
from agent.store.base import Journal
from agent.store.fold import fold
from agent.tools.function_handler import FunctionHandler
from agent.tools.kept_workspace import take_over
from agent.tools.workspace_store import WorkspaceStore
from agent.toolserver_client.client import ToolServerClient
from agent.toolserver_client.errors import ClientProblem

_TOOLSERVER = "toolserver"  # within the run's folder
_OVER = frozenset({"done", "failed"})
_UNITS = {
    "max_tokens": "tokens", "max_usd": "dollars", "max_seconds": "seconds", "max_llm_calls": "model calls",
    "max_tool_calls": "tool calls",
}  # fmt: skip


@dataclass(frozen=True)
class _Parts:
    """What start and resume hand on."""

    settings: Settings
    workspace: WorkspaceStore
    progress: Progress
    interrupts: Interrupts
    kept: frozenset[str] = frozenset()  # ended sessions whose files `workspace` has


@dataclass(frozen=True)
class Finished:
    """A run that came to an end, whichever. `result` is what stands in result.json."""

    folder: Path
    exit_code: int
    result: dict[str, Any]


def limits(settings: Settings) -> tuple[Bound, Allowances]:
    """What a run with these settings can use at most: the bound of the loops, and the allowances after the budget."""
    bound = worst_case(settings.loop)
    return bound, Allowances.of(settings.budget, bound)


def plan_resume(settings: Settings, run_id: str, raised: dict[str, Any]) -> tuple[Settings, str]:
    """`settings` with the budget that the run had so far, but for what `raised` names; and what will happen, in a sentence.

    Raises RunNotFound, UsageProblem.
    """
    with open_store(settings, create=False) as store:
        state = fold(store.read(run_id))
    budget = {**(state.settings.get("budget") or {}), **raised}
    try:
        going_on = settings.model_copy(update={"budget": BudgetSettings(**budget)})
    except ValidationError as error:
        names = ", ".join(f"--{str(entry['loc'][0]).replace('_', '-')}: {entry['msg']}" for entry in error.errors())
        raise UsageProblem(f"Wrong budget: {names}") from error
    if state.state in _OVER:
        return going_on, f"Run {state.run_id} is {state.state} already; nothing is left to do."
    return going_on, f"Resuming run {state.run_id} with {_in_words(going_on.budget)}."


def _in_words(budget: BudgetSettings) -> str:
    given = [f"{value:,} {_UNITS[name]}" for name, value in budget.model_dump().items() if value is not None]
    return "at most " + ", ".join(given) + " in all" if given else "no budget but the bound of its loops"


def client_for(settings: Settings, address: Address, run_id: str) -> ToolServerClient:
    return ToolServerClient(
        address.url, address.api_key or None, connect_s=settings.toolserver.connect_s, trace_seed=run_id
    )


async def start(
    settings: Settings, text: str, files: Sequence[Path], progress: Progress, interrupts: Interrupts
) -> Finished:
    """A new run. `files` passed `inputs.check`. Raises AgentError for what prevents the start; nothing is left open."""
    with open_store(settings) as store:
        run_id = _new_id()
        folder = folder_of(settings, run_id)
        workspace = WorkspaceStore(folder / run_folder.WORKSPACE)
        names = workspace.add_inputs(files)
        goal = Goal(text, inputs.describe(workspace.folder, names))
        async with address_of(settings, folder) as address:
            with closing(store.create(run_id, text)) as journal:
                return await _work(journal, goal, _Parts(settings, workspace, progress, interrupts), address)


async def resume(settings: Settings, run_id: str, progress: Progress, interrupts: Interrupts) -> Finished:
    """Go on with a run; one that is over is only written out again, should its process have been killed before that.

    Raises AgentError as `start` does, RunNotFound and JournalBroken too.
    """
    with open_store(settings, create=False) as store, closing(store.open(run_id)) as journal:
        folder = folder_of(settings, journal.run_id)
        state = fold(journal.events())
        if state.state in _OVER:
            return Finished(folder, state.exit_code or 0, run_folder.write(folder, journal.events()))
        workspace = WorkspaceStore(folder / run_folder.WORKSPACE)
        goal = None
        if state.seq == 0:  # killed between its creation and its first event
            row = next(row for row in store.runs() if row.run_id == journal.run_id)
            goal = Goal(row.goal, inputs.describe(workspace.folder, workspace.files()))
        async with address_of(settings, folder) as address:  # from here on the server before it has ended
            kept = await take_over(kept_in(folder / _TOOLSERVER), workspace, journal)
            return await _work(journal, goal, _Parts(settings, workspace, progress, interrupts, kept), address)


async def _work(journal: Journal, goal: Goal | None, parts: _Parts, address: Address) -> Finished:
    """Execute the run, close its tools and models, and write its folder, however it ended."""
    settings, folder = parts.settings, parts.workspace.folder.parent
    for event in journal.events():
        parts.progress.recall(event)
    journal.subscribe(parts.progress.hear)
    models = Models(settings)
    client = client_for(settings, address, journal.run_id)
    if settings.toolserver.url is None:
        await _can_run_tools(client)
    mine = _OfTheRun()
    tools = FunctionHandler(
        client, journal, settings.toolserver, journal.run_id, parts.workspace, mine,
        summarise=mine.summarise, session={"egress": {"mode": settings.toolserver.egress}}, kept=parts.kept,
    )  # fmt: skip
    try:
        run = mine.run = Run(journal=journal, models=models.of, tools=tools, settings=settings, goal=goal)
        parts.interrupts.stop = run.interrupt
        ended: RunResult = await run.execute()
    finally:
        await tools.close()
        await models.close()
        result = run_folder.write(folder, journal.events())
    return Finished(folder, ended.exit_code, result)


async def _can_run_tools(client: ToolServerClient) -> None:
    """A ToolServer of one's own that has no sandboxes is no use: raises Unreachable, before a model is paid for anything."""
    try:
        await client.ready()
    except ClientProblem as problem:
        await client.close()
        raise Unreachable(f"The ToolServer of this run can't run tools: {problem.message}") from problem


class _OfTheRun:
    """Budget and summariser of a run, for the handler of its tools, which is made before it."""

    run: Run

    def reserve_tool_call(self) -> None:
        self.run.budget.reserve_tool_call()

    async def summarise(self, text: str, max_chars: int) -> str:
        return await self.run.condense(text, max_chars)


class Models:
    """One model a name, made when first asked for."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._by_name = settings, dict[str, OpenAIModel]()

    def of(self, role: str) -> ChatModel:
        """Raises UsageProblem when no model is set for the role."""
        name = self._settings.llm.role_models.get(role, self._settings.llm.model) or ""
        if name not in self._by_name:
            self._by_name[name] = OpenAIModel.from_settings(self._settings, role)
        return self._by_name[name]

    async def close(self) -> None:
        for model in self._by_name.values():
            await model.close()


@asynccontextmanager
async def address_of(settings: Settings, folder: Path) -> AsyncIterator[Address]:
    """The configured ToolServer, or one of the run's own that ends with the block."""
    configured = settings.toolserver
    if configured.url is not None:
        yield Address(configured.url, configured.api_key.get_secret_value() if configured.api_key else "")
        return
    async with EmbeddedToolServer(
        folder / _TOOLSERVER, runtime=configured.runtime, start_s=configured.start_s
    ) as server:
        yield await server.start()


def _new_id() -> str:
    """Sorts by time, and two in one second differ."""
    return time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + secrets.token_hex(2)
