"""Sandboxes in this process, without isolation: for tests of everything above the runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from toolserver.errors import RuntimeUnavailable, SandboxGone
from toolserver.runtime.base import Limits, Sandbox, SandboxEnd, SandboxRuntime, SandboxSpec
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
        self.spec = spec
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
        if self._task.cancelled():
            return SandboxEnd("killed", 137)
        return self._task.result()


class FakeRuntime(SandboxRuntime):
    """`unavailable`: when set, `check` and `start` raise RuntimeUnavailable with it. `start_delay_s` slows each start."""

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
        self._server = server

    async def open(self) -> None:
        pass

    async def check(self) -> None:
        if self.unavailable is not None:
            raise RuntimeUnavailable(self.unavailable)

    async def start(self, spec: SandboxSpec) -> Sandbox:
        await self.check()
        if not spec.command:
            raise RuntimeUnavailable(f"The image {spec.image} names no command.")
        await asyncio.sleep(self.start_delay_s)
        await self.check()
        workspace = FakeWorkspace() if spec.workspace == "none" else self.workspaces.get(spec.session_id)
        if workspace is None:
            raise RuntimeUnavailable("The session has no workspace.")
        workspace.disk_bytes = spec.limits.disk_mb << 20
        server = self._server(spec, workspace)
        sandbox = FakeSandbox(spec, server, lambda: self._forget(spec.sandbox_id))
        self.sandboxes[spec.sandbox_id] = sandbox
        return sandbox

    def _forget(self, sandbox_id: str) -> None:
        self.sandboxes.pop(sandbox_id, None)

    async def create_workspace(self, session_id: str) -> None:
        await self.check()
        self.workspaces.setdefault(session_id, FakeWorkspace())

    async def delete_workspace(self, session_id: str) -> None:
        self.workspaces.pop(session_id, None)

    async def sweep(self, keep_sessions: frozenset[str] = frozenset()) -> int:
        sandboxes = [s for s in self.sandboxes.values() if s.spec.session_id not in keep_sessions]
        for sandbox in sandboxes:
            await sandbox.remove()
        workspaces = [name for name in self.workspaces if name not in keep_sessions]
        for name in workspaces:
            await self.delete_workspace(name)
        return len(sandboxes) + len(workspaces)

    def effective_limits(self, asked: Limits) -> Limits:
        return asked

    def isolation(self) -> dict[str, Any]:
        nothing = "not enforced: the fake runtime isolates nothing"
        enforced = dict.fromkeys(("memory", "cpus", "pids", "seccomp", "network"), nothing)
        return {"runtime": "fake", "kernel": "shared", **enforced, "disk": "accounted by the worker"}

    async def close(self) -> None:
        for sandbox in list(self.sandboxes.values()):
            await sandbox.remove()
