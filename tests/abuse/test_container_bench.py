"""The container checks of the CIS Docker Benchmark (its section 5, as docker-bench-security asks them), on a live sandbox.

Two are not met, on purpose. 5.2, SELinux or AppArmor options: what confines here are our own seccomp filter, no capability and
a read-only root; a label that the host does not know would keep sandboxes from starting. 5.27, a health check: the server talks
to each worker all the time, and a health check would be an exec in the sandbox. 5.26 (restart policy of the checks before 1.6) and 5.30
(the default bridge) hold because there is no restart and no network.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server_process import ServerProcess

pytestmark = [pytest.mark.docker, pytest.mark.parametrize("server", ["docker"], indirect=True, scope="session")]
ACCEPTED = {"5.2", "5.27"}
SENSITIVE = ("/", "/boot", "/dev", "/etc", "/lib", "/proc", "/sys", "/usr", "/var", "/run")
DEFAULT_SHM = 64 << 20

Told = dict[str, Any]
CHECKS: dict[str, tuple[str, Callable[[Told], bool]]] = {
    "5.1": ("AppArmor is not switched off", lambda c: not has(c, "apparmor=unconfined", "apparmor:unconfined")),
    "5.2": ("SELinux options are set", lambda c: has(c, "label")),
    "5.3": (
        "no capability is added",
        lambda c: not c["HostConfig"]["CapAdd"] and c["HostConfig"]["CapDrop"] == ["ALL"],
    ),
    "5.4": ("it is not privileged", lambda c: c["HostConfig"]["Privileged"] is False),
    "5.5": (
        "no sensitive folder of the host is mounted",
        lambda c: not [m for m in c["Mounts"] if m["Type"] == "bind" or m["Source"] in SENSITIVE],
    ),
    "5.6": ("no SSH server runs in it", lambda c: "sshd" not in processes(c)),
    "5.7": ("no privileged port is mapped", lambda c: not c["NetworkSettings"]["Ports"]),
    "5.8": (
        "no port is open without need",
        lambda c: not c["HostConfig"]["PortBindings"] and not c["HostConfig"]["PublishAllPorts"],
    ),
    "5.9": ("it has not the host's network", lambda c: c["HostConfig"]["NetworkMode"] == "none"),
    "5.10": ("memory is limited", lambda c: 0 < c["HostConfig"]["Memory"] == c["HostConfig"]["MemorySwap"]),
    "5.11": ("processor time is limited", lambda c: c["HostConfig"]["NanoCpus"] > 0),
    "5.12": ("its root is read-only", lambda c: c["HostConfig"]["ReadonlyRootfs"] is True),
    "5.13": ("ports are bound to one interface", lambda c: not c["NetworkSettings"]["Ports"]),
    "5.14": ("it is not restarted for ever", lambda c: c["HostConfig"]["RestartPolicy"]["Name"] in ("", "no")),
    "5.15": ("it has not the host's processes", lambda c: c["HostConfig"]["PidMode"] == ""),
    "5.16": ("it has not the host's IPC", lambda c: c["HostConfig"]["IpcMode"] == "private"),
    "5.17": ("no device of the host is in it", lambda c: not c["HostConfig"]["Devices"]),
    "5.18": (
        "its own limits are set",
        lambda c: {"nofile", "core", "fsize"} <= {u["Name"] for u in c["HostConfig"]["Ulimits"]},
    ),
    "5.19": (
        "no mount is shared",
        lambda c: not [m for m in c["Mounts"] if m.get("Propagation") in ("shared", "rshared")],
    ),
    "5.20": ("it has not the host's UTS namespace", lambda c: c["HostConfig"]["UTSMode"] == ""),
    "5.21": ("seccomp is not switched off", lambda c: has(c, "seccomp=") and not has(c, "seccomp=unconfined")),
    "5.22": ("no exec is privileged", lambda c: not c["ExecIDs"]),
    "5.23": ("no exec is of root", lambda c: not c["ExecIDs"] and not c["Config"]["User"].startswith(("0", "root"))),
    "5.24": ("its control group is the engine's", lambda c: c["HostConfig"]["CgroupParent"] == ""),
    "5.25": ("no new privileges", lambda c: has(c, "no-new-privileges")),
    "5.26": ("no restart is left to the engine", lambda c: c["HostConfig"]["RestartPolicy"]["MaximumRetryCount"] <= 5),
    "5.27": (
        "its health is checked by the engine",
        lambda c: (c["Config"].get("Healthcheck") or {}).get("Test", ["NONE"]) != ["NONE"],
    ),
    "5.28": ("processes are limited", lambda c: 0 < c["HostConfig"]["PidsLimit"] < 2048),
    "5.29": (
        "it is not on the default bridge",
        lambda c: not [n for n in c["NetworkSettings"]["Networks"] if n != "none"],
    ),
    "5.30": ("it has not the host's users", lambda c: c["HostConfig"]["UsernsMode"] != "host"),
    "5.31": (
        "the engine's socket is not in it",
        lambda c: not [m for m in c["Mounts"] if "docker.sock" in m["Source"]],
    ),
}


def has(told: Told, *options: str) -> bool:
    return any(given.startswith(option) for given in told["HostConfig"]["SecurityOpt"] for option in options)


def processes(told: Told) -> str:
    return subprocess.run(
        ["docker", "top", told["Id"], "-o", "pid,comm"], capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture(scope="module")
def sandbox(server: ServerProcess) -> Iterator[Told]:
    with server.client() as client:
        session = str(client.post("/v1/sessions", json={"images": ["workspace"]}).json()["id"])
        client.post(
            f"/v1/sessions/{session}/tools/python_execute", json={"arguments": {"code": "1"}}
        ).raise_for_status()
        told = subprocess.run(
            ["docker", "inspect", *server.containers(session)], capture_output=True, check=True
        ).stdout
        yield json.loads(told)[0]
        client.delete(f"/v1/sessions/{session}")


@pytest.mark.parametrize("number", CHECKS)
def test_a_check_of_the_benchmark_holds(sandbox: Told, number: str) -> None:
    told, holds = CHECKS[number]
    assert holds(sandbox) == (number not in ACCEPTED), told
