"""One sandbox as a container of a Docker engine, and the removal of containers, also of those that the engine did not remove at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from toolserver.errors import RuntimeUnavailable
from toolserver.runtime.base import CommandSandbox, Sandbox, SandboxEnd, SandboxSpec
from toolserver.runtime.docker_engine import DockerEngine, NotInEngine, Refused
from toolserver.runtime.docker_stream import AttachedStream
from toolserver.runtime.uninterrupted import uninterrupted

_EXIT_S = 2  # for a container that closed its streams to exit by itself
_LATE_OOM_S, _LATE_OOM_LOOKS = 0.1, 5  # how long the news of a want of memory may come after the end


class Containers:
    def __init__(self, engine: DockerEngine) -> None:
        self.engine = engine
        self._left_over: set[str] = set()  # that could not be removed when the engine was away

    async def remove(self, name: str) -> None:
        """Its volumes stay but for those without a name. No error when it is gone. Raises RuntimeUnavailable, Refused."""
        with contextlib.suppress(NotInEngine):
            await self.engine.call(lambda client: client.remove_container(name, v=True, force=True))

    def remember(self, name: str) -> None:
        """It is removed later."""
        self._left_over.add(name)

    async def remove_or_remember(self, name: str) -> None:
        try:
            await self.remove(name)
        except (RuntimeUnavailable, Refused):
            self.remember(name)

    async def remove_left_over(self) -> None:
        for name in list(self._left_over):
            self._left_over.discard(name)
            await self.remove_or_remember(name)


class DockerSandbox(Sandbox):
    """One container, attached. `forget` is called with it when it is removed, or released to the next server.

    `beside`: another one, by name or id, that goes with it.
    """

    def __init__(
        self,
        spec: SandboxSpec,
        containers: Containers,
        container: str,
        stream: AttachedStream,
        forget: Callable[[Sandbox], None],
        *,
        beside: str | None = None,
    ) -> None:
        self.spec, self.handle = spec, container
        self._containers, self._container, self._stream, self._forget = containers, container, stream, forget
        self._beside = beside
        self._killed = False
        self._end: SandboxEnd | None = None
        self._removing = asyncio.Lock()

    async def send(self, data: bytes) -> None:
        await self._stream.send(data)

    async def receive(self) -> bytes:
        return await self._stream.receive()

    async def kill(self) -> None:
        if self._end is not None:
            return
        draining = asyncio.create_task(self._stream.drain())
        try:
            await self._containers.engine.call(lambda client: client.kill(self._container, "SIGKILL"))
            self._killed = True
        except NotInEngine:
            pass
        except Refused as no:
            if no.status != 409:  # 409: it does not run
                raise RuntimeUnavailable("The Docker engine would not end a sandbox.") from no
        finally:
            draining.cancel()
            await asyncio.wait([draining])

    async def remove(self) -> SandboxEnd:
        async with self._removing:
            if self._end is None:
                try:
                    self._end = await uninterrupted(self._remove_both())
                    self._forget(self)
                finally:
                    await self._stream.close()
            return self._end

    async def release(self) -> None:
        self._forget(self)
        await self._stream.close()

    async def _remove_both(self) -> SandboxEnd:
        end = await self._remove()
        if self._beside is not None:  # after the one that uses its network
            await self._containers.remove_or_remember(self._beside)
        return end

    async def _remove(self) -> SandboxEnd:
        log = self._stream.log
        try:
            if self._stream.open and not self._killed:
                await self._remove_running()  # its end would have been seen there
                return SandboxEnd("killed", None, log.text())
            state = await self._state()
            if state.get("Running") and self._stream.finished and not self._killed:
                # the stream is seen to end a moment before the engine notes the exit code
                with contextlib.suppress(RuntimeUnavailable, Refused):
                    await self._containers.engine.call(lambda client: client.wait(self._container, timeout=_EXIT_S))
                state = await self._state()
            if state.get("Running"):
                await self._remove_running()
                return SandboxEnd("killed", None, log.text())
            for _ in range(_LATE_OOM_LOOKS):
                if self._killed or not may_be_oom(state):
                    break
                await asyncio.sleep(_LATE_OOM_S)
                state = await self._state()
            await self._containers.remove(self._container)
        except NotInEngine:
            return SandboxEnd("removed", None, log.text())
        except (RuntimeUnavailable, Refused):
            self._containers.remember(self._container)
            return SandboxEnd("runtime_lost", None, log.text())
        return end_of(state, killed=self._killed, log=log.text())

    async def _remove_running(self) -> None:
        """Kill and remove in one step: of one that ends so, there is no more to be learnt."""
        draining = asyncio.create_task(self._stream.drain())
        try:
            await self._containers.remove(self._container)
        finally:
            draining.cancel()
            await asyncio.wait([draining])

    async def _state(self) -> dict[str, Any]:
        found = await self._containers.engine.call(lambda client: client.inspect_container(self._container))
        state: dict[str, Any] = found["State"]
        return state


class DockerCommand(DockerSandbox, CommandSandbox):
    """One command in a container of its own."""

    async def end_input(self) -> None:
        await self._stream.end_input()

    async def receive_both(self) -> tuple[bytes, bool]:
        return await self._stream.receive_both()


def may_be_oom(state: dict[str, Any]) -> bool:
    """Whether it died as by the want of memory, and the engine has not said so: it may hear of that after the end."""
    return state.get("ExitCode") == 137 and not state.get("OOMKilled")


def end_of(state: dict[str, Any], *, killed: bool, log: str) -> SandboxEnd:
    """Out of what the engine tells of a container that has ended."""
    code = state.get("ExitCode")
    if killed:
        return SandboxEnd("killed", code, log)
    if state.get("OOMKilled"):
        return SandboxEnd("oom", code, log)
    # 137 is what a SIGKILL from outside leaves, and what a program may exit with: not told apart by the engine
    return SandboxEnd("unknown" if code == 137 else "exited", code, log)
