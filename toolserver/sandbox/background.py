"""Tasks that outlive the request that began them, owned by someone who waits for them or ends them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Background:
    """Holds its tasks so that none is lost, logs their failures at level debug (whoever awaits one hears of it), ends them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (problem := task.exception()) is not None:
            _log.debug("task_failed", exc_info=problem, extra={"fields": {"task": task.get_name()}})

    async def finish(self, timeout_s: float) -> None:
        """Wait for all, new ones too, then cancel what is left."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while self._tasks and (left := until - loop.time()) > 0:
            await asyncio.wait(self._tasks, timeout=left)
        await self.close()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5)
