"""The egress proxy as a process of this host: in namespaces of its own but for the network, and gone with the server."""

from __future__ import annotations

import asyncio
import contextlib
import os
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable

from toolserver.errors import RuntimeUnavailable, SandboxGone
from toolserver.runtime.base import Sandbox, SandboxEnd, SandboxSpec
from toolserver.runtime.bubblewrap_sandbox import first_process
from toolserver.runtime.host_process import HostProcess
from toolserver.runtime.log_tail import LogTail

_CHUNK = 1 << 18


class EgressProcess(Sandbox):
    """`first`, its first process, is set as soon as it is known. `ended` is called once nothing of it runs any more."""

    first: HostProcess | None = None

    def __init__(self, spec: SandboxSpec, process: Process, ended: Callable[[], None]) -> None:
        self.spec, self.handle = spec, str(process.pid)
        self._process, self._ended = process, ended
        self._log = LogTail()
        self._end: SandboxEnd | None = None
        self._removing = asyncio.Lock()
        self._logging = asyncio.create_task(self._keep_log(), name="log of the egress proxy")

    async def _keep_log(self) -> None:
        assert self._process.stderr is not None  # noqa: S101 - a pipe was asked for
        while data := await self._process.stderr.read(_CHUNK):
            self._log.feed(data)

    async def send(self, data: bytes) -> None:
        assert self._process.stdin is not None  # noqa: S101
        try:
            self._process.stdin.write(data)
            await self._process.stdin.drain()
        except (ConnectionError, RuntimeError) as broken:
            raise SandboxGone("The egress proxy's stream broke.") from broken

    async def receive(self) -> bytes:
        assert self._process.stdout is not None  # noqa: S101
        return await self._process.stdout.read(_CHUNK)

    async def kill(self) -> None:
        if self.first is not None:
            self.first.kill()  # its end is the end of all in it, and of bwrap
        else:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await self._process.wait()

    async def remove(self) -> SandboxEnd:
        async with self._removing:
            if self._end is None:
                running = self._process.returncode is None
                await self.kill()
                await self._let_go()
                code = self._process.returncode
                self._end = SandboxEnd("killed" if running else "exited", code, self._log.text())
                await asyncio.to_thread(self._ended)
            return self._end

    async def release(self) -> None:
        """It does not outlive its server."""
        await self.remove()

    async def _let_go(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await self._logging


async def start_egress_process(
    spec: SandboxSpec,
    program: str,
    command: Callable[[int, int], list[str]],
    *,
    inherited: tuple[int, ...],
    join: Callable[[int], None],
    ended: Callable[[], None],
    timeout_s: float,
) -> EgressProcess:
    """`command` makes the arguments from the descriptors for bwrap's word and for ours to go on; `join` puts the first process
    in its control group, before it begins. Raises RuntimeUnavailable: then nothing is left of it.
    """
    told, info = os.pipe()
    held, go = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *command(info, held),
            executable=program,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            pass_fds=(info, held, *inherited),
            start_new_session=True,
            env={"PATH": os.environ.get("PATH", "/usr/bin:/bin")},
            cwd="/",
            limit=_CHUNK,
        )
    except OSError as problem:
        for descriptor in (told, go):
            os.close(descriptor)
        raise RuntimeUnavailable("The egress proxy could not be run by bubblewrap.") from problem
    finally:
        for descriptor in (info, held):
            os.close(descriptor)
    made = EgressProcess(spec, process, ended)
    try:
        pid = await first_process(told, timeout_s)
        made.first = HostProcess.running(pid)
        join(pid)
    except (RuntimeUnavailable, OSError) as problem:
        await made.remove()
        raise RuntimeUnavailable("The egress proxy could not be started by bubblewrap.") from problem
    except BaseException:
        await made.remove()
        raise
    finally:
        os.close(go)
    return made
