"""The part of the run's budget that a tool call draws from."""

from __future__ import annotations

from typing import Protocol


class Allowance(Protocol):
    def reserve_tool_call(self) -> None:
        """Room for one more call. Raises BudgetExhausted. The call is charged by its TOOL_INTENDED, journalled right after."""


class Unlimited:
    """For callers without a budget, such as tests and single calls from the command line."""

    def reserve_tool_call(self) -> None:
        return None
