"""One sandbox under bubblewrap: its pipes, its first process, how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable
from typing import Literal

from toolserver.errors import RuntimeUnavailable, SandboxGone
from toolserver.runtime.base import Sandbox, SandboxEnd, SandboxSpec
from toolserver.runtime.log_tail import LogTail
from toolserver.runtime.uninterrupted import uninterrupted

CHUNK = 1 << 18
GONE_S = 10.0  # for the kernel to end a process namespace


class BubblewrapSandbox(Sandbox):
    """`monitor` is bwrap itself; the sandbox's first process, whose end is the end of all in it, is held by a pidfd (None: it ended already)."""

    def __init__(
        self,
        spec: SandboxSpec,
        monitor: asyncio.subprocess.Process,
        first: int | None,
        forget: Callable[[], None],
        oom_kills: Callable[[], int],
    ) -> None:
        """`forget` is told when nothing of it runs any more, `oom_kills` how many of its processes memory has cost."""
        self.spec, self.handle = spec, spec.sandbox_id
        self._oom_kills = oom_kills
        self._monitor, self._first = monitor, first
        self._forget = forget
        self._killed = False
        self._end: SandboxEnd | None = None
        self._removing, self._writing = asyncio.Lock(), asyncio.Lock()
        self._log = LogTail()
        self._logging = asyncio.create_task(self._keep_log(), name=f"log of sandbox {spec.sandbox_id}")
        self._watched: int | None = None
        self._watch()

    def _watch(self) -> None:
        """End the sandbox with its monitor. The kernel does not: a namespace's first process can outlive --die-with-parent."""
        try:
            self._watched = os.pidfd_open(self._monitor.pid)
        except ProcessLookupError:
            self._monitor_ended()
        else:
            asyncio.get_running_loop().add_reader(self._watched, self._monitor_ended)

    def _monitor_ended(self) -> None:
        self._unwatch()
        self._end_first()

    def _end_first(self) -> bool:
        """Whether there was something to end."""
        if self._first is None:
            return False
        try:
            signal.pidfd_send_signal(self._first, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def _unwatch(self) -> None:
        if self._watched is not None:
            asyncio.get_running_loop().remove_reader(self._watched)
            os.close(self._watched)
            self._watched = None

    async def _keep_log(self) -> None:
        assert self._monitor.stderr is not None  # noqa: S101 - started with a pipe
        while data := await self._monitor.stderr.read(CHUNK):
            self._log.feed(data)

    async def send(self, data: bytes) -> None:
        stdin = self._monitor.stdin
        assert stdin is not None  # noqa: S101 - started with a pipe
        async with self._writing:
            try:
                await stdin.drain()  # what others sent
                if stdin.is_closing() or self._monitor.returncode is not None:
                    raise SandboxGone("The sandbox's stream is closed.")
                stdin.write(data)
                await stdin.drain()
            except (OSError, RuntimeError) as broken:
                raise SandboxGone("The sandbox's stream broke.") from broken

    async def receive(self) -> bytes:
        if self._end is not None:
            return b""
        assert self._monitor.stdout is not None  # noqa: S101 - started with a pipe
        return await self._monitor.stdout.read(CHUNK)

    async def kill(self) -> None:
        if self._end is not None:
            return
        if self._monitor.returncode is None:
            self._killed = self._end_first() or self._killed
        if not await self._exited(GONE_S):
            raise RuntimeUnavailable("A sandbox did not end when it was killed.")

    async def _exited(self, within_s: float) -> bool:
        deadline = asyncio.get_running_loop().time() + within_s
        # not wait(): with some event loops that waits for the pipes too, which nobody may be reading
        while self._monitor.returncode is None and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        return self._monitor.returncode is not None

    async def remove(self) -> SandboxEnd:
        async with self._removing:
            if self._end is None:
                self._end = await uninterrupted(self._remove())
            return self._end

    async def release(self) -> None:
        await self.remove()

    async def _remove(self) -> SandboxEnd:
        if not self._killed and self._stdout_ended():
            # about to exit, most often; its own exit code is the truth then
            await self._exited(0.5)
        with contextlib.suppress(RuntimeUnavailable):  # what will not go is noted, and swept later
            await self.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await asyncio.shield(self._logging)
        self._logging.cancel()
        _close_pipes(self._monitor)
        self._unwatch()
        if self._first is not None:
            os.close(self._first)
        end = self._how(self._monitor.returncode)
        if self._monitor.returncode is not None:
            await asyncio.to_thread(self._forget)
        return end

    def _stdout_ended(self) -> bool:
        return self._monitor.stdout is not None and self._monitor.stdout.at_eof()

    def _how(self, code: int | None) -> SandboxEnd:
        cause: Literal["killed", "unknown", "exited", "oom"] = "exited"
        if self._killed:
            cause = "killed"
        elif code is None or code < 0 or code == 128 + signal.SIGKILL:
            cause = (
                "oom" if self._oom_kills() else "unknown"
            )  # bwrap was ended itself, or it tells of a SIGKILL, or the program exits like one
        return SandboxEnd(cause, code, self._log.text())


def _close_pipes(process: asyncio.subprocess.Process) -> None:
    # asyncio has no public way to let go of the pipes of a process that has ended
    transport = process._transport  # type: ignore[attr-defined]  # noqa: SLF001
    transport.close()


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
