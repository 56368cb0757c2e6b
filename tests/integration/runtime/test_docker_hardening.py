"""Every line of the hardening, as the engine itself tells it."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.conftest import REFERENCE
from tests.conformance.programs import ECHO
from toolserver.runtime.base import Limits, SandboxSpec
from toolserver.runtime.docker_runtime import DockerRuntime
from toolserver.runtime.hardening import create_request, egress_request, seccomp_profile
from toolserver.settings import RuntimeSettings

LIMITS = Limits(memory_mb=256, cpus=0.5, pids=48, disk_mb=32)
SPEC = SandboxSpec("box", "s1", "workspace", REFERENCE, ("python3", "-I", "-S", "-c", ECHO), LIMITS)

pytestmark = pytest.mark.docker


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[DockerRuntime]:
    runtime = DockerRuntime(f"test-{uuid.uuid4().hex[:12]}", tmp_path, RuntimeSettings())
    await runtime.open()
    await runtime.check()
    await runtime.create_workspace("s1", 16)
    yield runtime
    await runtime.sweep()
    await runtime.close()


async def _inspect(runtime: DockerRuntime) -> Any:
    found = await runtime.engine.call(
        lambda client: client.containers(all=True, filters={"label": "toolcrib.sandbox=box"})
    )
    mine = [c for c in found if c["Labels"]["toolcrib.server"] in runtime._prefix]
    assert len(mine) == 1
    return await runtime.engine.call(lambda client: client.inspect_container(mine[0]["Id"]))


async def test_the_engine_holds_a_sandbox_to_every_line(runtime: DockerRuntime) -> None:
    sandbox = await runtime.start(SPEC)
    told = await _inspect(runtime)
    await sandbox.remove()
    config, host = told["Config"], told["HostConfig"]
    memory = 256 << 20
    assert config["User"] == "10001:10001"
    assert config["Hostname"] == "sandbox"
    assert config["OpenStdin"] is True
    assert config["Tty"] is False
    assert config["Labels"]["toolcrib.workspace"] == "s1"
    assert config["Labels"]["toolcrib.image"] == "workspace"
    assert host["CapDrop"] == ["ALL"]
    assert not host["CapAdd"]
    assert host["Privileged"] is False
    options = dict(option.partition("=")[::2] for option in host["SecurityOpt"])
    assert set(options) == {"no-new-privileges", "seccomp"}
    assert json.loads(options["seccomp"]) == json.loads(seccomp_profile())
    assert host["ReadonlyRootfs"] is True
    assert host["NetworkMode"] == "none"
    assert host["Memory"] == host["MemorySwap"] == memory
    assert host["NanoCpus"] == 500_000_000
    assert host["PidsLimit"] == 48
    assert {(u["Name"], u["Soft"], u["Hard"]) for u in host["Ulimits"]} == {
        ("nofile", 1024, 1024),
        ("core", 0, 0),
        ("fsize", 32 << 20, 32 << 20),
    }
    assert host["IpcMode"] == "private"
    assert host["PidMode"] == host["UTSMode"] == host["UsernsMode"] == ""
    assert host["CgroupnsMode"] == "private"
    assert host["LogConfig"]["Type"] == "none"
    assert host["RestartPolicy"]["Name"] == "no"
    assert host["Init"] is False
    assert not host["Devices"]
    assert not host["Binds"]
    assert not host["PortBindings"]
    assert not told["NetworkSettings"]["Ports"]
    assert host["ShmSize"] == 32 << 20
    assert host["Tmpfs"] == {"/tmp": "rw,exec,nosuid,nodev,mode=1777,size=64m"}
    assert [(m["Type"], m["Destination"]) for m in told["Mounts"]] == [("volume", "/workspace")]


def test_temporary_folders_leave_room_in_the_memory_limit() -> None:
    for memory_mb in (64, 256, 8192):
        spec = SandboxSpec("b", "s", "w", "r:1", ("x",), Limits(memory_mb, 1, 16, 1))
        host = create_request(spec, labels={}, volume=None)["HostConfig"]
        tmp = int(host["Tmpfs"]["/tmp"].rsplit("size=", 1)[1].removesuffix("m"))
        assert tmp + (host["ShmSize"] >> 20) <= memory_mb // 2


@pytest.mark.parametrize("egress", [False, True])
def test_no_sandbox_has_a_network_and_doors_are_mounted_where_they_were_asked_for(egress: bool) -> None:
    spec = SandboxSpec("b", "s", "w", "r:1", ("x",), LIMITS, workspace="none", egress=egress)
    host = create_request(spec, labels={}, volume=None, doors="doors")["HostConfig"]
    assert host["NetworkMode"] == "none"
    assert [(one["Source"], one["Target"], one["ReadOnly"]) for one in host["Mounts"]] == (
        [("doors", "/.toolcrib/egress", True)] if egress else []
    )


def test_the_egress_proxy_is_held_to_all_but_the_network() -> None:
    request = egress_request("r:1", labels={}, doors="doors", network="bridge")
    host = request["HostConfig"]
    assert (request["User"], request["StdinOnce"], host["NetworkMode"]) == ("10002:10002", True, "bridge")
    assert (host["CapDrop"], host["ReadonlyRootfs"], host["Privileged"]) == (["ALL"], True, False)
    assert "no-new-privileges" in host["SecurityOpt"]
    assert host["Memory"] == host["MemorySwap"] == 256 << 20
    assert [(one["Source"], one["Target"]) for one in host["Mounts"]] == [("doors", "/egress")]


def test_the_profile_lets_no_dangerous_call_through() -> None:
    profile = json.loads(seccomp_profile())
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    allowed = {name for rule in profile["syscalls"] if rule["action"] == "SCMP_ACT_ALLOW" for name in rule["names"]}
    dangerous = {
        "mount",
        "unshare",
        "setns",
        "ptrace",
        "bpf",
        "keyctl",
        "add_key",
        "request_key",
        "perf_event_open",
        "userfaultfd",
    }
    dangerous |= {
        "io_uring_setup",
        "process_vm_readv",
        "kexec_load",
        "init_module",
        "open_by_handle_at",
        "pidfd_getfd",
        "clone3",
    }
    assert not dangerous & allowed
    families = [rule["args"][0]["value"] for rule in profile["syscalls"] if rule["names"] == ["socket"]]
    assert families == [1, 2, 10]


async def test_sweep_touches_no_container_of_others(runtime: DockerRuntime, tmp_path: Path) -> None:
    other = DockerRuntime(f"test-{uuid.uuid4().hex[:12]}", tmp_path, RuntimeSettings())
    await other.check()
    await other.create_workspace("s1", 16)
    theirs = await other.start(SPEC)
    mine = await runtime.start(SPEC)
    assert await runtime.sweep() == 2  # the sandbox and its workspace
    await theirs.send(b"still here\n")
    assert await theirs.receive() == b"still here\n"
    await mine.remove()
    await theirs.remove()
    await other.sweep()
    await other.close()


async def test_out_of_memory_is_told_from_a_kill(runtime: DockerRuntime) -> None:
    greedy = "kept = []\nwhile True: kept.append(b'1' * (1 << 20))"
    spec = SandboxSpec("box", "s1", "workspace", REFERENCE, ("python3", "-I", "-S", "-c", greedy), LIMITS)
    sandbox = await runtime.start(spec)
    assert await sandbox.receive() == b""
    assert (await sandbox.remove()).cause == "oom"


async def test_a_container_removed_by_an_operator_is_reported_as_removed(runtime: DockerRuntime) -> None:
    sandbox = await runtime.start(SPEC)
    found = await _inspect(runtime)
    await runtime.engine.call(lambda client: client.remove_container(found["Id"], force=True))
    assert await sandbox.receive() == b""
    assert (await sandbox.remove()).cause == "removed"


async def test_a_dozen_start_together(runtime: DockerRuntime) -> None:
    specs = [
        SandboxSpec(f"box{n}", "s1", "workspace", REFERENCE, SPEC.command, Limits(64, 0.5, 16, 8)) for n in range(12)
    ]
    sandboxes = await asyncio.gather(*(runtime.start(spec) for spec in specs))
    for sandbox in sandboxes:
        await sandbox.send(b"hello\n")
    assert [await sandbox.receive() for sandbox in sandboxes] == [b"hello\n"] * 12
    await asyncio.gather(*(sandbox.remove() for sandbox in sandboxes))
