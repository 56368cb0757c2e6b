"""The part of the run's budget that a tool call draws from."""

from __future__ import annotations

from typing import Protocol


class Allowance(Protocol):
    def reserve_tool_call(self) -> None:
        """Room for one more call. Raises BudgetExhausted. The call is charged by its TOOL_INTENDED, journalled right after."""
