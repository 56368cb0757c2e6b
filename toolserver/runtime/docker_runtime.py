"""Sandboxes as containers of a Docker engine. Knows the engine by its socket alone, never a path of its host.

So it works the same when the ToolServer is itself a container with that socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import docker

from toolserver.errors import ImageUnusable, RequirementMissing, RuntimeUnavailable
from toolserver.runtime.base import (
    CommandSandbox,
    Inventory,
    Limits,
    Sandbox,
    SandboxEnd,
    SandboxEnded,
    SandboxRuntime,
    SandboxSpec,
    checked_id,
    is_id,
)
from toolserver.runtime.docker_disk import StillInUse, WorkspaceVolumes
from toolserver.runtime.docker_egress import DockerEgress
from toolserver.runtime.docker_engine import NOT_ANSWERING, DockerEngine, NotInEngine, Refused
from toolserver.runtime.docker_launcher import ROLE, Launcher, begin, read_config
from toolserver.runtime.docker_sandbox import Containers, DockerCommand, DockerSandbox, end_of
from toolserver.runtime.docker_sidecar import name_of, start_sidecar
from toolserver.runtime.docker_stream import AttachedStream
from toolserver.runtime.hardening import SANDBOX_UID, Foreign, create_request, pids_limit
from toolserver.runtime.uninterrupted import uninterrupted
from toolserver.settings import RuntimeSettings

Result = TypeVar("Result")
Made = TypeVar("Made", bound=DockerSandbox)
SERVER, SANDBOX, WORKSPACE, IMAGE = "toolcrib.server", "toolcrib.sandbox", "toolcrib.workspace", "toolcrib.image"
NO_GVISOR = (
    "the Docker engine has no gVisor runtime. Install runsc, add it to the engine's runtimes (docs/how-to/gvisor.md), or set "
    "TOOLSERVER_RUNTIME__ISOLATION=runc."
)
_NO_SOCKETS = (
    "gVisor on this Docker engine lets no sandbox open the Unix socket that is its way out. Add --host-uds=open to the runtimeArgs of "
    "its runtime in the engine's settings (docs/how-to/gvisor.md), or set TOOLSERVER_RUNTIME__ISOLATION=runc."
)
_SOCKETS_OPEN = {"host-uds=open", "host-uds=all", "fsgofer-host-uds", "fsgofer-host-uds=true"}
_ALIVE = ("running", "paused")
FIRST_CGROUPNS_VERSION = (1, 41)
_log = logging.getLogger(__name__)


def gvisor_of(info: Mapping[str, Any]) -> str | None:
    """The name under which an engine has gVisor, from its `info`."""
    runtimes: dict[str, Any] = info.get("Runtimes") or {}
    called = [name for name, how in runtimes.items() if Path(str((how or {}).get("path", ""))).name == "runsc"]
    return "runsc" if "runsc" in runtimes else min(called, default=None)


def closed_to_sockets(info: Mapping[str, Any], gvisor: str) -> bool:
    """Whether gVisor of this name, as the engine starts it, opens no Unix socket of the host. What is set elsewhere is not seen."""
    how: dict[str, Any] = (info.get("Runtimes") or {}).get(gvisor) or {}
    told = " ".join(how.get("runtimeArgs") or ()).replace("host-uds ", "host-uds=").split()
    return bool(how.get("path")) and not any(one.lstrip("-") in _SOCKETS_OPEN for one in told)


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


class DockerRuntime(SandboxRuntime):
    name = "docker"

    def __init__(
        self, server_id: str, state_dir: Path, settings: RuntimeSettings, egress_network: str = "bridge"
    ) -> None:
        """`egress_network`: the engine's network that the egress proxy, and nothing else, is on."""
        self._server_id, self._settings = server_id, settings
        self.engine = DockerEngine(settings.docker_host, settings.api_timeout_s)
        self._volumes = WorkspaceVolumes(self.engine, state_dir / "docker" / "disks", SANDBOX_UID)
        self._containers = Containers(self.engine)
        self._sandboxes: dict[str, DockerSandbox] = {}
        self._info: dict[str, Any] = {}
        self._choosing = asyncio.Lock()
        self._probe_name = f"probe-{secrets.token_hex(6)}"
        self._prefix = f"toolcrib-{checked_id(server_id)}"
        self._egress = DockerEgress(self.engine, self._containers, self._prefix, {SERVER: server_id}, egress_network)
        self._doors = self._egress.volume  # with the doors to the egress proxy
        self._launcher = Launcher(self.engine, self._prefix, {SERVER: server_id})

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
        async with self._choosing:
            if self._volumes.mode is None:
                await self._volumes.choose(
                    self._settings.disk,
                    self._volume(self._probe_name),
                    self._labels_of(self._probe_name),
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

    async def start(self, spec: SandboxSpec, secrets: Mapping[str, str] | None = None) -> Sandbox:
        return await self._hold(self._start(spec, secrets or {}, DockerSandbox), spec)

    async def run(self, spec: SandboxSpec, secrets: Mapping[str, str] | None = None) -> CommandSandbox:
        return await self._hold(self._start(spec, secrets or {}, DockerCommand), spec)

    async def _hold(self, starting: Coroutine[Any, Any, Made], spec: SandboxSpec) -> Made:
        sandbox = await uninterrupted(starting, undo=lambda made: made.remove())
        self._sandboxes[spec.sandbox_id] = sandbox
        return sandbox

    async def _start(self, spec: SandboxSpec, secrets: Mapping[str, str], kind: type[Made]) -> Made:
        if not self._info:
            await self.check()
        await self._containers.remove_left_over()
        name = f"{self._prefix}-{checked_id(spec.sandbox_id)}"
        labels = {WORKSPACE: spec.workspace_id, SANDBOX: spec.sandbox_id, IMAGE: spec.image}
        beside = name_of(name) if spec.foreign and spec.door is not None else None
        foreign = None
        if spec.foreign:
            foreign = await self._foreign(spec, beside, once=issubclass(kind, DockerCommand))
        request = create_request(
            spec,
            labels={SERVER: self._server_id, **labels},
            volume=None if spec.workspace == "none" else self._volume(spec.workspace_id),
            private_cgroup=self._has_cgroup_namespaces(),
            gvisor=self._gvisor,
            foreign=foreign,
            doors=self._doors,
        )
        if spec.workspace != "none":
            await self._volumes.ready(self._volume(spec.workspace_id))
        if spec.egress or spec.door is not None:
            await self._egress.make_volume()
        stream: AttachedStream | None = None
        try:
            if beside is not None:
                await self._start_sidecar(spec, beside, labels)
            container = await self.engine.create(request, name)
            stream = await self._attached(container, whole=issubclass(kind, DockerCommand))
            timeout_s = self._settings.start_timeout_s
            await self.engine.call(lambda client: client.start(container), timeout_s=timeout_s)
            if foreign is not None:
                await begin(spec, stream, secrets, timeout_s)
        except BaseException as problem:
            if stream is not None:
                await stream.close()
            if isinstance(problem, Refused) and problem.status == 409:
                raise RuntimeUnavailable("A sandbox of this name exists already.") from problem
            if isinstance(problem, RuntimeUnavailable) and not isinstance(problem, ImageUnusable):
                self._containers.remember(name)  # asking again would only wait again
            else:
                await self._containers.remove_or_remember(name)
            if beside is not None:
                await self._containers.remove_or_remember(beside)
            if isinstance(problem, (Refused, NotInEngine)):
                self._launcher.doubt()
                _log.warning(
                    "sandbox_not_started", extra={"fields": {"image": spec.image, "engine_said": str(problem)}}
                )
                raise _why_not_started(spec, problem) from problem
            raise
        return kind(spec, self._containers, container, stream, self._forget, beside=beside)

    async def _start_sidecar(self, spec: SandboxSpec, name: str, labels: Mapping[str, str]) -> None:
        await start_sidecar(
            self.engine,
            spec,
            name,
            labels={SERVER: self._server_id, **labels},
            doors=self._doors,
            private_cgroup=self._has_cgroup_namespaces(),
            gvisor=self._gvisor,
            timeout_s=self._settings.start_timeout_s,
        )

    async def _attached(self, container: str, *, whole: bool) -> AttachedStream:
        """`whole`: what comes last on one stream counts also when another has ended before."""
        if not whole:
            return await AttachedStream.over(await self.engine.attach(container))
        stdin = await self.engine.attach(container, ["stdin"])
        try:
            return await AttachedStream.over_two(stdin, await self.engine.attach(container, ["stdout", "stderr"]))
        except BaseException:
            stdin.close()
            raise

    async def _foreign(self, spec: SandboxSpec, beside: str | None, *, once: bool) -> Foreign:
        config = await read_config(self.engine, spec)
        return Foreign(config.command, await self._launcher.volume(), config.scratch, beside, once)

    async def attach(self, spec: SandboxSpec, handle: str) -> Sandbox:
        sandbox = await uninterrupted(self._attach(spec, handle), undo=lambda found: found.release())
        self._sandboxes[spec.sandbox_id] = sandbox
        return sandbox

    async def _attach(self, spec: SandboxSpec, handle: str) -> DockerSandbox:
        try:
            found = await self.engine.call(lambda client: client.inspect_container(handle))
            state: dict[str, Any] = found["State"]
            if not state.get("Running"):
                raise SandboxEnded(end_of(state, killed=False, log=""))
            if state.get("Paused"):  # by hand: it would answer nothing, and nobody knows for how long
                raise SandboxEnded(SandboxEnd("unknown"))
            stream = await AttachedStream.over(await self.engine.attach(handle))
        except NotInEngine as missing:
            raise SandboxEnded(SandboxEnd("removed")) from missing
        except Refused as no:
            raise RuntimeUnavailable("The Docker engine would not attach to a sandbox.") from no
        beside = name_of(f"{self._prefix}-{spec.sandbox_id}") if spec.foreign and spec.door is not None else None
        return DockerSandbox(spec, self._containers, handle, stream, self._forget, beside=beside)

    async def start_egress(self) -> Sandbox:
        if not self._info:
            await self.check()
        if self._closed_to_sockets():
            raise RuntimeUnavailable(f"Nothing can be reached: {_NO_SOCKETS}")
        return await uninterrupted(
            self._egress.start(self._settings.start_timeout_s, private_cgroup=self._has_cgroup_namespaces()),
            undo=lambda made: made.remove(),
        )

    async def egress_problem(self) -> str | None:
        if not self._info:
            await self.check()
        return _NO_SOCKETS if self._closed_to_sockets() else await self._egress.problem()

    def _closed_to_sockets(self) -> bool:
        return self._gvisor is not None and closed_to_sockets(self._info, self._gvisor)

    async def image_ids(self, references: Collection[str]) -> dict[str, str]:
        found: dict[str, str] = {}
        for reference in references:
            try:
                found[reference] = str((await self.engine.image(reference))["Id"])
            except NotInEngine:
                continue
            except Refused as problem:
                raise RuntimeUnavailable(f"The engine does not tell of images: {problem}.") from problem
        return found

    async def lacks(self, image: str, reference: str, host_programs: tuple[str, ...]) -> str | None:
        del host_programs
        try:
            await self.engine.image(reference)
        except NotInEngine:
            return f"The image {image} is not built here. The operator can build it: toolserver images build {image}"
        except Refused as problem:
            raise RuntimeUnavailable(f"The engine does not tell of images: {problem}.") from problem
        return None

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

    def _forget(self, sandbox: Sandbox) -> None:
        if self._sandboxes.get(sandbox.spec.sandbox_id) is sandbox:
            del self._sandboxes[sandbox.spec.sandbox_id]

    # -- workspaces

    def _volume(self, workspace_id: str) -> str:
        return f"{self._prefix}-{checked_id(workspace_id)}"

    async def create_workspace(self, workspace_id: str, disk_mb: int) -> None:
        if self._volumes.mode is None:
            await self.check()
        await self._volumes.create(self._volume(workspace_id), disk_mb, self._labels_of(workspace_id))

    async def delete_workspace(self, workspace_id: str) -> None:
        await self._containers.remove_left_over()
        await self._volumes.delete(self._volume(workspace_id))

    async def has_workspace(self, workspace_id: str) -> bool:
        name = self._volume(workspace_id)
        try:
            await self.engine.call(lambda client: client.inspect_volume(name))
        except NotInEngine:
            return await self._volumes.bring_back(name, self._labels_of(workspace_id))
        except Refused as no:
            raise RuntimeUnavailable(NOT_ANSWERING) from no
        return True

    async def inventory(self) -> Inventory:
        await self._containers.remove_left_over()
        mine = {"label": f"{SERVER}={self._server_id}"}
        containers = await self._ask(lambda client: client.containers(all=True, filters=mine))
        volumes = (await self._ask(lambda client: client.volumes(filters=mine))).get("Volumes") or []
        self._launcher.note(volumes)
        self._egress.note(volumes)
        names = {volume["Name"] for volume in volumes if ROLE not in (volume.get("Labels") or {})}.union(
            await asyncio.to_thread(self._volumes.disks.workspace_ids)  # also those without their volumes
        )
        start = f"{self._prefix}-"
        return Inventory(
            sandboxes=_labels(containers, SANDBOX) - self._egress.own,
            running=_labels([one for one in containers if _is_sandbox(one) and one.get("State") in _ALIVE], SANDBOX),
            # the probe is nobody's, and not left behind: it may be under way
            workspaces=frozenset(name for n in names if n.startswith(start) and is_id(name := n.removeprefix(start)))
            - {self._probe_name},
        )

    async def discard(self, sandbox_ids: frozenset[str], workspace_ids: frozenset[str]) -> None:
        problem: Exception | None = None  # of one; the others go all the same
        mine = {"label": f"{SERVER}={self._server_id}"}
        for one in await self._ask(lambda client: client.containers(all=True, filters=mine)) if sandbox_ids else ():
            if one["Labels"].get(SANDBOX) in sandbox_ids:  # whatever it is called by now
                try:
                    await self._containers.remove(one["Id"])
                except Refused as no:
                    problem = problem if no.status == 409 else no  # 409: somebody removes it already
        for sandbox_id in sandbox_ids:
            self._sandboxes.pop(sandbox_id, None)
        for workspace_id in workspace_ids:
            try:
                await self._volumes.delete(self._volume(workspace_id))
            except StillInUse as no:
                problem = no
        if problem is not None:
            raise RuntimeUnavailable("The Docker engine would not remove a sandbox or its workspace.") from problem

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
        with contextlib.suppress(RuntimeUnavailable, Refused):
            await self._containers.remove_left_over()
            if self._launcher.left:
                await self._launcher.clear()
            await self._egress.close()
        self.engine.close()


def _is_sandbox(container: dict[str, Any]) -> bool:
    """And not what stands beside one."""
    return ROLE not in (container.get("Labels") or {})


def _labels(found: list[dict[str, Any]], label: str) -> frozenset[str]:
    return frozenset(value for one in found if (value := (one.get("Labels") or {}).get(label)) is not None)


def _why_not_started(spec: SandboxSpec, problem: Exception) -> RuntimeUnavailable:
    if spec.foreign:  # what the engine says may name paths of its host, so it is not ImageUnusable, which shows them
        told = str(problem).strip().splitlines()
        return RuntimeUnavailable(
            f"The image {spec.image} can't be run: {told[0][:500] if told else 'the engine says no'}"
        )
    if isinstance(problem, NotInEngine):
        return RuntimeUnavailable(f"The Docker engine has no image {spec.reference}. Build it: toolserver images build")
    if isinstance(problem, Refused) and problem.status == 400:
        return RuntimeUnavailable(
            f"The Docker engine could not start the image {spec.image}: its command or a limit does not work there."
        )
    return RuntimeUnavailable(
        f"The Docker engine could not start a sandbox of the image {spec.image}. The server's log says why."
    )
