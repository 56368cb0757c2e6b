"""One image's place in a session: its sandbox is started once, found again, replaced when it died, and ended with the session."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from toolserver.catalog.image import ToolImage
from toolserver.egress.policy import EgressPolicy
from toolserver.errors import RuntimeUnavailable, SandboxGone, StoreUnavailable
from toolserver.runtime.base import (
    CommandSandbox,
    Limits,
    SandboxEnd,
    SandboxEnded,
    SandboxRuntime,
    SandboxSpec,
)
from toolserver.sandbox.background import Background
from toolserver.sandbox.eras import Eras
from toolserver.sandbox.stdio_client import RpcError
from toolserver.sandbox.tool_sandbox import Term, ToolSandbox
from toolserver.sessions.claim import Claim
from toolserver.sessions.doors import WayOut, proxy_variables
from toolserver.sessions.holdings import Holdings
from toolserver.sessions.starting import Starts, start_sandbox
from toolserver.sessions.terms import Terms
from toolserver.store import sandboxes as rows
from toolserver.store.database import Database
from toolserver.store.sandboxes import SandboxRow
from toolserver.telemetry.logs import without
from toolserver.telemetry.trace import Stage

_ATTACH_S = 10.0  # for a worker to answer `attach`; one that does not is replaced
_SETTLE_S = 3.0  # for the engine to note that a sandbox whose streams ended has ended itself
_REPLACED = "the one before it ended"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BoxPlan:
    """How its sandboxes are started."""

    session_id: str
    workspace_id: str
    image: ToolImage
    limits: Limits
    way_out: WayOut | None  # None: nobody lets the image reach anything
    env: Mapping[str, str]
    expected_tools: frozenset[str]
    start_timeout_s: float


def new_spec(plan: BoxPlan) -> SandboxSpec:
    """Of one more sandbox: exactly the image that was approved, where one was."""
    image, foreign = plan.image, plan.image.origin == "added"
    with_door = plan.way_out is not None and foreign
    return SandboxSpec(
        sandbox_id=f"sbx_{secrets.token_hex(8)}",
        workspace_id=plan.workspace_id,
        image=image.name,
        reference=image.digest or image.reference,
        command=image.command,
        limits=plan.limits,
        workspace=image.workspace,
        env={**(proxy_variables(image) if with_door else {}), **image.env},
        egress=plan.way_out is not None and not foreign,
        door=plan.way_out.door if plan.way_out is not None and with_door else None,
        foreign=foreign,
        draws_pages=bool(image.host_programs),
        working_dir=image.working_dir,
    )


async def hidden_env(image: ToolImage) -> dict[str, str]:
    """The secrets of an added image, read now. Raises SecretMissing."""
    if image.origin != "added" or not image.secrets:
        return {}
    return await asyncio.to_thread(lambda: {name: source.read() for name, source in image.secrets.items()})


@dataclass(frozen=True)
class BoxServices:
    """What all boxes share. `eras`: what images were found to speak. `tools_seen` is told what a sandbox of an
    added image offers, and says why it must not be used, if so.

    `background` owns starts under way, `starts` and `attaches` bound how many there are at a time.

    A sandbox that could not be removed leaves `holdings` all the same: then a reconcile takes it later. `counted` is told of
    each start.
    """

    runtime: SandboxRuntime
    database: Database
    background: Background
    holdings: Holdings
    terms: Terms
    starts: Starts
    attaches: asyncio.Semaphore
    counted: Callable[[], None]
    eras: Eras
    tools_seen: Callable[[str, list[dict[str, Any]]], str | None]


class Box:
    def __init__(self, plan: BoxPlan, services: BoxServices, earlier: SandboxRow | None = None) -> None:
        """`earlier`: the sandbox that a server before this one used."""
        self.plan = plan
        self._services = services
        self._live: ToolSandbox | None = None
        self._earlier = earlier
        self._generation = 0 if earlier is None else earlier.generation
        self._start_task: asyncio.Task[ToolSandbox] | None = None
        self._changing = asyncio.Lock()
        self._lost: SandboxEnd | None = None  # an end that no call was told of yet
        self._closed = False
        self._why_closed = "The session is ending."
        self._commands: set[CommandSandbox] = set()
        self._under_way: set[asyncio.Event] = set()  # of commands, until nothing is left of them
        self._hidden: tuple[str, ...] = ()  # what must not stand in the log
        self._why_cold: str | None = "it was started at its first use"  # None: it came from the pool
        if earlier is not None:
            self._why_cold = earlier.why_cold
            services.holdings.sandboxes.add(earlier.sandbox_id)

    @property
    def live(self) -> ToolSandbox | None:
        """The running sandbox, if there is one."""
        return self._live if self._live is not None and self._live.alive else None

    async def begin_with(self, claim: Claim) -> None:
        """What the pool had for its first sandbox. Before any use of the box. Raises RuntimeUnavailable."""
        if claim.spare is not None:
            self._live, self._why_cold = claim.spare.sandbox, None
            if self._live is not None:
                await self._record(self._live)
        elif claim.reason is not None:
            self._why_cold = claim.reason

    def as_json(self) -> dict[str, str] | None:
        """The sandbox as clients see it; None when there is none now."""
        if self._live is not None:
            sandbox_id = self._live.sandbox_id
        elif self._earlier is not None:
            sandbox_id = self._earlier.sandbox_id
        else:
            return None
        told = {"image": self.plan.image.name, "sandbox_id": sandbox_id}
        if self._why_cold is None:
            return {**told, "start": "warm"}
        return {**told, "start": "cold", "reason": self._why_cold}

    @property
    def generation(self) -> int:
        """How many sandboxes it has had, the present one included."""
        return self._generation

    @property
    def first_candidate(self) -> int | None:
        """The generation of the first sandbox that a call written down now can be sent to.

        None for a command: nobody can tell later whether it was begun.
        """
        if self.plan.image.kind == "cli":
            return None
        present = self._live is not None or self._earlier is not None
        return self._generation if present else self._generation + 1

    @property
    def needs_care(self) -> bool:
        """Whether there is a sandbox to be found again, or one whose stream ended."""
        return not self._closed and (self._earlier is not None or (self._live is not None and not self._live.alive))

    async def sandbox(self) -> ToolSandbox:
        """The running sandbox; found again, started or replaced when there is none. Raises RuntimeUnavailable.

        One start serves all who wait, and goes on when one of them is cancelled.
        """
        if (live := self.live) is not None:
            return live
        with Stage("start"):
            if self._start_task is None or self._start_task.done():
                self._start_task = self._services.background.spawn(
                    self._renew(), f"start {self.plan.image.name} of {self.plan.session_id}"
                )
            return await asyncio.shield(self._start_task)

    async def _renew(self) -> ToolSandbox:
        async with self._changing:
            if (live := self.live) is not None:
                return live
            with contextlib.suppress(SandboxEnded):
                return await self._find_again()
            if self._closed:
                raise RuntimeUnavailable(self._why_closed)
            self._live = await self._start()
            return self._live

    async def care(self) -> None:
        """Find the sandbox again, or note that it is lost and remove what is left of it. Raises RuntimeUnavailable."""
        async with self._changing:
            if self.needs_care:
                with contextlib.suppress(SandboxEnded):
                    await self._find_again()

    async def found_again(self, dead: ToolSandbox | None) -> ToolSandbox:
        """The sandbox behind the stream of `dead`, or (None) the one that an earlier server used, when it still runs.

        Raises SandboxEnded, and RuntimeUnavailable when that can't be told now.
        """
        async with self._changing:
            live = self.live
            if dead is not None and self._live is not dead:
                if live is None or live.sandbox_id != dead.sandbox_id:
                    raise SandboxEnded(dead.end or SandboxEnd("unknown"))
                return live
            return live if live is not None else await self._find_again()

    async def _find_again(self) -> ToolSandbox:
        """In `_changing`. Raises SandboxEnded, RuntimeUnavailable."""
        if self._closed:
            raise SandboxEnded(SandboxEnd("killed"))
        if (dead := self._live) is not None:
            if not dead.client.cut or not dead.has_worker:
                raise SandboxEnded(await self._remove(dead))
            await dead.release()
            sandbox, term = dead.client.sandbox, self._services.terms.later()
            try:
                found = await self._attach(sandbox.spec, sandbox.handle, dead.protocol(), term)
            except SandboxEnded as gone:
                raise SandboxEnded(await self._remove(dead)) from gone
            self._live = await self._with_door(found)
            _log.info("sandbox_attached_again", extra={"fields": self._fields()})
            return self._live
        if (earlier := self._earlier) is None:
            raise SandboxEnded(self._lost or SandboxEnd("unknown"))
        spec = SandboxSpec.load(earlier.spec)
        async with self._services.attaches:
            try:
                found = await self._attach(spec, earlier.handle, earlier.protocol, self._services.terms.first)
            except SandboxEnded as gone:
                self._lost, self._earlier, self._why_cold = gone.end, None, _REPLACED
                self._services.holdings.sandboxes.discard(spec.sandbox_id)
                with contextlib.suppress(RuntimeUnavailable):  # a reconcile takes it later
                    await self._services.runtime.discard(frozenset({spec.sandbox_id}), frozenset())
                raise
        self._live = await self._with_door(found)
        self._earlier = None
        _log.info("sandbox_attached", extra={"fields": self._fields()})
        return self._live

    async def _with_door(self, found: ToolSandbox) -> ToolSandbox:
        """One that runs, with its door open again: a new proxy has none. While the proxy is away nothing goes through."""
        try:
            if self.plan.way_out is not None:
                await self.plan.way_out.open(found.sandbox_id)
                await found.tell_door(self.plan.way_out.told, _ATTACH_S)
        except RuntimeUnavailable as problem:
            _log.warning("egress_not_ready", extra={"fields": {**self._fields(), "problem": str(problem)}})
        except BaseException:
            await found.release()
            raise
        return found

    async def set_egress(self, policy: EgressPolicy) -> None:
        """What its sandboxes may reach from now on; connections that are no longer allowed are cut. Raises RuntimeUnavailable."""
        async with self._changing:
            way_out = self.plan.way_out
            if way_out is None or self._closed:
                return
            way_out.policy = policy
            live = self.live
            if live is not None:
                await way_out.open(live.sandbox_id)
                await live.tell_door(way_out.told, _ATTACH_S)
            elif self._under_way:
                await way_out.open(self.plan.session_id)
            else:
                await way_out.shut()  # it is opened again with its sandbox

    async def egress_settled(self) -> None:
        """Each refusal up to now was told to whoever listens."""
        if self.plan.way_out is not None:
            await self.plan.way_out.settle()

    async def _attach(self, spec: SandboxSpec, handle: str, protocol: str, term: Term) -> ToolSandbox:
        """Raises SandboxEnded: it is no more, or does not answer. RuntimeUnavailable: that can't be told now."""
        until = asyncio.get_running_loop().time() + _SETTLE_S
        while True:
            hidden = await hidden_env(self.plan.image)
            found = ToolSandbox(await self._services.runtime.attach(spec, handle))
            found.client.hide(hidden.values())
            self._hidden = tuple(hidden.values())
            try:
                if await found.attach(protocol, term, _ATTACH_S):
                    self._heed_tools(found)
                    return found
                problem: Exception | str = "it was never given to its session"
            except SandboxGone as ending:  # its end is seen on the stream before the engine notes it
                await found.release()
                if asyncio.get_running_loop().time() < until:
                    await asyncio.sleep(0.05)
                    continue
                problem = ending
            except (TimeoutError, RpcError) as deaf:
                problem = deaf
            except BaseException:
                await found.release()
                raise
            _log.warning("sandbox_not_attached", extra={"fields": {**self._fields(), "problem": repr(problem)}})
            raise SandboxEnded(await found.close())

    @contextlib.asynccontextmanager
    async def command(self, arguments: tuple[str, ...]) -> AsyncIterator[tuple[CommandSandbox, Collection[str]]]:
        """A sandbox that runs the image's command with these, and the secrets that it has. It is removed at the end.

        Raises RuntimeUnavailable when it can't be started.
        """
        if self._closed:
            raise RuntimeUnavailable(self._why_closed)
        services, spec = self._services, replace(new_spec(self.plan), arguments=arguments)
        services.holdings.sandboxes.add(spec.sandbox_id)
        gone = asyncio.Event()
        self._under_way.add(gone)
        try:
            hidden = await hidden_env(self.plan.image)
            if self.plan.way_out is not None:
                await self.plan.way_out.open(spec.sandbox_id)
            async with services.starts.turn():
                sandbox = await services.runtime.run(spec, hidden)
            self._commands.add(sandbox)
            services.counted()
            try:
                yield sandbox, hidden.values()
            finally:
                await sandbox.remove()
                self._commands.discard(sandbox)
        finally:
            services.holdings.sandboxes.discard(spec.sandbox_id)
            self._under_way.discard(gone)
            gone.set()

    def withdraw(self, reason: str) -> None:
        """Start nothing more, for a reason that whoever still waits for it is told. `close` is to follow."""
        self._closed, self._why_closed = True, reason

    def take_loss(self) -> SandboxEnd | None:
        """How the sandbox before this one ended, told once: the state in it is lost."""
        lost, self._lost = self._lost, None
        return lost

    async def bury(self, dead: ToolSandbox) -> SandboxEnd:
        """Remove a sandbox that must go; how it ended. The next call gets a fresh one."""
        async with self._changing:
            if self._live is dead:
                return await self._remove(dead)
        return await dead.close()

    async def close(self, session_id: str) -> None:
        """With the session that has it. Again: nothing happens."""
        del session_id  # it has no other
        self._closed = True
        await asyncio.gather(*(command.remove() for command in self._commands))
        with contextlib.suppress(TimeoutError):  # those that were just being started, too
            async with asyncio.timeout(self.plan.start_timeout_s):
                await asyncio.gather(*(gone.wait() for gone in self._under_way))
        async with self._changing:  # a start under way is waited for, and ended with what it started
            if self._live is not None:
                await self._remove(self._live)
            if self._earlier is not None:
                name = self._earlier.sandbox_id
                try:
                    await self._services.runtime.discard(frozenset({name}), frozenset())
                finally:
                    self._earlier = None
                    self._services.holdings.sandboxes.discard(name)
        if self.plan.way_out is not None:
            await self.plan.way_out.shut()

    async def release(self) -> None:
        """Let go of the sandbox and leave it running for the next server."""
        self._closed = True
        async with self._changing:
            if self._live is not None:
                await self._live.release()
                self._live = None

    async def _remove(self, sandbox: ToolSandbox) -> SandboxEnd:
        try:
            end = await sandbox.close()
        except RuntimeUnavailable as problem:
            _log.error("sandbox_not_removed", extra={"fields": {**self._fields(), "problem": str(problem)}})
            sandbox.end = end = SandboxEnd("runtime_lost")
        self._services.holdings.sandboxes.discard(sandbox.sandbox_id)
        self._live, self._lost = None, end
        self._why_cold = _REPLACED
        fields = {
            **self._fields(),
            "cause": end.cause,
            "exit_code": end.exit_code,
            "garbage_lines": sandbox.client.garbage_lines,
            **({"log_tail": self._tail(end)} if end.log_tail and not self._closed else {}),
        }
        _log.info("sandbox_ended", extra={"fields": fields})
        return end

    def _fields(self) -> dict[str, object]:
        return {"session_id": self.plan.session_id, "image": self.plan.image.name}

    def _tail(self, end: SandboxEnd) -> str:
        """The last words of a sandbox for the log, without what the session's environment and the image's secrets hold."""
        return without((*self.plan.env.values(), *self._hidden), end.log_tail)[-2000:]

    async def _start(self) -> ToolSandbox:
        plan, services = self.plan, self._services
        if self._generation and plan.workspace_id and not await services.runtime.has_workspace(plan.workspace_id):
            raise RuntimeUnavailable("The session's workspace is lost.")  # the reconcile ends the session
        spec = new_spec(plan)
        services.holdings.sandboxes.add(spec.sandbox_id)
        try:
            return await self._started(spec)
        except BaseException:
            services.holdings.sandboxes.discard(spec.sandbox_id)
            raise

    def _heed_tools(self, sandbox: ToolSandbox) -> None:
        """What an added image offers is looked at: it may differ from what was approved. Raises RuntimeUnavailable: it does."""
        name, seen = self.plan.image.name, self._services.tools_seen

        def later(tools: list[dict[str, Any]]) -> None:
            seen(name, tools)

        if self.plan.image.origin == "added":
            sandbox.on_tools = later
            if (reason := seen(name, sandbox.listed)) is not None:
                raise RuntimeUnavailable(reason)

    async def _started(self, spec: SandboxSpec) -> ToolSandbox:
        plan, services = self.plan, self._services
        hidden = await hidden_env(plan.image)
        if plan.image.era is not None and services.eras.hint(spec) is None:
            services.eras.tell(spec, plan.image.era)
        if plan.way_out is not None and spec.foreign:  # what stands beside it asks the door at once
            await plan.way_out.open(spec.sandbox_id)
        started = await start_sandbox(
            services.runtime,
            services.starts,
            spec,
            plan.expected_tools,
            plan.start_timeout_s,
            hidden=hidden,
            eras=services.eras,
        )
        self._hidden = tuple(hidden.values())
        try:
            self._heed_tools(started)
            if plan.way_out is not None and not spec.foreign:
                await plan.way_out.open(spec.sandbox_id)
            door = None if plan.way_out is None else plan.way_out.told
            await started.bind(plan.env, plan.limits, services.terms.first, plan.start_timeout_s, door)
            await self._record(started)
        except BaseException:
            await started.close()
            raise
        services.counted()
        return started

    async def _record(self, started: ToolSandbox) -> None:
        """Write it down before anything is sent to it. Raises RuntimeUnavailable."""
        sandbox = started.client.sandbox
        row = SandboxRow(
            sandbox_id=started.sandbox_id,
            session_id=self.plan.session_id,
            image=self.plan.image.name,
            handle=sandbox.handle,
            spec=sandbox.spec.dump(),
            protocol=started.protocol(),
            generation=self._generation + 1,
            started_at=time.time(),
            why_cold=self._why_cold,
        )
        try:
            await self._services.database.write_small(lambda connection: rows.put(connection, row))
        except StoreUnavailable as problem:
            raise RuntimeUnavailable("The server can't write down what it starts. Try again later.") from problem
        self._generation += 1
