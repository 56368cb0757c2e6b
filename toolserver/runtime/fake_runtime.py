"""Sandboxes in this process, without isolation: for tests of everything above the runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from toolserver.errors import RuntimeUnavailable, SandboxGone
from toolserver.runtime.base import (
    Inventory,
    Limits,
    Sandbox,
    SandboxEnd,
    SandboxEnded,
    SandboxRuntime,
    SandboxSpec,
    refuse_foreign,
)
from toolserver.runtime.fake_egress import FakeEgress
from toolserver.runtime.fake_pipe import FakePipe
from toolserver.runtime.fake_server import Died, FakeToolServer
from toolserver.runtime.fake_workspace import FakeWorkspace
from toolserver.settings import RuntimeSettings


class ScriptedServer(Protocol):
    """What runs in a fake sandbox. It reads stdin until b"", writes stdout, and returns or raises Died."""

    async def serve(self, stdin: FakePipe, stdout: FakePipe) -> None: ...


ServerFactory = Callable[[SandboxSpec, FakeWorkspace], ScriptedServer]


class FakeSandbox(Sandbox):
    def __init__(self, spec: SandboxSpec, server: ScriptedServer, forget: Callable[[], None]) -> None:
        self.spec, self.handle = spec, spec.sandbox_id
        self.released = False
        self.server = server
        self._stdin, self._stdout = FakePipe(), FakePipe()
        self._forget = forget
        self._killed = False
        self._task = asyncio.create_task(self._run(), name=f"fake sandbox {spec.sandbox_id}")

    async def _run(self) -> SandboxEnd:
        try:
            await self.server.serve(self._stdin, self._stdout)
            return SandboxEnd("exited", 0)
        except* Died as group:
            died = group.exceptions[0]
            while isinstance(died, BaseExceptionGroup):
                died = died.exceptions[0]
            assert isinstance(died, Died)  # noqa: S101 - narrows for the type checker
            end = SandboxEnd(died.cause, died.exit_code)
        finally:
            await self._stdin.close()
            await self._stdout.close()
        return end

    async def send(self, data: bytes) -> None:
        if not await self._stdin.write(data):
            raise SandboxGone("the fake sandbox ended")

    async def receive(self) -> bytes:
        return await self._stdout.read()

    async def kill(self) -> None:
        if not self._task.done():
            self._killed = True
            self._task.cancel()
        await asyncio.wait([self._task])
        # a task cancelled before its first step closes nothing itself
        await self._stdin.close()
        await self._stdout.close()

    async def remove(self) -> SandboxEnd:
        """A script's own mistake is raised here, so that a test fails loudly."""
        await self.kill()
        self._forget()
        return self.end()

    def end(self) -> SandboxEnd:
        """How it ended, once it has."""
        return SandboxEnd("killed", 137) if self._task.cancelled() else self._task.result()

    @property
    def running(self) -> bool:
        return not self._task.done()

    async def release(self) -> None:
        self.released = True


class FakeRuntime(SandboxRuntime):
    """Its sandboxes outlive a ToolServer that is dropped, as long as the runtime is kept.

    `unavailable`: when set, `check` and `start` raise RuntimeUnavailable with it. `start_delay_s` slows each start.
    """

    name = "fake"

    def __init__(
        self,
        server_id: str,
        state_dir: Path,
        settings: RuntimeSettings,
        *,
        server: ServerFactory = FakeToolServer,
    ) -> None:
        del server_id, state_dir, settings  # the same constructor as every driver
        self.unavailable: str | None = None
        self.start_delay_s = 0.0
        self.sandboxes: dict[str, FakeSandbox] = {}
        self.workspaces: dict[str, FakeWorkspace] = {}
        self.egress: FakeEgress | None = None  # the latest
        self._server = server

    async def open(self) -> None:
        pass

    async def check(self) -> None:
        if self.unavailable is not None:
            raise RuntimeUnavailable(self.unavailable)

    async def start(self, spec: SandboxSpec, secrets: Mapping[str, str] | None = None) -> Sandbox:
        del secrets  # for foreign ones alone
        refuse_foreign(spec, self.name)
        await self.check()
        if not spec.command:
            raise RuntimeUnavailable(f"The image {spec.image} names no command.")
        await asyncio.sleep(self.start_delay_s)
        await self.check()
        workspace = FakeWorkspace() if spec.workspace == "none" else self.workspaces.get(spec.workspace_id)
        if workspace is None:
            raise RuntimeUnavailable("The sandbox has no workspace.")
        workspace.disk_bytes = spec.limits.disk_mb << 20
        server = self._server(spec, workspace)
        sandbox = FakeSandbox(spec, server, lambda: self._forget(spec.sandbox_id))
        self.sandboxes[spec.sandbox_id] = sandbox
        return sandbox

    def _forget(self, sandbox_id: str) -> None:
        self.sandboxes.pop(sandbox_id, None)

    async def attach(self, spec: SandboxSpec, handle: str) -> Sandbox:
        del spec  # the sandbox has it
        await self.check()
        sandbox = self.sandboxes.get(handle)
        if sandbox is None:
            raise SandboxEnded(SandboxEnd("removed"))
        if not sandbox.running:
            raise SandboxEnded(sandbox.end())
        sandbox.released = False
        return sandbox

    async def start_egress(self) -> Sandbox:
        await self.check()
        self.egress = FakeEgress()
        spec = SandboxSpec("egress", "", "egress", "fake/egress", (), Limits(0, 0, 0, 0), workspace="none")
        return FakeSandbox(spec, self.egress, lambda: None)

    async def resize(self, sandbox: Sandbox, limits: Limits) -> Limits:
        if limits.disk_mb != sandbox.spec.limits.disk_mb:
            raise RuntimeUnavailable("The disk limit of a sandbox can't be changed while it runs.")
        sandbox.spec = replace(sandbox.spec, limits=limits)
        return limits

    async def create_workspace(self, workspace_id: str, disk_mb: int) -> None:
        await self.check()
        self.workspaces.setdefault(workspace_id, FakeWorkspace(disk_mb << 20))

    async def delete_workspace(self, workspace_id: str) -> None:
        self.workspaces.pop(workspace_id, None)

    async def has_workspace(self, workspace_id: str) -> bool:
        await self.check()
        return workspace_id in self.workspaces

    async def inventory(self) -> Inventory:
        await self.check()
        running = frozenset(name for name, sandbox in self.sandboxes.items() if sandbox.running)
        return Inventory(frozenset(self.sandboxes), running, frozenset(self.workspaces))

    async def discard(self, sandbox_ids: frozenset[str], workspace_ids: frozenset[str]) -> None:
        for sandbox in [self.sandboxes[name] for name in sandbox_ids if name in self.sandboxes]:
            await sandbox.remove()
        for workspace_id in workspace_ids:
            await self.delete_workspace(workspace_id)

    def effective_limits(self, asked: Limits) -> Limits:
        return asked

    def isolation(self) -> dict[str, Any]:
        nothing = "not enforced: the fake runtime isolates nothing"
        enforced = dict.fromkeys(("memory", "cpus", "pids", "seccomp", "network"), nothing)
        return {"runtime": "fake", "kernel": "shared", **enforced, "disk": "accounted by the worker"}

    async def close(self) -> None:
        for sandbox in [one for one in self.sandboxes.values() if not one.released]:
            await sandbox.remove()
