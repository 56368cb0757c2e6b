"""What the doctor makes of hosts and engines that lack something."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from toolserver.doctor.check import Check
from toolserver.doctor.engine import engine_checks
from toolserver.doctor.examine import examine
from toolserver.doctor.host import host_checks
from toolserver.settings import Settings

GOOD: dict[str, Any] = {
    "ServerVersion": "28.0.0",
    "ApiVersion": "1.48",
    "Driver": "overlay2",
    "DriverStatus": [["Backing Filesystem", "xfs"]],
    "KernelVersion": "6.1.0",
    "CgroupVersion": "2",
    "CgroupDriver": "systemd",
    "MemoryLimit": True,
    "SwapLimit": True,
    "CpuCfsQuota": True,
    "PidsLimit": True,
    "SecurityOptions": ["name=apparmor", "name=seccomp,profile=builtin", "name=cgroupns"],
    "Runtimes": {"runc": {"path": "runc"}, "runsc": {"path": "/usr/bin/runsc"}},
    "LiveRestoreEnabled": True,
}


def engine(**changes: Any) -> dict[str, Check]:
    now = time.strftime("%Y-%m-%dT%H:%M:%S.123456789Z", time.gmtime())
    return {check.name: check for check in engine_checks({**GOOD, "SystemTime": now, **changes})}


def test_an_engine_that_has_all_gets_no_advice() -> None:
    assert {check.state for check in engine().values()} == {"ok"}
    assert "runsc" in engine()["engine: runtimes"].found


@pytest.mark.parametrize(
    ("changes", "name", "expected"),
    [
        ({"MemoryLimit": False, "PidsLimit": False}, "engine: control groups", "can't limit memory, pids"),
        (
            {"SecurityOptions": ["name=seccomp", "name=rootless"], "CgroupVersion": "1"},
            "engine: control groups",
            "rootless",
        ),
        ({"SecurityOptions": []}, "engine: security", "no seccomp"),
        ({"SystemTime": "2001-01-01T00:00:00Z"}, "engine: clock", "NTP"),
    ],
    ids=["limits", "rootless", "seccomp", "clock"],
)
def test_what_an_engine_lacks_is_named_with_what_to_do(changes: dict[str, Any], name: str, expected: str) -> None:
    found = engine(**changes)
    assert found[name].state == "weaker"
    assert expected in found[name].advice
    assert [check.name for check in found.values() if check.state != "ok"] == [name]


def host(settings: Settings, root: Path = Path("/")) -> dict[str, Check]:
    return {check.name: check for check in host_checks(settings, root)}


def test_a_host_without_anything_is_told_so(tmp_path: Path) -> None:
    found = host(Settings(state_dir=tmp_path / "state"), tmp_path)
    assert found["control groups"].state == found["seccomp"].state == "weaker"
    assert found["user namespaces"].found == "none may be made"


def test_doors_that_are_shut_to_users_are_named(tmp_path: Path) -> None:
    for name, text in (("user/max_user_namespaces", "500"), ("kernel/apparmor_restrict_unprivileged_userns", "1")):
        place = tmp_path / "proc/sys" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cgroup.controllers").write_text("cpu")
    found = host(Settings(state_dir=tmp_path / "state"), tmp_path)
    assert "apparmor_restrict_unprivileged_userns" in found["user namespaces"].found
    assert found["control groups"].found == "version 2"


def test_a_state_folder_that_is_open_or_can_not_be_made_is_told(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o755)
    assert "chmod 700" in host(Settings(state_dir=state))["state folder"].advice
    state.chmod(0o700)
    assert host(Settings(state_dir=state))["state folder"].state == "ok"
    (tmp_path / "file").touch()
    refused = host(Settings(state_dir=tmp_path / "file" / "state"))["state folder"]
    assert refused.state == "problem"
    assert "--state-dir" in refused.advice


DOCTOR = (sys.executable, "-m", "toolserver", "doctor", "--runtime")


def doctor(runtime: str, state: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [*DOCTOR, runtime, "--state-dir", str(state), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))


@pytest.mark.bubblewrap
def test_few_open_files_are_told_and_sandboxes_still_start(tmp_path: Path) -> None:
    done = doctor("bubblewrap", tmp_path, "--json", preexec_fn=few_files)
    found = json.loads(done.stdout)
    assert (done.returncode, found["problem"]) == (0, None), done.stdout
    assert any("open files" in warning and "get 512" in warning for warning in found["warnings"])


def test_an_engine_that_does_not_answer_is_a_problem_with_its_exit_code(tmp_path: Path) -> None:
    environment = {**os.environ, "TOOLSERVER_RUNTIME__DOCKER_HOST": f"unix://{tmp_path}/none.sock"}
    done = doctor("docker", tmp_path, env=environment)
    assert done.returncode == 5
    assert "problem: sandboxes: The Docker engine does not answer" in done.stdout


async def test_what_is_required_and_missing_is_a_problem(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path, runtime={"name": "fake", "isolation": "require-gvisor"})
    found = await examine(settings)
    assert "require-gvisor" in str(found["problem"])


@pytest.mark.docker
def test_people_get_a_table_and_advice(tmp_path: Path) -> None:
    done = doctor("docker", tmp_path)
    assert done.returncode in (0, 5), done.stderr
    for name in ("sandboxes: memory", "engine: control groups", "kernel", "room", "clock"):
        assert name in done.stdout
