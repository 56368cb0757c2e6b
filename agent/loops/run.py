"""A run from its goal to its end: started, or gone on with from where its journal stops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agent.llm.model import ChatModel
from agent.settings import Settings
from agent.store.base import Journal
from agent.tools.outcome import Tools

ModelFactory = Callable[[str], ChatModel]  # role → model; called often, so the models are kept by the factory


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
    """One run. The journal, models and tools stay the caller's: it closes them after `execute`."""

    def __init__(
        self, *, journal: Journal, models: ModelFactory, tools: Tools, settings: Settings, goal: Goal | None = None
    ) -> None:
        """`goal` for a new run; a journal that has events already goes on with its own goal, loop limits and bound."""

    async def execute(self) -> RunResult:
        """Work until the run ends. What ends it (a budget, the model gone, an interrupt) is in the result, not raised.

        Raises JournalBroken when the run was taken over. A cancelled `execute` journals RUN_ENDED and passes the cancellation on.
        """
        raise NotImplementedError

    def interrupt(self) -> None:
        """For a signal handler: `execute` ends soon with state interrupted and exit code 130."""
