"""The start of one sandbox, up to its list of tools: in turn, in time, and whole or not at all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

from toolserver.errors import ImageUnusable, RuntimeUnavailable
from toolserver.runtime.base import SandboxEnd, SandboxRuntime, SandboxSpec
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
    ends: list[SandboxEnd] = []  # of those that came to nothing

    async def start(hint: str | None) -> ToolSandbox:
        return await _start(runtime, spec, expected_tools, timeout_s, hint=hint, hidden=hidden, ends=ends)

    async with starts.turn():
        try:
            try:
                started = await start(eras.hint(spec))
            except StartOver as over:
                _log.info("sandbox_started_over", extra={"fields": {"image": spec.image, "instead": over.instead}})
                ends.clear()
                try:
                    started = await start(over.instead)
                except StartOver as again:
                    raise unready(spec.image, again.problem, timeout_s) from again
        except RuntimeUnavailable as problem:
            raise _explained(problem, spec, ends[-1] if ends else None) from problem
    eras.remember(spec, started.era)
    return started


def _explained(problem: RuntimeUnavailable, spec: SandboxSpec, end: SandboxEnd | None) -> RuntimeUnavailable:
    """With what is known of the end of the sandbox that was started."""
    if end is None or end.cause in ("unknown", "runtime_lost"):
        return problem
    message = f"{problem} Its program exited with code {end.exit_code}." if end.cause == "exited" else str(problem)
    return ImageUnusable(message, end.log_tail) if spec.foreign else RuntimeUnavailable(message)


async def _start(
    runtime: SandboxRuntime,
    spec: SandboxSpec,
    expected_tools: frozenset[str],
    timeout_s: float,
    *,
    hint: str | None,
    hidden: Mapping[str, str] | None,
    ends: list[SandboxEnd],
) -> ToolSandbox:
    """Raises RuntimeUnavailable, StartOver; `ends` then has the end of what was started, without its secrets."""
    try:
        async with asyncio.timeout(timeout_s * 2):
            started = ToolSandbox(await runtime.start(spec, hidden))
    except TimeoutError as problem:
        raise RuntimeUnavailable(f"A sandbox of the image {spec.image} did not start in time.") from problem
    started.client.hide((hidden or {}).values())
    try:
        await started.open(expected_tools, timeout_s, hint)
    except BaseException:
        end = await started.close()
        secret = (*spec.env.values(), *(hidden or {}).values())
        tail = {
            "image": spec.image,
            "cause": end.cause,
            "exit_code": end.exit_code,
            "noise": [without(secret, line.decode("utf-8", "replace")) for line in started.client.noise],
            "log_tail": without(secret, end.log_tail)[-2000:],
        }
        ends.append(replace(end, log_tail=str(tail["log_tail"])))
        _log.warning("sandbox_start_failed", extra={"fields": tail})
        raise
    return started
