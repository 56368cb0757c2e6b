"""What a sandbox may do on a Docker engine: one pure function from a spec to the engine's create request.

Nothing else in the package decides about privileges. tests/integration/runtime asserts each line through `docker
inspect`, and from inside.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from toolserver.runtime.base import EGRESS_FOLDER, Limits, SandboxSpec
from toolserver.runtime.docker_launcher import MOUNTED_AT, launch_command

SANDBOX_UID = 10001
WORKSPACE = "/workspace"
OPEN_FILES = 1024
# the host counts gVisor's own threads with the sandbox's: so many, and so many for each process inside
GVISOR_THREADS = 128
GVISOR_THREADS_EACH = 4
MIB = 1 << 20
# of the egress proxy
EGRESS_UID, EGRESS_OPEN_FILES = 10002, 8192
EGRESS_LIMITS = Limits(memory_mb=256, cpus=1.0, pids=192, disk_mb=16)  # a thread for each name being resolved
DOORS_FOLDER = "/egress"  # as it sees them


@cache
def seccomp_profile() -> str:
    """Our allow-list in the engine's JSON form. The engine's default one still lets AF_VSOCK and io_uring through."""
    return files("toolserver.runtime").joinpath("seccomp.json").read_text("utf-8")


def tmp_mb(limits: Limits) -> int:
    """Size of /tmp. Its pages count as memory, so it must leave room in the limit."""
    return min(64, limits.memory_mb // 4)


def shm_mb(limits: Limits) -> int:
    """Size of /dev/shm, as `tmp_mb`."""
    return min(64, max(1, limits.memory_mb // 8))


def fixed_at_start(limits: Limits) -> tuple[int, int, int]:
    """What a running sandbox keeps, whatever its other limits become: file size and the sizes of its tmpfs."""
    return limits.disk_mb, tmp_mb(limits), shm_mb(limits)


def thread_env(limits: Limits) -> dict[str, str]:
    """Number libraries start a thread a core of the host, whatever the limit; so they are told."""
    threads = str(max(1, math.ceil(limits.cpus)))
    return dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHON_CPU_COUNT"), threads)


def pids_limit(limits: Limits, *, gvisor: bool) -> int:
    return limits.pids * GVISOR_THREADS_EACH + GVISOR_THREADS if gvisor else limits.pids


@dataclass(frozen=True)
class Foreign:
    """What the container of an added image needs beside its spec.

    program: what the launcher runs. launcher: the volume with it. scratch: folders that get a tmpfs, since the image declares
    them as volumes. beside: the container whose network it joins. once: it is given one input, and ends.
    """

    program: tuple[str, ...]
    launcher: str
    scratch: tuple[str, ...] = ()
    beside: str | None = None
    once: bool = False


def create_request(
    spec: SandboxSpec,
    *,
    labels: Mapping[str, str],
    volume: str | None,
    private_cgroup: bool = True,
    gvisor: str | None = None,
    foreign: Foreign | None = None,
    doors: str | None = None,
) -> dict[str, Any]:
    """The body of the engine's `POST /containers/create`.

    `volume` is the session's workspace, None when the spec wants none. `private_cgroup`: false for engines without
    cgroup namespaces. `gvisor`: the engine's runtime of that name, in place of its own. `foreign`: for added images, which are
    held to all that ours are held to. `doors`: the volume with the doors to the egress proxy, for those that have one.
    """
    body: dict[str, Any] = {
        "Image": spec.reference,
        "User": f"{SANDBOX_UID}:{SANDBOX_UID}",
        "Env": environment({**thread_env(spec.limits), **spec.env}),
        "Labels": dict(labels),
        "Hostname": "sandbox",
        "OpenStdin": True,
        "StdinOnce": False,  # the stream can be attached again
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "Tty": False,
        "NetworkDisabled": False,  # decided by NetworkMode alone
        "Healthcheck": {"Test": ["NONE"]},
        "StopSignal": "SIGKILL",
        "HostConfig": _host_config(spec, volume, doors, private_cgroup=private_cgroup, gvisor=gvisor),
    }
    if foreign is not None:
        _make_foreign(body, spec, foreign)
        return body
    if spec.command:
        body["Entrypoint"], body["Cmd"] = list(spec.command), []
    if volume is not None:
        body["WorkingDir"] = WORKSPACE
    return body


def _make_foreign(body: dict[str, Any], spec: SandboxSpec, foreign: Foreign) -> None:
    """It is begun by the launcher, whose environment is the image's own; HOME is a folder that can be written."""
    body["Entrypoint"], body["Cmd"] = launch_command(foreign.program), []
    body["StdinOnce"] = foreign.once
    body["Env"] = environment({"HOME": "/tmp", **thread_env(spec.limits), **spec.env})  # noqa: S108 - inside the sandbox
    if spec.working_dir is not None:
        body["WorkingDir"] = spec.working_dir
    host: dict[str, Any] = body["HostConfig"]
    host["Mounts"].append({"Type": "volume", "Source": foreign.launcher, "Target": MOUNTED_AT, "ReadOnly": True})
    taken = {mount["Target"] for mount in host["Mounts"]}.union(host["Tmpfs"])
    scratch = [folder for folder in foreign.scratch if folder.rstrip("/") not in taken]
    size = scratch_mb(spec.limits, len(scratch)) * MIB
    # a volume without a name has no bound, and stays behind
    host["Mounts"] += [
        {"Type": "tmpfs", "Target": folder, "TmpfsOptions": {"SizeBytes": size, "Mode": 0o1777}} for folder in scratch
    ]
    if foreign.beside is not None:
        host["NetworkMode"] = f"{CONTAINER}{foreign.beside}"
        del body["Hostname"]  # it has that of the other one


CONTAINER = "container:"  # with its name: a network of the engine's is that of another container


def egress_request(
    reference: str, *, labels: Mapping[str, str], doors: str, network: str, private_cgroup: bool = True
) -> dict[str, Any]:
    """As `create_request`, for the egress proxy: the one container with a network. `doors`: the volume, which it alone may write.

    Held to all that sandboxes are held to, as a user that is none of theirs. Its stdin ends with the server.
    """
    spec = SandboxSpec("egress", "", "egress", reference, (), EGRESS_LIMITS, workspace="none")
    body = create_request(spec, labels=labels, volume=None, private_cgroup=private_cgroup)
    body |= {"User": f"{EGRESS_UID}:{EGRESS_UID}", "Hostname": "egress", "StdinOnce": True}
    host: dict[str, Any] = body["HostConfig"]
    host["NetworkMode"] = network
    if network.startswith(CONTAINER):
        del body["Hostname"]  # it has that of the other one
    host["Mounts"] = [{"Type": "volume", "Source": doors, "Target": DOORS_FOLDER, "ReadOnly": False}]
    files = {"Name": "nofile", "Soft": EGRESS_OPEN_FILES, "Hard": EGRESS_OPEN_FILES}
    host["Ulimits"] = [files, *(one for one in host["Ulimits"] if one["Name"] != "nofile")]
    return body


def environment(variables: Mapping[str, str]) -> list[str]:
    """In the engine's form."""
    return [f"{name}={value}" for name, value in sorted(variables.items())]


def scratch_mb(limits: Limits, folders: int) -> int:
    """Size of each tmpfs of an image's own, as `tmp_mb`: all together within an eighth of the memory."""
    return max(1, min(64, limits.memory_mb // 8) // max(1, folders))


def _host_config(
    spec: SandboxSpec, volume: str | None, doors: str | None, *, private_cgroup: bool, gvisor: str | None
) -> dict[str, Any]:
    limits = spec.limits
    memory = limits.memory_mb * MIB
    mounts: list[dict[str, Any]] = []
    if volume is not None:
        read_only = spec.workspace == "ro"
        mounts = [{"Type": "volume", "Source": volume, "Target": WORKSPACE, "ReadOnly": read_only}]
    if doors is not None and (spec.egress or spec.door is not None):
        mounts.append(
            {
                "Type": "volume",
                "Source": doors,
                "Target": EGRESS_FOLDER,
                "ReadOnly": True,
                "VolumeOptions": {"NoCopy": True},
            }
        )
    return {
        **({} if gvisor is None else {"Runtime": gvisor}),
        "NetworkMode": "none",
        "CapDrop": ["ALL"],
        "CapAdd": [],
        "Privileged": False,
        "SecurityOpt": ["no-new-privileges", f"seccomp={seccomp_profile()}"],
        "ReadonlyRootfs": True,
        "Tmpfs": {"/tmp": f"rw,exec,nosuid,nodev,mode=1777,size={tmp_mb(limits)}m"},  # noqa: S108 - inside the sandbox
        "ShmSize": shm_mb(limits) * MIB,
        "Memory": memory,
        "MemorySwap": memory,  # memory and swap together: no swap
        "MemorySwappiness": 0,
        "NanoCpus": int(limits.cpus * 1_000_000_000),
        "PidsLimit": pids_limit(limits, gvisor=gvisor is not None),
        "Ulimits": [
            {"Name": "nofile", "Soft": OPEN_FILES, "Hard": OPEN_FILES},
            {"Name": "core", "Soft": 0, "Hard": 0},
            {"Name": "fsize", "Soft": limits.disk_mb * MIB, "Hard": limits.disk_mb * MIB},
        ],
        "IpcMode": "private",
        "CgroupnsMode": "private" if private_cgroup else "",
        "Init": False,  # the worker is PID 1 itself
        "RestartPolicy": {"Name": "no"},
        "LogConfig": {"Type": "none"},
        "Mounts": mounts,
        "Binds": [],
        "Devices": [],
        "PublishAllPorts": False,
        "PortBindings": {},
        "AutoRemove": False,  # how it ended is read before it goes
    }
