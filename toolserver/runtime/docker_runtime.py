"""Sandboxes as containers of a Docker engine. Knows the engine by its socket alone, never a path of its host.

So it works the same when the ToolServer is itself a container with that socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import docker

from toolserver.errors import RequirementMissing, RuntimeUnavailable
from toolserver.runtime.base import Inventory, Limits, Sandbox, SandboxEnd, SandboxEnded, SandboxRuntime, SandboxSpec
from toolserver.runtime.docker_disk import WorkspaceVolumes
from toolserver.runtime.docker_engine import NOT_ANSWERING, DockerEngine, NotInEngine, Refused
from toolserver.runtime.docker_stream import AttachedStream
from toolserver.runtime.hardening import SANDBOX_UID, create_request, pids_limit
from toolserver.runtime.uninterrupted import uninterrupted
from toolserver.settings import RuntimeSettings

Result = TypeVar("Result")
SERVER, SANDBOX, WORKSPACE, IMAGE = "toolcrib.server", "toolcrib.sandbox", "toolcrib.workspace", "toolcrib.image"
NO_GVISOR = (
    "the Docker engine has no gVisor runtime. Install runsc, add it to the engine's runtimes (docs/how-to/gvisor.md), or set "
    "TOOLSERVER_RUNTIME__ISOLATION=runc."
)
EXIT_S = 2  # for a container that closed its streams to exit by itself
FIRST_CGROUPNS_VERSION = (1, 41)
_log = logging.getLogger(__name__)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def gvisor_of(info: Mapping[str, Any]) -> str | None:
    """The name under which an engine has gVisor, from its `info`."""
    runtimes: dict[str, Any] = info.get("Runtimes") or {}
    called = [name for name, how in runtimes.items() if Path(str((how or {}).get("path", ""))).name == "runsc"]
    return "runsc" if "runsc" in runtimes else min(called, default=None)


async def engine_answers(settings: RuntimeSettings, timeout_s: float) -> bool:
    """Whether a Docker engine can be used now."""
    engine = DockerEngine(settings.docker_host, timeout_s)
    try:
        await engine.call(lambda client: client.ping(), timeout_s=timeout_s)
    except (RuntimeUnavailable, Refused, NotInEngine):
        return False
    else:
        return True
    finally:
        engine.close()


class DockerSandbox(Sandbox):
    def __init__(self, spec: SandboxSpec, runtime: DockerRuntime, container: str, stream: AttachedStream) -> None:
        self.spec, self.handle = spec, container
        self._runtime, self._container, self._stream = runtime, container, stream
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
            await self._runtime.engine.call(lambda client: client.kill(self._container, "SIGKILL"))
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
                    self._end = await uninterrupted(self._remove())
                finally:
                    await self._stream.close()
            return self._end

    async def release(self) -> None:
        self._runtime.forget(self.spec.sandbox_id)
        await self._stream.close()

    async def _remove(self) -> SandboxEnd:
        log = self._stream.log
        try:
            state = await self._state()
            if state.get("Running") and self._stream.finished and not self._killed:
                # the stream is seen to end a moment before the engine notes the exit code
                with contextlib.suppress(RuntimeUnavailable, Refused):
                    await self._runtime.engine.call(lambda client: client.wait(self._container, timeout=EXIT_S))
                state = await self._state()
            if state.get("Running"):
                await self._remove_running()
                return SandboxEnd("killed", None, log.text())
            await self._runtime.remove_container(self._container)
        except NotInEngine:
            return SandboxEnd("removed", None, log.text())
        except (RuntimeUnavailable, Refused):
            self._runtime.remember_to_remove(self._container)
            return SandboxEnd("runtime_lost", None, log.text())
        return _end_of(state, killed=self._killed, log=log.text())

    async def _remove_running(self) -> None:
        """Kill and remove in one step: of one that ends so, there is no more to be learnt."""
        draining = asyncio.create_task(self._stream.drain())
        try:
            await self._runtime.remove_container(self._container)
        finally:
            draining.cancel()
            await asyncio.wait([draining])

    async def _state(self) -> dict[str, Any]:
        found = await self._runtime.engine.call(lambda client: client.inspect_container(self._container))
        state: dict[str, Any] = found["State"]
        return state


def _end_of(state: dict[str, Any], *, killed: bool, log: str) -> SandboxEnd:
    code = state.get("ExitCode")
    if killed:
        return SandboxEnd("killed", code, log)
    if state.get("OOMKilled"):
        return SandboxEnd("oom", code, log)
    # 137 is what a SIGKILL from outside leaves, and what a program may exit with: not told apart by the engine
    return SandboxEnd("unknown" if code == 137 else "exited", code, log)


class DockerRuntime(SandboxRuntime):
    name = "docker"

    def __init__(self, server_id: str, state_dir: Path, settings: RuntimeSettings) -> None:
        self._server_id, self._settings = server_id, settings
        self.engine = DockerEngine(settings.docker_host, settings.api_timeout_s)
        self._volumes = WorkspaceVolumes(self.engine, state_dir / "docker" / "disks", SANDBOX_UID)
        self._left_over: set[str] = set()  # containers that could not be removed when the engine was away
        self._sandboxes: dict[str, DockerSandbox] = {}
        self._info: dict[str, Any] = {}
        self._prefix = f"toolcrib-{_checked(server_id)}"

    async def open(self) -> None:
        try:
            await self.check()
        except RequirementMissing:
            raise
        except RuntimeUnavailable:
            pass

    async def check(self) -> None:
        info = await self._ask(lambda client: {**client.info(), "ApiVersion": client.api_version})
        if info.get("OSType", "linux") != "linux":
            raise RuntimeUnavailable("The Docker engine does not run Linux containers. Switch it to Linux containers.")
        if self._settings.isolation == "require-gvisor" and gvisor_of(info) is None:
            raise RequirementMissing(f"TOOLSERVER_RUNTIME__ISOLATION is require-gvisor, but {NO_GVISOR}")
        if self._volumes.mode is None:
            probe = f"probe-{secrets.token_hex(6)}"
            await self._volumes.choose(
                self._settings.disk,
                self._volume(probe),
                self._labels_of(probe),
                live_restore=bool(info.get("LiveRestoreEnabled")),
            )
        self._info = info

    @property
    def _gvisor(self) -> str | None:
        """The engine's name for gVisor, where sandboxes are to have it; None: the engine's default runtime."""
        return None if self._settings.isolation == "runc" else gvisor_of(self._info)

    def _labels_of(self, workspace_id: str) -> dict[str, str]:
        return {SERVER: self._server_id, WORKSPACE: workspace_id}

    async def _ask(self, work: Callable[[docker.APIClient], Result]) -> Result:
        try:
            return await self.engine.call(work)
        except (Refused, NotInEngine) as no:
            raise RuntimeUnavailable(NOT_ANSWERING) from no

    # -- sandboxes

    async def start(self, spec: SandboxSpec) -> Sandbox:
        if not self._info:
            await self.check()
        sandbox = await uninterrupted(self._start(spec), undo=lambda made: made.remove())
        self._sandboxes[spec.sandbox_id] = sandbox
        return sandbox

    async def _start(self, spec: SandboxSpec) -> DockerSandbox:
        await self._remove_left_over()
        name = f"{self._prefix}-{_checked(spec.sandbox_id)}"
        labels = {WORKSPACE: spec.workspace_id, SANDBOX: spec.sandbox_id, IMAGE: spec.image}
        request = create_request(
            spec,
            labels={SERVER: self._server_id, **labels},
            volume=None if spec.workspace == "none" else self._volume(spec.workspace_id),
            private_cgroup=self._has_cgroup_namespaces(),
            gvisor=self._gvisor,
        )
        if spec.workspace != "none":
            await self._volumes.ready(self._volume(spec.workspace_id))
        stream: AttachedStream | None = None
        try:
            await self.engine.create(request, name)
            stream = await AttachedStream.over(await self.engine.attach(name))
            timeout_s = self._settings.start_timeout_s
            await self.engine.call(lambda client: client.start(name), timeout_s=timeout_s)
        except BaseException as problem:
            if stream is not None:
                await stream.close()
            if isinstance(problem, Refused) and problem.status == 409:
                raise RuntimeUnavailable("A sandbox of this name exists already.") from problem
            if isinstance(problem, RuntimeUnavailable):
                self.remember_to_remove(name)  # asking again would only wait again
            else:
                await self._remove_or_remember(name)
            if isinstance(problem, (Refused, NotInEngine)):
                _log.warning(
                    "sandbox_not_started", extra={"fields": {"image": spec.image, "engine_said": str(problem)}}
                )
                raise RuntimeUnavailable(_why_not_started(spec, problem)) from problem
            raise
        return DockerSandbox(spec, self, name, stream)

    async def attach(self, spec: SandboxSpec, handle: str) -> Sandbox:
        sandbox = await uninterrupted(self._attach(spec, handle), undo=lambda found: found.release())
        self._sandboxes[spec.sandbox_id] = sandbox
        return sandbox

    async def _attach(self, spec: SandboxSpec, handle: str) -> DockerSandbox:
        try:
            found = await self.engine.call(lambda client: client.inspect_container(handle))
            state: dict[str, Any] = found["State"]
            if not state.get("Running"):
                raise SandboxEnded(_end_of(state, killed=False, log=""))
            stream = await AttachedStream.over(await self.engine.attach(handle))
        except NotInEngine as missing:
            raise SandboxEnded(SandboxEnd("removed")) from missing
        except Refused as no:
            raise RuntimeUnavailable("The Docker engine would not attach to a sandbox.") from no
        return DockerSandbox(spec, self, handle, stream)

    async def resize(self, sandbox: Sandbox, limits: Limits) -> Limits:
        if limits.disk_mb != sandbox.spec.limits.disk_mb:
            raise RuntimeUnavailable("The disk limit of a sandbox can't be changed while it runs.")
        name, memory = sandbox.handle, limits.memory_mb << 20
        wanted = {
            "Memory": memory,
            "MemorySwap": memory,
            "NanoCpus": int(limits.cpus * 1_000_000_000),
            "PidsLimit": pids_limit(limits, gvisor=self._gvisor is not None),
        }
        try:
            await self.engine.update(name, wanted)
            held = (await self.engine.call(lambda client: client.inspect_container(name)))["HostConfig"]
        except (Refused, NotInEngine) as no:
            raise RuntimeUnavailable("The Docker engine would not change the limits of a sandbox.") from no
        if any(held.get(field) != value for field, value in wanted.items()):
            raise RuntimeUnavailable("The Docker engine did not take over the limits of a sandbox.")
        effective = Limits(held["Memory"] >> 20, held["NanoCpus"] / 1_000_000_000, limits.pids, limits.disk_mb)
        sandbox.spec = replace(sandbox.spec, limits=effective)
        return effective

    def _has_cgroup_namespaces(self) -> bool:
        version = tuple(int(part) for part in str(self._info.get("ApiVersion", "0")).split("."))
        return version >= FIRST_CGROUPNS_VERSION

    async def remove_container(self, name: str) -> None:
        """Its volumes stay. No error when it is gone."""
        with contextlib.suppress(NotInEngine):
            await self.engine.call(lambda client: client.remove_container(name, v=False, force=True))
        self._sandboxes = {key: s for key, s in self._sandboxes.items() if s.handle != name}

    def forget(self, sandbox_id: str) -> None:
        self._sandboxes.pop(sandbox_id, None)

    def remember_to_remove(self, name: str) -> None:
        self._left_over.add(name)

    async def _remove_or_remember(self, name: str) -> None:
        try:
            await self.remove_container(name)
        except (RuntimeUnavailable, Refused):
            self.remember_to_remove(name)

    # -- workspaces

    def _volume(self, workspace_id: str) -> str:
        return f"{self._prefix}-{_checked(workspace_id)}"

    async def create_workspace(self, workspace_id: str, disk_mb: int) -> None:
        if self._volumes.mode is None:
            await self.check()
        await self._volumes.create(self._volume(workspace_id), disk_mb, self._labels_of(workspace_id))

    async def delete_workspace(self, workspace_id: str) -> None:
        await self._remove_left_over()
        await self._volumes.delete(self._volume(workspace_id))

    async def has_workspace(self, workspace_id: str) -> bool:
        name = self._volume(workspace_id)
        try:
            await self.engine.call(lambda client: client.inspect_volume(name))
        except NotInEngine:
            return False
        except Refused as no:
            raise RuntimeUnavailable(NOT_ANSWERING) from no
        return True

    async def _remove_left_over(self) -> None:
        for name in list(self._left_over):
            self._left_over.discard(name)
            await self._remove_or_remember(name)

    async def inventory(self) -> Inventory:
        await self._remove_left_over()
        mine = {"label": f"{SERVER}={self._server_id}"}
        containers = await self._ask(lambda client: client.containers(all=True, filters=mine))
        volumes = (await self._ask(lambda client: client.volumes(filters=mine))).get("Volumes") or []
        start, names = f"{self._prefix}-", await asyncio.to_thread(self._volumes.disks.workspace_ids)
        half_made = {name.removeprefix(start) for name in names if name.startswith(start)}  # without their volumes
        return Inventory(
            sandboxes=_labels(containers, SANDBOX),
            running=_labels([one for one in containers if one.get("State") in ("running", "paused")], SANDBOX),
            workspaces=_labels(volumes, WORKSPACE) | half_made,
        )

    async def discard(self, sandbox_ids: frozenset[str], workspace_ids: frozenset[str]) -> None:
        for sandbox_id in sandbox_ids:
            await self._ask_to_remove(f"{self._prefix}-{_checked(sandbox_id)}")
        for workspace_id in workspace_ids:
            await self._volumes.delete(self._volume(workspace_id))

    async def _ask_to_remove(self, name: str) -> None:
        try:
            await self.remove_container(name)
        except Refused as no:
            if no.status != 409:  # 409: somebody removes it already
                raise RuntimeUnavailable("The Docker engine would not remove a sandbox.") from no

    # -- what holds

    def effective_limits(self, asked: Limits) -> Limits:
        cores, memory = self._info.get("NCPU"), self._info.get("MemTotal")
        return Limits(
            memory_mb=min(asked.memory_mb, memory >> 20) if memory else asked.memory_mb,
            cpus=min(asked.cpus, float(cores)) if cores else asked.cpus,
            pids=asked.pids,
            disk_mb=asked.disk_mb,
        )

    def facts(self) -> dict[str, Any]:
        return dict(self._info)

    def isolation(self) -> dict[str, Any]:
        def told(supported: str) -> str:
            return (
                "enforced"
                if self._info.get(supported, True)
                else "not enforced: the engine's host has no cgroup for it"
            )

        kernel = "shared" if self._gvisor is None else "gvisor"
        if kernel == "shared" and self._settings.isolation == "prefer-gvisor":
            kernel = f"shared, though gVisor is preferred: {NO_GVISOR}"
        return {
            "runtime": "docker",
            "kernel": kernel,
            "memory": told("MemoryLimit"),
            "cpus": told("CpuCfsQuota"),
            "pids": told("PidsLimit"),
            "disk": "enforced" if self._volumes.mode in ("quota", "loop") else "accounted by the worker",
            "seccomp": "enforced" if self._gvisor is None else "enforced: gVisor's own filter",
            "network": "none",
        }

    async def close(self) -> None:
        for sandbox in list(self._sandboxes.values()):
            await sandbox.remove()
        self._sandboxes.clear()
        with contextlib.suppress(RuntimeUnavailable):
            await self._remove_left_over()
        self.engine.close()


def _labels(found: list[dict[str, Any]], label: str) -> frozenset[str]:
    return frozenset(value for one in found if (value := (one.get("Labels") or {}).get(label)) is not None)


def _checked(identifier: str) -> str:
    """An id that can stand in an engine's name. Raises ValueError: ids are made by this server."""
    if not _NAME.fullmatch(identifier):
        raise ValueError(f"not an identifier: {identifier!r}")
    return identifier


def _why_not_started(spec: SandboxSpec, problem: Exception) -> str:
    if isinstance(problem, NotInEngine):
        return f"The Docker engine has no image {spec.reference}. Build it: toolserver images build"
    if isinstance(problem, Refused) and problem.status == 400:
        return f"The Docker engine could not start the image {spec.image}: its command or a limit does not work there."
    return f"The Docker engine could not start a sandbox of the image {spec.image}. The server's log says why."
