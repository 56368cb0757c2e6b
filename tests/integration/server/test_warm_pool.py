"""The warm pool with containers of a real engine: what a claim binds holds, and nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import docker
import docker.errors
import httpx
import pytest

from tests.server_process import ServerProcess
from toolserver.app import server_id

pytestmark = pytest.mark.docker
READY_S = 60
INSIDE = """
import glob, json, os
def read(*names):
    for name in names:
        if os.path.exists(name):
            return open(name).read().split()
print(json.dumps({
    "memory": read("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"),
    "pids": read("/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids/pids.max"),
    "quota": read("/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us"),
    "token": os.environ.get("TOKEN"), "threads": os.environ.get("OMP_NUM_THREADS"), "files": os.listdir("/workspace"),
}))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess("docker", tmp_path_factory.mktemp("pool"), {"TOOLSERVER_POOL__MAX": "2"}).start()
    yield process
    process.end()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def until_ready(client: httpx.Client) -> None:
    until = time.monotonic() + READY_S
    while "toolserver_pool_ready 0" in client.get("/metrics").text:
        assert time.monotonic() < until, "the pool stays empty"
        time.sleep(0.05)


def create(client: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/sessions", json={"images": ["workspace"], **body})
    assert answer.status_code == 201, answer.text
    told: dict[str, Any] = answer.json()
    return told


def python(client: httpx.Client, session: dict[str, Any], code: str) -> str:
    answer = client.post(f"/v1/sessions/{session['id']}/tools/python_execute", json={"arguments": {"code": code}})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["content"][0]["text"])


def of_this_server(server: ServerProcess, engine: docker.DockerClient) -> list[Any]:
    """Containers and volumes."""
    mine: dict[str, Any] = {"label": f"toolcrib.server={server_id(server.folder / 'state')}"}
    return [*engine.containers.list(all=True, filters=mine, ignore_removed=True), *engine.volumes.list(filters=mine)]


def container(engine: docker.DockerClient, sandbox_id: str) -> Any:
    (found,) = engine.containers.list(filters={"label": f"toolcrib.sandbox={sandbox_id}"})
    return found


def test_a_claim_binds_environment_and_limits(client: httpx.Client, engine: docker.DockerClient) -> None:
    until_ready(client)
    limits = {"memory_mb": 1536, "cpus": 0.5, "pids": 77}
    session = create(client, limits=limits, env={"TOKEN": "only-here"})
    (sandbox,) = session["sandboxes"]
    assert sandbox["start"] == "warm"
    assert {name: session["limits"][name] for name in limits} == limits
    held = container(engine, sandbox["sandbox_id"]).attrs["HostConfig"]
    assert (held["Memory"], held["MemorySwap"]) == (1536 << 20, 1536 << 20)
    assert (held["NanoCpus"], held["PidsLimit"]) == (500_000_000, 77)
    seen = json.loads(python(client, session, INSIDE))
    assert (seen["token"], seen["threads"], seen["files"]) == ("only-here", "1", [])
    assert seen["memory"] == [str(1536 << 20)]
    assert seen["pids"] == ["77"]
    assert seen["quota"][0] == "50000"
    client.delete(f"/v1/sessions/{session['id']}")


def test_no_session_finds_anything_of_another(client: httpx.Client) -> None:
    until_ready(client)
    first = create(client, env={"TOKEN": "first"})
    python(client, first, "open('/workspace/secret', 'w').write('mine'); open('/tmp/secret', 'w').write('mine')")
    client.delete(f"/v1/sessions/{first['id']}")
    until_ready(client)
    second = create(client)
    assert second["sandboxes"][0]["sandbox_id"] != first["sandboxes"][0]["sandbox_id"]
    seen = python(
        client, second, "import os; print(os.environ.get('TOKEN'), os.path.exists('/tmp/secret'), os.listdir())"
    )
    assert seen.split() == ["None", "False", "[]"]
    client.delete(f"/v1/sessions/{second['id']}")


def test_containers_of_the_pool_that_were_killed_by_hand_are_not_given_out(
    client: httpx.Client, server: ServerProcess, engine: docker.DockerClient
) -> None:
    until_ready(client)
    for one in of_this_server(server, engine):
        if hasattr(one, "kill"):
            with contextlib.suppress(docker.errors.APIError):  # of a session that has just been closed
                one.kill()
    session = create(client)
    assert python(client, session, "print('alive')").strip() == "alive"
    client.delete(f"/v1/sessions/{session['id']}")


def test_after_kill_9_the_spares_are_gone_and_the_pool_fills_again(
    server: ServerProcess, engine: docker.DockerClient
) -> None:
    with server.client() as client:
        until_ready(client)
    # the volume with the doors to the egress proxy is the next server's too
    before = {one.name for one in of_this_server(server, engine) if not one.name.endswith("-egress")}
    server.kill()
    assert {one.name for one in of_this_server(server, engine)} & before
    server.start()
    with server.client() as client:
        until_ready(client)
        assert create(client)["sandboxes"][0]["start"] == "warm"
    until = time.monotonic() + READY_S
    while {one.name for one in of_this_server(server, engine)} & before:
        assert time.monotonic() < until, "spares of the killed server are still there"
        time.sleep(0.2)


def test_a_shutdown_leaves_nothing(server: ServerProcess, engine: docker.DockerClient) -> None:
    with server.client() as client:
        until_ready(client)
        create(client)
    assert server.stop() == 0
    assert of_this_server(server, engine) == []
    server.start()


@pytest.fixture(scope="module")
def engine() -> Iterator[docker.DockerClient]:
    client = docker.from_env()
    yield client
    client.close()
