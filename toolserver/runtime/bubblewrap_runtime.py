"""Sandboxes as process trees in namespaces of their own, made by bubblewrap: no engine, and no root, is needed.

When the server is root, bwrap works without a user namespace and the sandbox runs as an unprivileged user of its session;
else in a user namespace, as the server's own user outside and as the sandbox user inside.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import platform
import re
import secrets
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolserver.errors import RequirementMissing, RuntimeUnavailable
from toolserver.runtime.base import (
    Inventory,
    Limits,
    Sandbox,
    SandboxEnd,
    SandboxEnded,
    SandboxRuntime,
    SandboxSpec,
    checked_id,
    refuse_foreign,
)
from toolserver.runtime.bubblewrap_arguments import (
    IMAGES_IN_SANDBOX,
    Place,
    command_line,
    egress_command_line,
    loader_cache_command,
)
from toolserver.runtime.bubblewrap_egress import EgressProcess, start_egress_process
from toolserver.runtime.bubblewrap_folders import BubblewrapFolders
from toolserver.runtime.bubblewrap_host import Program, check_command, find_program, open_files, why_not
from toolserver.runtime.bubblewrap_sandbox import BubblewrapSandbox, Processes, first_process
from toolserver.runtime.cgroups import Cgroups
from toolserver.runtime.fifo_stream import FifoStreams
from toolserver.runtime.hardening import DOORS_FOLDER, EGRESS_LIMITS, EGRESS_OPEN_FILES, SANDBOX_UID
from toolserver.runtime.host_process import HostProcess
from toolserver.runtime.log_tail import LogTail
from toolserver.runtime.loop_disk import Unusable
from toolserver.runtime.seccomp_filter import build_filter, supported
from toolserver.runtime.uninterrupted import uninterrupted
from toolserver.settings import RuntimeSettings

_log = logging.getLogger(__name__)

IMAGES = Path(__file__).resolve().parents[2] / "sandbox_images"
OUR_IMAGES = "toolcrib/"
PER_NAMESPACE_LIMITS = (5, 14)  # the kernel that counts RLIMIT_NPROC by user namespace
_PROXY = "egress-proxy"
_PROXY_COMMAND = ("python3", "-I", "-S", f"{IMAGES_IN_SANDBOX}/egress/proxy.py")
_PROXY_PACKAGES = ("python3", "-I", "-c", "import cryptography, h11; print('ready')")
_PROBE = ("python3", "-I", "-S", "-c", "import json, socket, ssl; print('ready')")


class BubblewrapRuntime(SandboxRuntime):
    name = "bubblewrap"

    def __init__(self, server_id: str, state_dir: Path, settings: RuntimeSettings) -> None:
        del server_id  # the state folder is the server's own
        self._settings = settings
        self._cgroups = Cgroups(hashlib.sha256(os.fsencode(state_dir.resolve())).hexdigest()[:12])
        self._root = os.geteuid() == 0
        self._folders = BubblewrapFolders(state_dir, root=self._root, sandbox_uid=SANDBOX_UID)
        self._program: Program | None = None
        self._works = False
        self._preparing = asyncio.Lock()
        self._sandboxes: dict[str, BubblewrapSandbox] = {}
        self._egress: EgressProcess | None = None
        self._children: dict[str, subprocess.Popen[bytes]] = {}  # monitors of sandboxes that this process started
        self._probe_name = f"probe-{os.getpid()}-{secrets.token_hex(4)}"

    async def open(self) -> None:
        try:
            await self.check()
        except RequirementMissing:
            raise
        except RuntimeUnavailable:
            pass

    async def check(self) -> None:
        async with self._preparing:
            if self._works:
                return
            if self._program is None:
                self._program = await asyncio.to_thread(self._prepare)
            await self._probe(self._program)
            self._works = True

    def _prepare(self) -> Program:
        """Blocking. Raises RuntimeUnavailable."""
        try:
            program = find_program(self._settings.python, root=self._root)
            self._folders.prepare()
            self._folders.fixed_size = self._disk_is_fixed()
        except (OSError, subprocess.SubprocessError) as problem:
            raise RuntimeUnavailable(f"bubblewrap can't be prepared here: {type(problem).__name__}.") from problem
        for network in (False, True):
            etc = self._folders.etc(network=network)
            command = loader_cache_command(program.path, program.interpreter, etc, root=self._root)
            if command is not None:
                _run_quietly(command)
        return program

    def _disk_is_fixed(self) -> bool:
        wanted = self._settings.disk
        if wanted == "quota":
            raise RequirementMissing(
                "The bubblewrap runtime has no disk quotas: set TOOLSERVER_RUNTIME__DISK to loop or auto."
            )
        if wanted == "accounted":
            return False
        try:
            self._folders.disks.check()
        except Unusable as why:
            if wanted == "loop":
                raise RequirementMissing(f"TOOLSERVER_RUNTIME__DISK is loop, but {why}.") from why
            return False
        return True

    async def _probe(self, program: Program) -> None:
        """Start one for real: kernels and distributions forbid namespaces in ways that only trying tells. Raises RuntimeUnavailable."""
        said, log = await self._said_by(program, _PROBE)
        if said.strip() != b"ready":
            raise RuntimeUnavailable(why_not(log, root=self._root))

    async def _says_ready(self, program: Program, command: tuple[str, ...]) -> bool:
        return (await self._said_by(program, command))[0].strip() == b"ready"

    async def _said_by(self, program: Program, command: tuple[str, ...]) -> tuple[bytes, str]:
        """The first word of a sandbox of its own, and its log."""
        name = self._probe_name
        spec = SandboxSpec(name, name, "probe", OUR_IMAGES + "probe", command, Limits(256, 1, 64, 64))
        await self._create_workspace(name, spec.limits.disk_mb)
        try:
            sandbox = await self._start(spec, program)
            try:
                async with asyncio.timeout(self._settings.start_timeout_s):
                    said = await sandbox.receive()
            except TimeoutError:
                said = b""
            finally:
                end = await sandbox.remove()
            return said, end.log_tail
        finally:
            await self.delete_workspace(name)

    # -- sandboxes

    async def start(self, spec: SandboxSpec, secrets: Mapping[str, str] | None = None) -> Sandbox:
        del secrets  # for foreign ones alone
        refuse_foreign(spec, self.name)
        await self.check()
        assert self._program is not None  # noqa: S101 - check made it
        return await uninterrupted(self._start(spec, self._program), undo=lambda sandbox: sandbox.remove())

    async def attach(self, spec: SandboxSpec, handle: str) -> Sandbox:
        processes = Processes.load(handle)
        if processes is None or not processes.run:
            oom = self._cgroups.problem is None and self._cgroups.oom_kills(spec.sandbox_id) > 0
            raise SandboxEnded(SandboxEnd("oom" if oom else "unknown"))
        try:
            streams = FifoStreams(self._folders.sandbox(checked_id(spec.sandbox_id)))
        except OSError as gone:
            raise SandboxEnded(SandboxEnd("unknown")) from gone
        return self._hold(spec, processes, streams, None)

    async def lacks(self, image: str, reference: str, host_programs: tuple[str, ...]) -> str | None:
        del reference
        missing = [program for program in host_programs if not os.access(program, os.X_OK)]
        if not missing:
            return None
        packages = " ".join(Path(program).name for program in missing)
        return (
            f"The image {image} needs {', '.join(missing)} on the server's machine. The operator can install it, on Debian: "
            f"apt-get install {packages}"
        )

    async def resize(self, sandbox: Sandbox, limits: Limits) -> Limits:
        del sandbox, limits
        raise RuntimeUnavailable("bubblewrap sets limits at the start of a sandbox alone.")

    async def start_egress(self) -> Sandbox:
        await self.check()
        assert self._program is not None  # noqa: S101 - check made it
        if self._egress is not None:
            await self._egress.remove()
        made = await uninterrupted(self._start_egress(self._program), undo=lambda process: process.remove())
        self._egress = made
        return made

    async def _start_egress(self, program: Program) -> EgressProcess:
        spec = SandboxSpec(_PROXY, _PROXY, "egress", OUR_IMAGES + "egress", _PROXY_COMMAND, EGRESS_LIMITS, "none")
        place = Place(
            bwrap=program.path,
            version=program.version,
            images=IMAGES,
            interpreter=program.interpreter,
            etc=self._folders.etc(network=True),
            users=self._folders.proxy_users,
            workspace=None,
            uid=self._folders.proxy_uid,
            open_files=open_files(EGRESS_OPEN_FILES),
            doors=self._folders.doors,
        )
        grouped = self._cgroups.problem is None
        if grouped:
            try:
                self._cgroups.create(_PROXY, spec.limits)
            except OSError as problem:
                raise RuntimeUnavailable("The egress proxy's control group could not be made.") from problem
        seccomp = _in_memory(build_filter(platform.machine())) if supported(platform.machine()) else None
        try:
            return await start_egress_process(
                spec,
                place.bwrap,
                lambda info, held: egress_command_line(spec, place, seccomp_fd=seccomp, info_fd=info, block_fd=held),
                inherited=() if seccomp is None else (seccomp,),
                join=lambda pid: self._cgroups.join(_PROXY, pid) if grouped else None,
                ended=lambda: self._cgroups.remove(_PROXY),
                timeout_s=self._settings.start_timeout_s,
            )
        finally:
            if seccomp is not None:
                os.close(seccomp)

    async def egress_problem(self) -> str | None:
        await self.check()
        assert self._program is not None  # noqa: S101 - check made it
        if await self._says_ready(self._program, _PROXY_PACKAGES):
            return None
        return "The Python of the sandboxes lacks its packages: pip install 'toolcrib[sandbox]'"

    def door_folder(self, sandbox_id: str) -> str | None:
        return f"{DOORS_FOLDER}/{checked_id(sandbox_id)}"

    async def _start(self, spec: SandboxSpec, program: Program) -> BubblewrapSandbox:
        place = await asyncio.to_thread(self._place, spec, program)
        try:
            theirs = await asyncio.to_thread(self._folders.create_sandbox, spec.sandbox_id, doors=spec.egress)
        except OSError as problem:
            await asyncio.to_thread(self._forget, spec.sandbox_id)
            raise RuntimeUnavailable("The pipes of a sandbox could not be made.") from problem
        seccomp = _in_memory(build_filter(platform.machine())) if supported(platform.machine()) else None
        told, info = os.pipe()
        held, go = os.pipe()
        inherited = [info, held] if seccomp is None else [info, held, seccomp]
        try:
            streams = FifoStreams(self._folders.sandbox(spec.sandbox_id))
            child = await asyncio.to_thread(
                subprocess.Popen,
                # named so that it is found again when the server dies before it noted the process
                [
                    f"{spec.sandbox_id}/bwrap",
                    *command_line(spec, place, seccomp_fd=seccomp, info_fd=info, block_fd=held)[1:],
                ],
                executable=place.bwrap,
                stdin=theirs[0],
                stdout=theirs[1],
                stderr=theirs[2],
                pass_fds=inherited,
                start_new_session=True,  # a Ctrl-C in the server's terminal is not for sandboxes
                env={"PATH": os.environ.get("PATH", "/usr/bin:/bin")},
                cwd="/",
            )
        except OSError as problem:
            os.close(told)
            os.close(go)
            await asyncio.to_thread(self._forget, spec.sandbox_id)
            raise RuntimeUnavailable("bubblewrap could not be run.") from problem
        finally:
            for descriptor in (*inherited, *theirs):
                os.close(descriptor)
        try:
            return await self._take(spec, child, streams, told)
        finally:
            os.close(go)  # the command begins

    async def _take(
        self, spec: SandboxSpec, child: subprocess.Popen[bytes], streams: FifoStreams, told: int
    ) -> BubblewrapSandbox:
        try:
            pid = await first_process(told, self._settings.start_timeout_s)
            first, monitor = HostProcess.running(pid), HostProcess.running(child.pid)
            if first is None or monitor is None:
                raise RuntimeUnavailable("A sandbox ended before it began.")
            processes = Processes(first, monitor)
            # noted before anything else: nothing but the next server, or its lease, ends a sandbox whose server was killed
            self._folders.remember(spec.sandbox_id, processes)
            if self._cgroups.problem is None:
                self._cgroups.join(spec.sandbox_id, pid)
        except (RuntimeUnavailable, OSError) as problem:
            child.kill()
            await asyncio.to_thread(child.wait)
            with contextlib.suppress(RuntimeUnavailable):  # a reconcile takes it later
                await asyncio.to_thread(self._folders.end, spec.sandbox_id)
            said = LogTail()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    while data := await streams.receive_log():
                        said.feed(data)
            streams.close()
            await asyncio.to_thread(self._forget, spec.sandbox_id)
            raise RuntimeUnavailable(why_not(said.text(), root=self._root)) from problem
        return self._hold(spec, processes, streams, child)

    def _hold(
        self, spec: SandboxSpec, processes: Processes, streams: FifoStreams, child: subprocess.Popen[bytes] | None
    ) -> BubblewrapSandbox:
        name = spec.sandbox_id
        if child is not None:
            self._children[name] = child
        sandbox = self._sandboxes[name] = BubblewrapSandbox(
            spec,
            processes,
            streams,
            child=self._children.get(name),
            forget=lambda: self._forget(name),
            released=lambda: self._release(name, sandbox),
            oom_kills=lambda: self._cgroups.oom_kills(name) if self._cgroups.problem is None else 0,
        )
        return sandbox

    def _release(self, sandbox_id: str, sandbox: BubblewrapSandbox) -> None:
        if self._sandboxes.get(sandbox_id) is sandbox:
            del self._sandboxes[sandbox_id]

    def _forget(self, sandbox_id: str) -> None:
        self._sandboxes.pop(sandbox_id, None)
        self._children.pop(sandbox_id, None)
        self._folders.forget(sandbox_id)
        self._cgroups.remove(sandbox_id)

    def _place(self, spec: SandboxSpec, program: Program) -> Place:
        """Blocking. Raises RuntimeUnavailable for what can't be run here."""
        if not spec.reference.startswith(OUR_IMAGES):
            raise RuntimeUnavailable(
                f"The image {spec.reference} needs Docker: bubblewrap runs only the images of Toolcrib."
            )
        folder = self._folders.workspace(checked_id(spec.workspace_id))
        try:
            uid = self._folders.uid(spec.workspace_id)
            self._folders.mount(spec.workspace_id)
        except FileNotFoundError as missing:
            raise RuntimeUnavailable("The sandbox has no workspace.") from missing
        except OSError as problem:
            raise RuntimeUnavailable("The workspace can't be mounted.") from problem
        checked_id(spec.sandbox_id)
        place = Place(
            bwrap=program.path,
            version=program.version,
            images=IMAGES,
            interpreter=program.interpreter,
            etc=self._folders.etc(network=False),
            users=folder / "users",
            workspace=None if spec.workspace == "none" else folder / "workspace",
            uid=uid,
            open_files=open_files(),
            doors=self._folders.doors / spec.sandbox_id if spec.egress else None,
        )
        check_command(spec, program.interpreter)
        return place if self._cgroups.problem is not None else self._with_cgroup(spec, place)

    def _with_cgroup(self, spec: SandboxSpec, place: Place) -> Place:
        try:
            self._cgroups.create(spec.sandbox_id, spec.limits)
        except OSError as problem:
            raise RuntimeUnavailable("The sandbox's control group could not be made.") from problem
        return replace(place, counters=self._cgroups.counters(spec.sandbox_id))

    # -- workspaces

    async def create_workspace(self, workspace_id: str, disk_mb: int) -> None:
        await self.check()  # only then it is known how a workspace is held to its size
        await self._create_workspace(workspace_id, disk_mb)

    async def _create_workspace(self, workspace_id: str, disk_mb: int) -> None:
        try:
            await asyncio.to_thread(self._folders.create, checked_id(workspace_id), disk_mb)
        except (OSError, subprocess.SubprocessError) as problem:
            raise RuntimeUnavailable(
                "A workspace could not be made. Look at the space and rights of the state folder."
            ) from problem

    async def delete_workspace(self, workspace_id: str) -> None:
        await asyncio.to_thread(self._folders.delete, checked_id(workspace_id))

    async def has_workspace(self, workspace_id: str) -> bool:
        return await asyncio.to_thread((self._folders.workspace(checked_id(workspace_id)) / "workspace").is_dir)

    async def inventory(self) -> Inventory:
        found, running = await asyncio.to_thread(self._folders.sandbox_ids)
        workspaces = await asyncio.to_thread(self._folders.workspace_ids)
        groups = await asyncio.to_thread(self._cgroups.sandbox_ids)
        probe = {self._probe_name, _PROXY}  # nobody's, and not left behind: they may be under way
        return Inventory(
            frozenset(found.union(groups) - probe), frozenset(running - probe), frozenset(workspaces).difference(probe)
        )

    async def discard(self, sandbox_ids: frozenset[str], workspace_ids: frozenset[str]) -> None:
        problem: RuntimeUnavailable | None = None  # of one; the others go all the same
        for work, names in ((self._discard_sandbox, sandbox_ids), (self.delete_workspace, workspace_ids)):
            for name in names:
                try:
                    await work(name)
                except RuntimeUnavailable as stays:
                    problem = stays
        if problem is not None:
            raise problem

    async def _discard_sandbox(self, sandbox_id: str) -> None:
        if (sandbox := self._sandboxes.get(sandbox_id)) is not None:
            await sandbox.remove()
        await asyncio.to_thread(self._folders.end, sandbox_id)
        if (child := self._children.pop(sandbox_id, None)) is not None:
            await asyncio.to_thread(child.wait)
        await asyncio.to_thread(self._cgroups.remove, checked_id(sandbox_id))

    # -- what holds

    def effective_limits(self, asked: Limits) -> Limits:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
        cores = float(len(os.sched_getaffinity(0)))
        return Limits(min(asked.memory_mb, memory), min(asked.cpus, cores), asked.pids, asked.disk_mb)

    def isolation(self) -> dict[str, Any]:
        why = self._cgroups.problem
        counted = why is None or self._counts_processes()
        return {
            "runtime": "bubblewrap",
            "kernel": "shared"
            if self._settings.isolation == "runc"
            else "shared, though gVisor is preferred: only the docker runtime has it",
            "memory": "enforced"
            if why is None
            else f"not enforced: of each process alone, not of all together, as {why}",
            "cpus": "enforced" if why is None else f"not enforced: {why}",
            "pids": "enforced" if counted else "not enforced: this kernel counts a user's processes together",
            "disk": "enforced" if self._folders.fixed_size else "accounted by the worker",
            "seccomp": "enforced" if supported(platform.machine()) else "not enforced: no filter for this processor",
            "network": "none",
        }

    def weaker(self) -> str:
        """One sentence for people: what this runtime does less well than docker."""
        return "Images that were added need Docker: bubblewrap runs only those of Toolcrib."

    def added_problem(self) -> str | None:
        return f"{self.weaker()} Start a Docker engine, and build what it needs: toolserver images build"

    def _counts_processes(self) -> bool:
        release = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])
        return self._root or release >= PER_NAMESPACE_LIMITS

    async def close(self) -> None:
        for sandbox in list(self._sandboxes.values()):
            await sandbox.remove()
        if self._egress is not None:
            await self._egress.remove()
        for child in self._children.values():  # of sandboxes that are left to run: nobody needs to be warned of them
            child.returncode = child.poll() or 0
        await asyncio.to_thread(self._cgroups.close)


def _in_memory(content: bytes) -> int:
    descriptor = os.memfd_create("toolcrib")
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _run_quietly(command: list[str]) -> None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run(command, capture_output=True, timeout=30, check=False)
