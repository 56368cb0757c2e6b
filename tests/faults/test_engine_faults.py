"""A server whose engine hangs, lies, answers errors, or loses its streams in mid call. A proxy stands between the two."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.runtime.test_docker_faults import EngineProxy
from tests.server_process import ServerProcess

pytestmark = pytest.mark.docker


class Between:
    """The proxy, in a loop of its own thread."""

    def __init__(self, path: Path) -> None:
        self.proxy = EngineProxy(path)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._run(self.proxy.open())

    def _run(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def cut(self, mode: str = "pass") -> None:
        """Break every stream that is open; new ones are served in `mode`."""
        self.proxy.mode = mode
        self._run(self.proxy.close())
        self._run(self.proxy.open())

    def close(self) -> None:
        self._run(self.proxy.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@pytest.fixture(scope="module")
def between(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Between]:
    between = Between(tmp_path_factory.mktemp("p") / "engine.sock")
    yield between
    between.close()


@pytest.fixture(scope="module")
def server(between: Between, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    settings = {
        "TOOLSERVER_RUNTIME__DOCKER_HOST": f"unix://{between.proxy.path}",
        "TOOLSERVER_RUNTIME__API_TIMEOUT_S": "4",
        "TOOLSERVER_POOL__ENABLED": "false",
    }
    process = ServerProcess("docker", tmp_path_factory.mktemp("engine-faults"), settings).start()
    yield process
    between.cut()
    assert process.stop() == 0


@pytest.fixture
def session(server: ServerProcess, between: Between) -> Iterator[str]:
    with server.client() as client:
        made = client.post("/v1/sessions", json={"images": ["workspace"], "ttl_s": 300})
        assert made.status_code == 201, made.text
        session = str(made.json()["id"])
        assert python(client, session, "open('kept', 'w').write('kept')").status_code == 200
        yield session
        between.cut()
        client.delete(f"/v1/sessions/{session}")
    server.wait_no_leftovers(session, 30)


def python(client: httpx.Client, session: str, code: str, **times: float) -> httpx.Response:
    return client.post(f"/v1/sessions/{session}/tools/python_execute", json={"arguments": {"code": code}, **times})


def usable(client: httpx.Client, session: str, within_s: float = 30) -> None:
    until = time.monotonic() + within_s
    while (answer := python(client, session, "print(open('kept').read(), 40 + 2)")).status_code != 200:
        assert answer.status_code == 503, answer.text
        assert time.monotonic() < until
        time.sleep(0.3)
    assert "kept 42" in answer.text


def test_streams_that_break_in_mid_call_never_make_half_an_answer(
    server: ServerProcess, between: Between, session: str
) -> None:
    code = "import time\nfor n in range(40): print('line', n, flush=True); time.sleep(0.1)\nopen('ran', 'a').write('x'); 'whole'"
    with server.client() as client, ThreadPoolExecutor(1) as pool:
        running = pool.submit(python, client, session, code, wait_s=60)
        time.sleep(1.5)
        between.cut()
        answer = running.result(60)
        if answer.status_code == 200:  # attached again
            assert "whole" in answer.text
            assert "line 39" in answer.text
        else:
            detail = answer.json()["detail"]
            assert (answer.status_code, detail["effects"]) == (500, "possible"), answer.text
        usable(client, session)


@pytest.mark.parametrize("mode", ["hang", "rubbish", "error"])
def test_an_engine_that_hangs_lies_or_errs_is_503_in_bounded_time_and_blocks_nobody(
    server: ServerProcess, between: Between, session: str, mode: str
) -> None:
    with server.client() as client, ThreadPoolExecutor(2) as pool:
        between.cut(mode)
        begun = time.monotonic()
        asked = [pool.submit(client.post, "/v1/sessions", json={"images": ["workspace"]}) for _ in range(2)]
        longest = 0.0
        while not all(one.done() for one in asked):
            before = time.monotonic()
            assert client.get("/healthz").status_code == 200
            longest = max(longest, time.monotonic() - before)
            time.sleep(0.05)
        for one in asked:
            answer = one.result()
            assert (answer.status_code, answer.json()["detail"]["code"]) == (503, "runtime_unavailable"), answer.text
            assert str(between.proxy.path) not in answer.text
        assert time.monotonic() - begun < 40
        assert longest < 3, "the event loop was blocked"
        between.cut()
        usable(client, session)
