"""Who waits while the server is full, and whose turn it is: one of each tenant in turn, first come first served within a tenant.

The queue holds no places itself: `admit` takes one for its caller, or says that there is none. So nothing can be counted twice,
and a wake-up too many does no harm. Whoever makes room calls `serve`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from toolserver.errors import Code, ToolServerError
from toolserver.telemetry.trace import Stage

_RECENT = 32  # admissions that the rate is taken from
_UNKNOWN_S = 5.0  # the advice while nothing is known of the rate
_LONGEST_S = 300.0


@dataclass(eq=False)
class _Waiter:
    admit: Callable[[], bool]
    admitted: bool = False
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class FairQueue:
    def __init__(self, what: str, max_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`what` is full, in words. `max_waiting` bounds each tenant's line, so that nobody's fills another's. `clock` is monotonic."""
        self._what, self._max_waiting, self._clock = what, max_waiting, clock
        self._lines: dict[str, deque[_Waiter]] = {}  # in the order of their turns
        self._admitted: deque[float] = deque(maxlen=_RECENT)

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def try_now(self, admit: Callable[[], bool]) -> bool:
        """Whether the caller was admitted at once: nobody waits, and there is room."""
        return not self._lines and admit()

    async def wait(
        self,
        tenant: str,
        admit: Callable[[], bool],
        undo: Callable[[], None],
        wait_s: float,
        gone: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """Returns when admitted. Raises no_capacity after `wait_s` seconds, and when the tenant's line is full.

        `gone` makes something to await that ends when the caller hangs up; then, and when cancelled, the place in the line is given up, and `undo` gives back what
        `admit` had taken already.
        """
        watcher = asyncio.ensure_future(gone()) if gone is not None else None
        waiter = _Waiter(admit)
        try:
            self._enter(tenant, waiter, wait_s)
            self.serve()
            with Stage("queue"):
                await asyncio.wait(
                    {waiter.turn, watcher} if watcher is not None else {waiter.turn},
                    timeout=wait_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            if watcher is not None and watcher.done() and not waiter.turn.done():
                raise ToolServerError(
                    Code.CANCELLED, "The client hung up while its request waited. Nothing was run.", effects="none"
                )
            if not waiter.turn.done():
                raise self._full(tenant, waiter)
            waiter.turn.result()
        except BaseException:
            if waiter.admitted:
                undo()
                self.serve()
            raise
        finally:
            self._leave(tenant, waiter)
            if watcher is not None:
                watcher.cancel()

    def serve(self) -> None:
        """Admit those whose turn it is, as long as there is room. The first in turn is never passed over: a large one gets its room."""
        while self._lines:
            tenant, line = next(iter(self._lines.items()))
            if not line[0].admit():
                return
            waiter = line.popleft()
            waiter.admitted = True
            waiter.turn.set_result(None)
            self._admitted.append(self._clock())
            del self._lines[tenant]
            if line:
                self._lines[tenant] = line  # its next turn comes after all others'

    def refuse_all(self, error: ToolServerError) -> None:
        """End every wait with this error."""
        for line in self._lines.values():
            for waiter in line:
                waiter.turn.set_exception(error)
        self._lines.clear()

    def _enter(self, tenant: str, waiter: _Waiter, wait_s: float) -> None:
        line = self._lines.get(tenant)
        if wait_s <= 0 or (line is not None and len(line) >= self._max_waiting):
            ahead = dict(self._lines)
            raise self._refusal(_position(ahead, tenant, len(line or ())), len(self) + 1)
        self._lines.setdefault(tenant, deque()).append(waiter)

    def _leave(self, tenant: str, waiter: _Waiter) -> None:
        line = self._lines.get(tenant)
        if line is None or waiter not in line:
            return
        was_first = line[0] is waiter and next(iter(self._lines)) == tenant
        line.remove(waiter)
        if not line:
            del self._lines[tenant]
        if was_first:
            self.serve()  # what it waited for may be enough for the next one

    def _place(self, tenant: str, waiter: _Waiter) -> dict[str, int]:
        return {
            "queue_position": _position(self._lines, tenant, self._lines[tenant].index(waiter)),
            "queue_length": len(self),
        }

    def _full(self, tenant: str, waiter: _Waiter) -> ToolServerError:
        place = self._place(tenant, waiter)
        return self._refusal(place["queue_position"], place["queue_length"])

    def _refusal(self, position: int, length: int) -> ToolServerError:
        wait_s = self._expected_s(position)
        return ToolServerError(
            Code.NO_CAPACITY,
            f"{self._what} Nothing was run. {position} of {length} in the queue when the request's wait was over; the place is not "
            f"kept. Try again in about {wait_s:g} s, or wait longer with wait_s.",
            retry_after_s=wait_s,
            extra={"queue_position": position, "queue_length": length},
        )

    def _expected_s(self, position: int) -> float:
        """From how fast the last ones were admitted; nothing is promised."""
        if len(self._admitted) < 2:
            return _UNKNOWN_S
        took = self._clock() - self._admitted[0]
        return float(min(_LONGEST_S, max(1, math.ceil(position * took / len(self._admitted)))))


def _position(lines: dict[str, deque[_Waiter]], tenant: str, before: int) -> int:
    """How many are admitted until the one of `tenant` that has `before` of its own line before it, itself included."""
    position, earlier = before + 1, True
    for name, line in lines.items():
        if name == tenant:
            earlier = False
            continue
        # a tenant whose turn comes sooner is served once more than those behind
        position += min(len(line), before + 1 if earlier else before)
    return position
