"""One image's place in a session: its sandbox is started once, replaced when it died, and ended with the session."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from toolserver.catalog.image import ToolImage
from toolserver.errors import RuntimeUnavailable
from toolserver.runtime.base import Limits, Network, SandboxEnd, SandboxRuntime, SandboxSpec
from toolserver.sandbox.background import Background
from toolserver.sandbox.tool_sandbox import ToolSandbox
from toolserver.sessions.claim import Claim
from toolserver.sessions.holdings import Holdings
from toolserver.sessions.starting import Starts, start_sandbox
from toolserver.telemetry.logs import without
from toolserver.telemetry.trace import Stage

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BoxPlan:
    """How its sandboxes are started."""

    session_id: str
    workspace_id: str
    image: ToolImage
    limits: Limits
    network: Network
    env: Mapping[str, str]
    expected_tools: frozenset[str]
    start_timeout_s: float


class Box:
    def __init__(
        self,
        plan: BoxPlan,
        runtime: SandboxRuntime,
        background: Background,
        starts: Starts,
        *,
        holdings: Holdings,
        counted: Callable[[], None],
    ) -> None:
        """`background` owns starts under way, `starts` bounds how many there are at a time, `counted` is told of each.

        A sandbox that could not be removed leaves `holdings` all the same: then a reconcile takes it later.
        """
        self.plan = plan
        self._runtime, self._background, self._starts, self._counted = runtime, background, starts, counted
        self._holdings = holdings
        self._live: ToolSandbox | None = None
        self._start_task: asyncio.Task[ToolSandbox] | None = None
        self._changing = asyncio.Lock()
        self._lost: SandboxEnd | None = None  # an end that no call was told of yet
        self._closed = False
        self._warm, self._why_cold = False, "it was started at its first use"

    @property
    def live(self) -> ToolSandbox | None:
        """The running sandbox, if there is one."""
        return self._live if self._live is not None and self._live.alive else None

    def begin_with(self, claim: Claim) -> None:
        """What the pool had for its first sandbox. Before any use of the box."""
        if claim.spare is not None:
            self._live, self._warm = claim.spare.sandbox, True
        elif claim.reason is not None:
            self._why_cold = claim.reason

    def as_json(self) -> dict[str, str] | None:
        """The sandbox as clients see it; None when there is none now."""
        if self._live is None:
            return None
        told = {"image": self.plan.image.name, "sandbox_id": self._live.client.sandbox.spec.sandbox_id}
        if self._warm:
            return {**told, "start": "warm"}
        return {**told, "start": "cold", "reason": self._why_cold}

    async def sandbox(self) -> ToolSandbox:
        """The running sandbox; started or replaced when there is none. Raises RuntimeUnavailable.

        One start serves all who wait, and goes on when one of them is cancelled.
        """
        if (live := self.live) is not None:
            return live
        if self._start_task is None or self._start_task.done():
            self._start_task = self._background.spawn(
                self._renew(), f"start {self.plan.image.name} of {self.plan.session_id}"
            )
        with Stage("start"):
            return await asyncio.shield(self._start_task)

    async def _renew(self) -> ToolSandbox:
        async with self._changing:
            if (live := self.live) is not None:
                return live
            if self._live is not None:
                await self._remove(self._live)
            if self._closed:
                raise RuntimeUnavailable("The session is ending.")
            self._live = await self._start()
            return self._live

    def take_loss(self) -> SandboxEnd | None:
        """How the sandbox before this one ended, told once: the state in it is lost."""
        lost, self._lost = self._lost, None
        return lost

    async def bury(self, dead: ToolSandbox) -> SandboxEnd:
        """Remove a sandbox whose stream broke or that must go; how it ended. The next call gets a fresh one."""
        async with self._changing:
            if self._live is dead:
                return await self._remove(dead)
        return await dead.close()

    async def close(self) -> None:
        self._closed = True
        async with self._changing:  # a start under way is waited for, and ended with what it started
            if self._live is not None:
                await self._remove(self._live)

    async def _remove(self, sandbox: ToolSandbox) -> SandboxEnd:
        try:
            end = await sandbox.close()
        except RuntimeUnavailable as problem:
            _log.error(
                "sandbox_not_removed", extra={"fields": {"session_id": self.plan.session_id, "problem": str(problem)}}
            )
            sandbox.end = end = SandboxEnd("runtime_lost")
        self._holdings.sandboxes.discard(sandbox.client.sandbox.spec.sandbox_id)
        self._live, self._lost = None, end
        self._warm, self._why_cold = False, "the one before it ended"
        fields = {
            "session_id": self.plan.session_id,
            "image": self.plan.image.name,
            "cause": end.cause,
            "exit_code": end.exit_code,
            "garbage_lines": sandbox.client.garbage_lines,
            **({"log_tail": self._tail(end)} if end.log_tail and not self._closed else {}),
        }
        _log.info("sandbox_ended", extra={"fields": fields})
        return end

    def _tail(self, end: SandboxEnd) -> str:
        """The last words of a sandbox for the log, without what the session's environment holds."""
        return without(self.plan.env.values(), end.log_tail)[-2000:]

    async def _start(self) -> ToolSandbox:
        plan = self.plan
        spec = SandboxSpec(
            sandbox_id=f"sbx_{secrets.token_hex(8)}",
            workspace_id=plan.workspace_id,
            image=plan.image.name,
            reference=plan.image.reference,
            command=plan.image.command,
            limits=plan.limits,
            workspace=plan.image.workspace,
            network=plan.network,
            env=plan.image.env,
        )
        self._holdings.sandboxes.add(spec.sandbox_id)
        try:
            return await self._started(spec)
        except BaseException:
            self._holdings.sandboxes.discard(spec.sandbox_id)
            raise

    async def _started(self, spec: SandboxSpec) -> ToolSandbox:
        plan = self.plan
        started = await start_sandbox(self._runtime, self._starts, spec, plan.expected_tools, plan.start_timeout_s)
        try:
            await started.bind(plan.env, plan.limits, plan.start_timeout_s)
        except BaseException:
            await started.close()
            raise
        self._counted()
        return started
