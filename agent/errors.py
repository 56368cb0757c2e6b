"""What can end a run of the agent. A tool's failure is never here: it is an Outcome, a value for the model.

AgentError                 message for a person; exit_code for the command line
├─ UsageProblem           2   wrong usage or settings
├─ BudgetExhausted        3   an allowance is used up; the run stops with a partial report
├─ Unreachable            5   the ToolServer or the model can't be reached
├─ ModelRefused           5   the model's server says no for good (401, 403, 400): names what to change
├─ RunNotFound            2
└─ JournalBroken          2   a run's journal can't be trusted: hash chain broken, or another process holds the run
"""

from __future__ import annotations


class AgentError(Exception):
    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class UsageProblem(AgentError):  # noqa: N818
    exit_code = 2


class BudgetExhausted(AgentError):  # noqa: N818
    """`allowance` is llm_calls, tool_calls, tokens, usd or seconds."""

    exit_code = 3

    def __init__(self, allowance: str, message: str) -> None:
        super().__init__(message)
        self.allowance = allowance


class Unreachable(AgentError):  # noqa: N818
    exit_code = 5


class ModelRefused(AgentError):  # noqa: N818
    exit_code = 5


class RunNotFound(AgentError):  # noqa: N818
    exit_code = 2


class JournalBroken(AgentError):  # noqa: N818
    exit_code = 2
