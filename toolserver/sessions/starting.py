"""The start of one sandbox, up to its list of tools: in turn, in time, and whole or not at all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from toolserver.errors import RuntimeUnavailable
from toolserver.runtime.base import SandboxRuntime, SandboxSpec
from toolserver.sandbox.eras import Eras
from toolserver.sandbox.handshake import StartOver
from toolserver.sandbox.tool_sandbox import ToolSandbox, unready
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
    eras: Eras,
    hidden: Mapping[str, str] | None = None,
) -> ToolSandbox:
    """Open up to its list of tools, bound to nobody. Raises RuntimeUnavailable: then nothing is left of it.

    A server that could not bear the first words is started once more, and greeted otherwise. What it speaks is remembered.
    `hidden`: the secrets of an added image.
    """
    async with starts.turn():
        hint = eras.hint(spec)
        try:
            started = await _start(runtime, spec, expected_tools, timeout_s, hint=hint, hidden=hidden)
        except StartOver as over:
            _log.info("sandbox_started_over", extra={"fields": {"image": spec.image, "instead": over.instead}})
            try:
                started = await _start(runtime, spec, expected_tools, timeout_s, hint=over.instead, hidden=hidden)
            except StartOver as again:
                raise _with_exit_code(unready(spec.image, again.problem, timeout_s), again.exit_code) from again
    eras.remember(spec, started.era)
    return started


async def _start(
    runtime: SandboxRuntime,
    spec: SandboxSpec,
    expected_tools: frozenset[str],
    timeout_s: float,
    *,
    hint: str | None,
    hidden: Mapping[str, str] | None,
) -> ToolSandbox:
    """Raises RuntimeUnavailable, StartOver."""
    try:
        async with asyncio.timeout(timeout_s * 2):
            started = ToolSandbox(await runtime.start(spec, hidden))
    except TimeoutError as problem:
        raise RuntimeUnavailable(f"A sandbox of the image {spec.image} did not start in time.") from problem
    started.client.hide((hidden or {}).values())
    try:
        await started.open(expected_tools, timeout_s, hint)
    except BaseException as problem:
        end = await started.close()
        secret = (*spec.env.values(), *(hidden or {}).values())
        tail = {
            "image": spec.image,
            "cause": end.cause,
            "exit_code": end.exit_code,
            "noise": [without(secret, line.decode("utf-8", "replace")) for line in started.client.noise],
            "log_tail": without(secret, end.log_tail)[-2000:],
        }
        _log.warning("sandbox_start_failed", extra={"fields": tail})
        exit_code = end.exit_code if end.cause == "exited" else None
        if isinstance(problem, StartOver):
            problem.exit_code = exit_code
        if isinstance(problem, RuntimeUnavailable):
            raise _with_exit_code(problem, exit_code) from problem
        raise
    return started


def _with_exit_code(problem: RuntimeUnavailable, exit_code: int | None) -> RuntimeUnavailable:
    return problem if exit_code is None else RuntimeUnavailable(f"{problem} Its program exited with code {exit_code}.")
