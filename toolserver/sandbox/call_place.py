"""Where a call runs, as those see it who follow or stop it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class OutputPart:
    """A piece of a call's output. `chunks`: stream, text, and the byte offset after it where the worker tells it.

    `next` is where to go on; `lost`: bytes before the first chunk that are not kept any more.
    """

    chunks: list[tuple[str, str, int | None]]
    next: int
    lost: int
    ended: bool


class CallPlace(Protocol):
    async def cancel(self, call_id: str, reason: str) -> bool:
        """Ask for the end of a call; whether it was known. Its answer still comes. Raises SandboxGone."""

    async def peek(self, call_id: str) -> list[dict[str, Any]]:
        """The call's output so far as content blocks; none when it can't be told. Never raises."""

    async def output(self, call_id: str, offset: int, wait_s: float, max_bytes: int) -> OutputPart | None:
        """The call's output from byte `offset` on, as soon as there is some, or an empty part after `wait_s`.

        None when it can't be told: the sandbox is gone, keeps nothing of that call, or lacks the extension. Never raises.
        """
