"""Steps that must not stop half way when their caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


async def uninterrupted(
    work: Coroutine[Any, Any, Result], *, undo: Callable[[Result], Awaitable[object]] | None = None
) -> Result:
    """Run `work`, which has deadlines of its own, to its end even when the caller is cancelled meanwhile.

    The cancellation goes on afterwards; what `work` gave is handed to `undo` first, for nobody else will have it.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if undo is not None and not task.cancelled() and task.exception() is None:
            await undo(task.result())
        raise
