"""The start of one sandbox, up to its list of tools: in turn, in time, and whole or not at all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from toolserver.errors import RuntimeUnavailable
from toolserver.runtime.base import SandboxRuntime, SandboxSpec
from toolserver.sandbox.tool_sandbox import ToolSandbox
from toolserver.telemetry.logs import without

_log = logging.getLogger(__name__)


class Starts:
    """Bounds how many sandboxes start at a time. `idle`: none does, and none waits."""

    def __init__(self, at_a_time: int) -> None:
        self._turns = asyncio.Semaphore(at_a_time)
        self._under_way = 0

    @property
    def idle(self) -> bool:
        return self._under_way == 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        self._under_way += 1
        try:
            async with self._turns:
                yield
        finally:
            self._under_way -= 1


async def start_sandbox(
    runtime: SandboxRuntime,
    starts: Starts,
    spec: SandboxSpec,
    expected_tools: frozenset[str],
    timeout_s: float,
    *,
    hidden: Mapping[str, str] | None = None,
) -> ToolSandbox:
    """Open up to its list of tools, bound to nobody. Raises RuntimeUnavailable: then nothing is left of it.

    `hidden`: the secrets of an added image.
    """
    async with starts.turn():
        try:
            async with asyncio.timeout(timeout_s * 2):
                started = ToolSandbox(await runtime.start(spec, hidden))
        except TimeoutError as problem:
            raise RuntimeUnavailable(f"A sandbox of the image {spec.image} did not start in time.") from problem
        try:
            await started.open(expected_tools, timeout_s)
        except BaseException:
            end = await started.close()
            tail = {
                "image": spec.image,
                "cause": end.cause,
                "log_tail": without((*spec.env.values(), *(hidden or {}).values()), end.log_tail)[-2000:],
            }
            _log.warning("sandbox_start_failed", extra={"fields": tail})
            raise
    return started
