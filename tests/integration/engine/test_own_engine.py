"""An engine that is stopped, killed and restarted under a server's hands, and one that has gVisor.

All on one engine of the module's own, in a network namespace of its own: each test starts with it running.
"""

from __future__ import annotations

import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.own_engine import NO_RUNSC, RUNSC, OwnEngine, why_not
from tests.server_process import ServerProcess
from toolserver.errors import ImageUnusable
from toolserver.runtime.base import Limits, SandboxSpec
from toolserver.runtime.docker_runtime import DockerRuntime
from toolserver.settings import RuntimeSettings

pytestmark = [pytest.mark.docker, pytest.mark.timeout(400), pytest.mark.skipif(bool(why_not()), reason=why_not())]
needs_runsc = pytest.mark.skipif(bool(NO_RUNSC), reason=NO_RUNSC)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnEngine]:
    engine = OwnEngine(tmp_path_factory.mktemp("engine"), {"runtimes": {"runsc": RUNSC}} if RUNSC["path"] else {})
    try:
        engine.start().load(*(f"toolcrib/{name}:{version('toolcrib')}" for name in ("workspace", "launcher", "egress")))
        yield engine
    finally:
        engine.close()


def serve(engine: OwnEngine, folder: Path, **settings: str) -> ServerProcess:
    told = {f"TOOLSERVER_{name}": value for name, value in {"POOL__ENABLED": "false", **settings}.items()}
    return ServerProcess("docker", folder, {"TOOLSERVER_RUNTIME__DOCKER_HOST": engine.host, **told})


@pytest.fixture
def server(engine: OwnEngine, tmp_path: Path) -> Iterator[ServerProcess]:
    process = serve(engine, tmp_path).start()
    yield process
    process.end()
    wait_empty(engine)


def wait_empty(engine: OwnEngine, limit_s: float = 20, *, ended: bool = True) -> None:
    """Of servers that have not ended all but the volume with the doors to the egress proxy, which lives as long as they."""
    until = time.monotonic() + limit_s

    def volumes() -> list[str]:
        return [
            name for name in engine.docker("volume", "ls", "--quiet").split() if ended or not name.endswith("-egress")
        ]

    while left := engine.docker("ps", "--all", "--quiet").split() + volumes():
        assert time.monotonic() < until, left
        time.sleep(0.2)


def open_session(client: httpx.Client, **limits: Any) -> str:
    answer = client.post("/v1/sessions", json={"images": ["workspace"], "ttl_s": 600, "limits": limits})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def call(client: httpx.Client, session: str, tool: str, **arguments: Any) -> httpx.Response:
    times = {name: arguments.pop(name) for name in ("wait_s", "deadline_s") if name in arguments}
    return client.post(f"/v1/sessions/{session}/tools/{tool}", json={"arguments": arguments, **times})


def usable(client: httpx.Client, session: str, within_s: float = 30) -> httpx.Response:
    """The session's next good answer; until then nothing but honest refusals."""
    until = time.monotonic() + within_s
    while True:
        answer = call(client, session, "python_execute", code="print(open('kept').read(), 40 + 2)")
        if answer.status_code == 200:
            return answer
        assert answer.status_code == 503, answer.text
        assert int(answer.headers["Retry-After"]) >= 1
        assert time.monotonic() < until, answer.text
        time.sleep(0.3)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
def test_an_engine_that_ends_in_mid_call_is_never_a_success_and_work_goes_on_when_it_is_back(
    engine: OwnEngine, server: ServerProcess, number: int
) -> None:
    key = str(uuid.uuid4())
    with server.client() as client, ThreadPoolExecutor(1) as pool:
        session = open_session(client)
        code = "import time\nwith open('kept', 'a') as f: f.write('once ')\nprint('so far', flush=True); time.sleep(60)"
        body = {"arguments": {"code": code}, "wait_s": 60}
        path, head = f"/v1/sessions/{session}/tools/python_execute", {"Idempotency-Key": key}
        running = pool.submit(client.post, path, json=body, headers=head)
        until = time.monotonic() + 20
        while client.get(f"/v1/sessions/{session}/files/kept").content != b"once ":
            assert time.monotonic() < until
            time.sleep(0.2)
        engine.end(number)
        try:
            answer = running.result(40)
            detail = answer.json()["detail"]
            assert (answer.status_code, detail["effects"]) == (500, "possible"), answer.text
            assert detail["code"] in ("outcome_unknown", "tool_crashed")
            away = call(client, session, "python_execute", code="1")
            assert (away.status_code, away.json()["detail"]["code"]) == (503, "runtime_unavailable"), away.text
            assert client.get("/healthz").status_code == 200
            assert client.get("/readyz").status_code == 503
        finally:
            engine.start()
        assert "once  42" in usable(client, session).text
        assert client.post(path, json=body, headers=head).status_code == 500  # not run again
        assert len(engine.docker("ps", "--quiet").split()) == 1
        assert client.delete(f"/v1/sessions/{session}").status_code == 204
        wait_empty(engine, ended=False)


def test_an_engine_with_live_restore_is_restarted_and_the_session_has_one_sandbox(
    engine: OwnEngine, tmp_path: Path
) -> None:
    engine.end()
    engine.set("live-restore", True)
    server = serve(engine.start(), tmp_path)
    try:
        server.start()
        with server.client() as client:
            created = client.post("/v1/sessions", json={"images": ["workspace"]}).json()
            assert created["isolation"]["disk"] == "accounted by the worker"
            session = str(created["id"])
            code = "x = 1; open('kept', 'w').write('kept')"
            assert call(client, session, "python_execute", code=code).status_code == 200
            engine.end()
            assert engine.containers_run(), "live-restore did not keep the sandbox"
            engine.start()
            assert "kept 42" in usable(client, session).text
            assert len(engine.docker("ps", "--all", "--quiet").split()) == 1
            assert client.delete(f"/v1/sessions/{session}").status_code == 204
            wait_empty(engine, ended=False)
    finally:
        server.end()
        engine.end()
        engine.set("live-restore", False)
        engine.start()


# -- the way out, with a proxy that has no network: what it denies and what it can't find tells that it was asked

ASK = """
import urllib.request, urllib.error
for url in ('http://listed.example/', 'http://other.example/'):
    try:
        urllib.request.urlopen(url, timeout=30)
    except urllib.error.HTTPError as no:
        print(no.code, no.headers['X-Toolcrib-Denied'], no.headers['X-Toolcrib-Error'])
"""
ANSWERS = ["502 None no_address", "403 not_allowed None"]


def open_session_with_egress(client: httpx.Client) -> httpx.Response:
    body = {"images": ["workspace"], "ttl_s": 600, "egress": {"allow": ["listed.example"]}}
    return client.post("/v1/sessions", json=body)


def asked(client: httpx.Client, session: str) -> list[str]:
    answer = call(client, session, "python_execute", code=ASK, wait_s=90)
    return str(answer.json()["structured"]["stdout"]).splitlines() if answer.status_code == 200 else [answer.text]


def test_the_way_out_is_there_again_after_the_engine_was_restarted(engine: OwnEngine, tmp_path: Path) -> None:
    server = serve(engine, tmp_path, EGRESS__DOCKER_NETWORK="none").start()
    try:
        with server.client() as client:
            session = open_session_with_egress(client).json()["id"]
            assert asked(client, session) == ANSWERS
            engine.end()
            engine.start()
            until = time.monotonic() + 60
            while (told := asked(client, session)) != ANSWERS:
                assert time.monotonic() < until, told
                time.sleep(0.5)
            client.delete(f"/v1/sessions/{session}")
    finally:
        server.end()
        wait_empty(engine)


# -- gVisor


@pytest.fixture(scope="module")
def gvisor(engine: OwnEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = serve(engine, tmp_path_factory.mktemp("gvisor"), RUNTIME__ISOLATION="require-gvisor").start()
    yield process
    process.end()


@needs_runsc
def test_tools_work_on_gvisors_kernel(engine: OwnEngine, gvisor: ServerProcess) -> None:
    with gvisor.client() as client:
        created = client.post("/v1/sessions", json={"images": ["workspace"]})
        assert created.json()["isolation"]["kernel"] == "gvisor"
        session = str(created.json()["id"])
        seen = call(client, session, "python_execute", code="x = 41; print(open('/proc/version').read())")
        assert "Linux version 4.4.0" in seen.text
        assert "42" in call(client, session, "python_execute", code="x + 1").text
        shell = call(client, session, "shell_execute", command="(setsid sleep 300 &) ; echo out-1 | cat; exit 3")
        assert (shell.status_code, shell.json()["detail"]["exit_code"]) == (500, 3), shell.text
        assert "out-1" in shell.text
        assert call(client, session, "file_write", path="a/b.txt", content="hello").status_code == 200
        assert "hello" in call(client, session, "file_search", pattern="hel+o").text
        assert "b.txt" in call(client, session, "file_list", path="a").text
        path = f"/v1/sessions/{session}/files/big"
        assert client.put(path, content=b"x" * 3_000_000).status_code == 201
        assert client.get(path).content == b"x" * 3_000_000
        left = call(client, session, "shell_execute", command="cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        assert "sleep 300" not in left.text
        assert client.delete(f"/v1/sessions/{session}").status_code == 204
        wait_empty(engine, ended=False)


@needs_runsc
def test_sessions_on_gvisor_have_a_way_out_where_it_may_open_sockets(engine: OwnEngine, tmp_path: Path) -> None:
    told = {"RUNTIME__ISOLATION": "require-gvisor", "EGRESS__DOCKER_NETWORK": "none"}
    server = serve(engine, tmp_path / "open", **told).start()
    try:
        with server.client() as client:
            session = open_session_with_egress(client).json()["id"]
            assert asked(client, session) == ANSWERS
    finally:
        server.end()
    closed = {**RUNSC, "runtimeArgs": [one for one in RUNSC["runtimeArgs"] if "uds" not in one]}
    engine.end()
    engine.set("runtimes", {"runsc": closed})
    engine.start()
    server = serve(engine, tmp_path / "closed", **told)
    try:
        server.start()
        with server.client() as client:
            refused = open_session_with_egress(client)
            assert refused.status_code == 503, refused.text
            assert "--host-uds=open" in refused.json()["detail"]["message"]
    finally:
        server.end()
        engine.end()
        engine.set("runtimes", {"runsc": RUNSC})
        engine.start()


GREEDY = "import os\nkept = [bytearray(os.urandom(16 << 20)) for n in range(60)]"
FORKS = """
import os, time
made = 0
try:
    for n in range(3000):
        if os.fork() == 0: time.sleep(30); os._exit(0)
        made += 1
except OSError: pass
print(made)
"""
ATTACKS = {
    "endless loop": ("while True: pass", {"deadline_exceeded"}),
    "ignores signals": (
        "import signal\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        {"deadline_exceeded"},
    ),
    "all memory": (GREEDY, {"oom_killed", "tool_failed"}),
    "kill all": ("import os; os.kill(-1, 9)", {"tool_crashed", "tool_failed"}),
    "forks": (FORKS, {"", "tool_crashed", "tool_failed", "deadline_exceeded", "outcome_unknown", "oom_killed"}),
    "flood": ("while True: print('x' * 10 ** 6)", {"deadline_exceeded", "disk_full"}),
    "crash": ("import ctypes; ctypes.string_at(0)", {"tool_crashed"}),
    "full disk": ("for n in range(200):\n    with open(f'f{n}', 'wb') as f: f.write(b'x' * (1 << 20))", {"disk_full"}),
    "network": ("import socket; socket.create_connection(('192.0.2.1', 80), 2)", {"tool_failed"}),
    "engine": ("open('/var/run/docker.sock')", {"tool_failed"}),
}


@needs_runsc
@pytest.mark.parametrize(("code", "expected"), ATTACKS.values(), ids=ATTACKS.keys())
def test_attacks_end_the_same_way_on_gvisor_and_the_session_goes_on(
    engine: OwnEngine, gvisor: ServerProcess, code: str, expected: set[str]
) -> None:
    deadline_s = 4 if "deadline_exceeded" in expected else 60
    with gvisor.client(timeout=120) as client:
        session = open_session(client, memory_mb=512, pids=64, disk_mb=48)
        try:
            answer = call(client, session, "python_execute", code=code, deadline_s=deadline_s, wait_s=100)
            ended = answer.json().get("detail", {}).get("code", "")
            assert ended in expected, answer.text[:600]
            for _ in range(
                3
            ):  # at its process limit gVisor ends a moment later, perhaps in the next call, and it says so
                after = call(
                    client, session, "shell_execute", command="rm -f f*; echo alive-$((40 + 2))", deadline_s=40
                )
                if after.status_code == 200:
                    break
                assert after.json()["detail"]["code"] in ("tool_crashed", "oom_killed", "outcome_unknown"), after.text
            assert "alive-42" in after.text, after.text
        finally:
            client.delete(f"/v1/sessions/{session}")
    wait_empty(engine, ended=False)


def test_gvisor_that_is_required_and_missing_refuses_and_preferred_says_so(tmp_path: Path) -> None:
    told = subprocess.run(
        ["docker", "info", "--format", "{{json .Runtimes}}"], capture_output=True, text=True, check=True
    )
    if "runsc" in told.stdout:
        pytest.skip("the machine's own engine has gVisor")
    required = ServerProcess("docker", tmp_path / "required", {"TOOLSERVER_RUNTIME__ISOLATION": "require-gvisor"})
    with pytest.raises(AssertionError, match="has no gVisor runtime"):
        required.start()
    assert required.process is not None
    assert required.process.wait(10) == 2
    preferred = ServerProcess(
        "docker", tmp_path / "preferred", {"TOOLSERVER_RUNTIME__ISOLATION": "prefer-gvisor"}
    ).start()
    try:
        assert "Weaker here: kernel: shared, though gVisor is preferred" in preferred.log()
        with preferred.client() as client:
            created = client.post("/v1/sessions", json={"images": ["workspace"]}).json()
            assert created["isolation"]["kernel"].startswith("shared, though gVisor is preferred")
            client.delete(f"/v1/sessions/{created['id']}")
    finally:
        preferred.end()


@needs_runsc
async def test_images_of_others_run_on_gvisor_too(engine: OwnEngine, tmp_path: Path) -> None:
    settings = RuntimeSettings(docker_host=engine.host, isolation="require-gvisor")
    runtime = DockerRuntime(f"test-{uuid.uuid4().hex[:12]}", tmp_path, settings)
    await runtime.open()
    launcher = f"toolcrib/launcher:{version('toolcrib')}"  # an image of static programs alone
    limits = Limits(memory_mb=128, cpus=1, pids=32, disk_mb=16)
    spec = SandboxSpec("box", "s1", "theirs", launcher, (), limits, workspace="none", foreign=True)
    try:
        script = 'cat; echo "$TOKEN" "$HOME" $(id -u); cat /proc/version; echo lost >&2; exit 7'
        command = await runtime.run(replace(spec, command=("/launcher/busybox", "sh", "-c", script)), {"TOKEN": "t 1"})
        await command.send(b"given\n")
        await command.end_input()
        said = [b"", b""]
        while (told := await command.receive_both())[0]:
            said[told[1]] += told[0]
        end = await command.remove()
        assert said[0].startswith(b"given\nt 1 /tmp 10001\nLinux version 4.4.0")
        assert said[1] == b"lost\n"
        assert (end.cause, end.exit_code) == ("exited", 7)
        sandbox = await runtime.start(replace(spec, sandbox_id="box2", command=("/launcher/busybox", "cat")))
        await sandbox.send(b"on and on\n")
        assert await sandbox.receive() == b"on and on\n"
        assert (await sandbox.remove()).cause == "killed"
        with pytest.raises(ImageUnusable, match="no program 'none'"):
            await runtime.start(replace(spec, sandbox_id="box3", command=("none",)))
    finally:
        await runtime.sweep()
        await runtime.close()
    wait_empty(engine, ended=False)
