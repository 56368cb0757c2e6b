"""Servers to attack, one a runtime, and the invariants that hold after each attack."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from importlib.metadata import version

import pytest

from tests.abuse.arena import Arena, Watch, check_body
from tests.own_engine import WITH_GVISOR, engine_with_gvisor
from tests.server_process import ServerProcess

GROWTH_MIB = 32


@pytest.fixture(
    scope="session",
    params=[
        pytest.param("docker", marks=pytest.mark.docker),
        pytest.param("bubblewrap", marks=pytest.mark.bubblewrap),
        *WITH_GVISOR,
    ],
)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp(f"abuse-{request.param}")
    with contextlib.ExitStack() as stack:
        if request.param == "gvisor":
            images = [f"toolcrib/{name}:{version('toolcrib')}" for name in ("workspace", "web")]
            engine = stack.enter_context(engine_with_gvisor(folder / "engine", *images))
            process = ServerProcess("docker", folder / "server", engine.on_gvisor)
        else:
            process = ServerProcess(request.param, folder)
        yield process.start()
        assert process.stop() == 0


@pytest.fixture(scope="session")
def neighbour(server: ServerProcess) -> Iterator[str]:
    with server.client() as client:
        answer = client.post("/v1/sessions", json={"ttl_s": 3600, "idle_s": 3600})
        assert answer.status_code == 201, answer.text
        session = str(answer.json()["id"])
        client.post(
            f"/v1/sessions/{session}/tools/python_execute", json={"arguments": {"code": "1"}}
        ).raise_for_status()
        yield session
        client.delete(f"/v1/sessions/{session}")


@pytest.fixture
def arena(server: ServerProcess, neighbour: str, request: pytest.FixtureRequest) -> Iterator[Arena]:
    """`@pytest.mark.parametrize("limits", ...)` is not needed: a test that wants other limits names them by `request.param`."""
    limits = getattr(request, "param", {})
    memory = server.resident_mib()
    with server.client() as client:
        answer = client.post("/v1/sessions", json={"ttl_s": 600, "limits": limits})
        assert answer.status_code == 201, answer.text
        arena = Arena(server, client, answer.json(), neighbour)
        with Watch(server, neighbour) as watch:
            yield arena
            check_alive(arena)
        assert not watch.problems, watch.problems[:3]
        for one in arena.answers:
            check_body(one, server)
        session = arena.id
        assert client.delete(arena.path).status_code == 204
        server.wait_no_leftovers(session)
        assert server.resident_mib() - memory < GROWTH_MIB


def check_alive(arena: Arena) -> None:
    """Invariants i and ii: the server is well, and the session works or is cleanly gone."""
    begun = time.monotonic()
    assert arena.client.get("/healthz").status_code == 200
    assert time.monotonic() - begun < 2
    begun = time.monotonic()
    body = {"arguments": {"code": "print('alive', 40 + 2)"}}
    answer = arena.client.post(f"{arena.path}/tools/python_execute", json=body)
    if answer.status_code == 410:
        return
    assert answer.status_code == 200, answer.text
    assert "alive 42" in answer.text
    assert time.monotonic() - begun < (20 if arena.server.on_gvisor else 6)
