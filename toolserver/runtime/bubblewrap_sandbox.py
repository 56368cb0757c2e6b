"""One sandbox under bubblewrap: its named pipes, its first process, how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from toolserver.errors import RuntimeUnavailable
from toolserver.runtime.base import Sandbox, SandboxEnd, SandboxSpec
from toolserver.runtime.fifo_stream import FifoStreams
from toolserver.runtime.host_process import HostProcess
from toolserver.runtime.log_tail import LogTail
from toolserver.runtime.uninterrupted import uninterrupted

GONE_S = 10.0  # for the kernel to end a process namespace
_LOOK_EVERY_S = 0.002


@dataclass(frozen=True)
class Processes:
    """`monitor` is bwrap itself; the end of `first`, the sandbox's first process, is the end of all in it."""

    first: HostProcess
    monitor: HostProcess

    def dump(self) -> str:
        return f"{self.first.dump()}{self.monitor.dump()}"

    @classmethod
    def load(cls, text: str) -> Processes | None:
        lines = text.splitlines()
        found = [HostProcess.load(line) for line in lines[:2]]
        if len(found) != 2 or found[0] is None or found[1] is None:
            return None
        return cls(found[0], found[1])

    @property
    def run(self) -> bool:
        """Whether it is a whole sandbox. A first process without its monitor is not."""
        return self.first.is_running() and self.monitor.is_running()

    @property
    def gone(self) -> bool:
        return not self.first.is_running() and not self.monitor.is_running()


class BubblewrapSandbox(Sandbox):
    def __init__(
        self,
        spec: SandboxSpec,
        processes: Processes,
        streams: FifoStreams,
        *,
        child: subprocess.Popen[bytes] | None,
        forget: Callable[[], None],
        released: Callable[[], None],
        oom_kills: Callable[[], int],
    ) -> None:
        """`child` is the monitor where this process started it: only then its exit code can be known.

        `forget` is told when nothing of it runs any more, `oom_kills` how many of its processes memory has cost.
        """
        self.spec, self.handle = spec, processes.dump()
        self._processes, self._streams, self._child = processes, streams, child
        self._forget, self._released, self._oom_kills = forget, released, oom_kills
        self._killed = False
        self._end: SandboxEnd | None = None
        self._removing = asyncio.Lock()
        self._log = LogTail()
        self._logging = asyncio.create_task(self._keep_log(), name=f"log of sandbox {spec.sandbox_id}")
        self._watched: int | None = None
        self._watch()

    def _watch(self) -> None:
        """End the sandbox with its monitor. The kernel does not."""
        self._watched = self._processes.monitor.hold()
        if self._watched is None:
            self._monitor_ended()
        else:
            asyncio.get_running_loop().add_reader(self._watched, self._monitor_ended)

    def _monitor_ended(self) -> None:
        self._unwatch()
        self._processes.first.kill()
        self._reap()

    def _unwatch(self) -> None:
        if self._watched is not None:
            asyncio.get_running_loop().remove_reader(self._watched)
            os.close(self._watched)
            self._watched = None

    def _reap(self) -> int | None:
        """The monitor's exit code, where it is known."""
        return None if self._child is None else self._child.poll()

    async def _keep_log(self) -> None:
        while data := await self._streams.receive_log():
            self._log.feed(data)

    async def send(self, data: bytes) -> None:
        await self._streams.send(data)

    async def receive(self) -> bytes:
        return await self._streams.receive()

    async def kill(self) -> None:
        if self._end is not None:
            return
        self._killed = self._processes.first.kill() or self._killed
        if not await self._exited(GONE_S):
            raise RuntimeUnavailable("A sandbox did not end when it was killed.")

    async def _exited(self, within_s: float) -> bool:
        deadline = asyncio.get_running_loop().time() + within_s
        while not self._processes.gone and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110 - no event tells of both
            await asyncio.sleep(_LOOK_EVERY_S)
        return self._processes.gone

    async def release(self) -> None:
        self._let_go()
        self._released()

    def _let_go(self) -> None:
        self._logging.cancel()
        self._streams.close()
        self._unwatch()

    async def remove(self) -> SandboxEnd:
        async with self._removing:
            if self._end is None:
                self._end = await uninterrupted(self._remove())
            return self._end

    async def _remove(self) -> SandboxEnd:
        if not self._killed and self._streams.ended:
            # about to exit, most often; its own exit code is the truth then
            await self._exited(0.5)
        with contextlib.suppress(RuntimeUnavailable):  # what will not go is noted, and a reconcile takes it
            await self.kill()
        with contextlib.suppress(TimeoutError, asyncio.CancelledError):
            async with asyncio.timeout(1):
                await asyncio.shield(self._logging)
        self._let_go()
        end = self._how(self._reap())
        if self._processes.gone:
            await asyncio.to_thread(self._forget)
        return end

    def _how(self, code: int | None) -> SandboxEnd:
        cause: Literal["killed", "unknown", "exited", "oom"] = "exited"
        if self._killed:
            cause = "killed"
        elif code is None or code < 0 or code == 128 + signal.SIGKILL:
            # bwrap was ended itself, or it tells of a SIGKILL, or the program exits like one
            cause = "oom" if self._oom_kills() else "unknown"
        return SandboxEnd(cause, code, self._log.text())


async def first_process(descriptor: int, timeout_s: float) -> int:
    """The host's id of a sandbox's first process, from bwrap's info descriptor, which is closed. Raises RuntimeUnavailable."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    pipe = os.fdopen(descriptor, "rb")
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        async with asyncio.timeout(timeout_s):
            told = await reader.read()
        return int(json.loads(told)["child-pid"])
    except (TimeoutError, ValueError, KeyError) as nothing:
        raise RuntimeUnavailable("bubblewrap did not start a sandbox.") from nothing
    finally:
        transport.close()
