"""Event streams of real sandboxes: slow readers, floods, shutdown, and what a cancel leaves behind."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
import pytest

from tests.server_process import ServerProcess

RUNTIMES = [pytest.param("docker", marks=pytest.mark.docker), pytest.param("bubblewrap", marks=pytest.mark.bubblewrap)]
EVENTS = {"Accept": "text/event-stream"}
GROWTH_MIB = 64


@pytest.fixture(params=RUNTIMES, scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(request.param, tmp_path_factory.mktemp("streams")).start()
    yield process
    process.end()


@dataclass(frozen=True)
class Heard:
    name: str
    data: Any
    id: int | None


def tools_path(client: httpx.Client, **body: Any) -> str:
    answer = client.post("/v1/sessions", json={"ttl_s": 600, "images": ["workspace"], **body})
    assert answer.status_code == 201, answer.text
    return f"/v1/sessions/{answer.json()['id']}/tools/python_execute"


def events(answer: httpx.Response) -> Iterator[Heard]:
    assert answer.status_code == 200, answer.read()
    fields: dict[str, str] = {}
    for line in answer.iter_lines():
        if line and not line.startswith(":"):
            name, _, value = line.partition(": ")
            fields[name] = value
        elif fields:
            yield Heard(fields["event"], json.loads(fields["data"]), int(fields["id"]) if "id" in fields else None)
            fields = {}


class Watch:
    """The most memory that a server takes within the block, in MiB more than at its start."""

    def __init__(self, server: ServerProcess) -> None:
        self._server, self._begun, self.growth = server, server.resident_mib(), 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_told: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.05):
            self.growth = max(self.growth, self._server.resident_mib() - self._begun)


def flood(mib: int) -> str:
    return f"import sys\nfor _ in range({mib}):\n    sys.stdout.write('x' * 1023 * 1024 + '\\n' * 1024)\n"


def test_a_slow_reader_of_200_mib_costs_nothing_and_is_told_what_it_missed(server: ServerProcess) -> None:
    with server.client() as client:
        path = tools_path(client)
        assert client.post(path, json={"arguments": {"code": "1"}}).status_code == 200
        parts = urlsplit(server.url)
        body = json.dumps({"arguments": {"code": flood(200)}, "deadline_s": 120}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.key}\r\nAccept: text/event-stream\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with Watch(server) as watch, socket.create_connection((parts.hostname or "", parts.port or 0)) as wire:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            wire.settimeout(60)
            wire.sendall(head.encode() + body)
            heard = b""
            begun = time.monotonic()
            while b"event: outcome" not in heard[-400_000:]:
                heard += wire.recv(65536)
                time.sleep(0.02 if time.monotonic() - begun < 4 else 0)
        assert watch.growth < GROWTH_MIB
    assert b"event: lost" in heard
    assert heard.count(b"event: stdout") > 5
    lost = sum(int(part.split(b"}")[0]) for part in heard.split(b'{"bytes":')[1:])
    shown = heard.count(b"x" * 1000) * 1000
    assert 150 << 20 < lost + shown < 201 << 20


def test_a_flood_of_1_gib_from_eight_sessions_leaves_the_server_flat(server: ServerProcess) -> None:
    def run(path: str, by_events: bool) -> tuple[int, int]:
        with server.client() as client:
            body = {"arguments": {"code": flood(128)}, "wait_s": 100, "deadline_s": 110}
            if not by_events:
                answer = client.post(path, json=body, timeout=110)
                return answer.status_code, answer.json()["truncated"]["bytes_total"]
            with client.stream("POST", path, json=body, headers=EVENTS, timeout=110) as stream:
                *_, last = events(stream)
            return last.data["status"], last.data["body"]["truncated"]["bytes_total"]

    with server.client() as client, ThreadPoolExecutor(8) as pool:
        paths = [tools_path(client, limits={"disk_mb": 256}) for _ in range(8)]
        for path in paths:
            assert client.post(path, json={"arguments": {"code": "1"}}).status_code == 200
        with Watch(server) as watch:
            answers = list(pool.map(run, paths, [True, False] * 4))
        assert [status for status, _ in answers] == [200] * 8
        assert all(total == 128 << 20 for _, total in answers)
        assert watch.growth < GROWTH_MIB
        for path in paths:
            assert client.delete(path.rpartition("/tools")[0]).status_code == 204


def test_ten_quick_calls_after_each_cancel_are_answered(server: ServerProcess) -> None:
    with server.client() as client, ThreadPoolExecutor(4) as pool:
        path = tools_path(client)
        body = {"arguments": {"code": "import time; print('begun', flush=True); time.sleep(60)"}}
        for round_ in range(50 if server.runtime == "bubblewrap" else 15):
            key = f"cancelled-{server.runtime}-{round_}"
            with client.stream("POST", path, json=body, headers={**EVENTS, "Idempotency-Key": key}) as stream:
                following = events(stream)
                while next(following).name != "stdout":
                    pass
                told = client.delete(f"/v1/calls/{key}").json()
                assert (told["cancelled"], told["cancelled_by"]) == (True, "caller"), told
                *_, last = following
            assert last.data["body"]["detail"]["code"] == "cancelled"
            quick = [pool.submit(client.post, path, json={"arguments": {"code": "6 * 7"}}) for _ in range(10)]
            assert {answer.result().status_code for answer in quick} == {200}


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_sigterm_with_a_running_call_and_an_open_stream_ends_within_ten_seconds(runtime: str, tmp_path: Path) -> None:
    server = ServerProcess(runtime, tmp_path).start()
    heard: list[Heard] = []

    def follow(path: str) -> None:
        code = "import time\nwhile True:\n    print('going', flush=True)\n    time.sleep(0.2)"
        with (
            server.client() as client,
            client.stream("POST", path, json={"arguments": {"code": code}}, headers=EVENTS) as stream,
        ):
            heard.extend(events(stream))

    try:
        with server.client() as client:
            path = tools_path(client)
        follower = threading.Thread(target=follow, args=(path,))
        follower.start()
        time.sleep(2)
        begun = time.monotonic()
        assert server.stop() == 0
        took = time.monotonic() - begun
        assert took < 10
        follower.join(5)
    finally:
        server.end()
    assert heard[-1].name == "outcome"
    told = heard[-1].data["body"]["detail"]
    assert (told["code"], told["cancelled_by"]) == ("cancelled", "shutdown")
    assert "going" in json.dumps(told["content"])
    server.wait_no_leftovers(path.split("/")[3])


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_stream_of_a_running_call_goes_on_after_the_server_was_killed(runtime: str, tmp_path: Path) -> None:
    server = ServerProcess(runtime, tmp_path).start()
    code = "import time\nfor n in range(40):\n    print(f'line {n}', flush=True)\n    time.sleep(0.2)\n'whole'"
    head = {**EVENTS, "Idempotency-Key": "survivor"}
    had: list[Heard] = []
    try:
        with server.client() as client:
            path = tools_path(client)
            with client.stream("POST", path, json={"arguments": {"code": code}}, headers=head) as stream:
                for event in events(stream):
                    had.append(event)
                    if len(had) > 5:
                        server.kill()
                        break
        server.start()
        goes_on = {**EVENTS, "Last-Event-ID": str(had[-1].id)}
        with server.client() as client, client.stream("GET", "/v1/calls/survivor", headers=goes_on) as stream:
            rest = list(events(stream))
        text = "".join(event.data["text"] for event in [*had, *rest] if event.name == "stdout")
        assert text == "".join(f"line {n}\n" for n in range(40))
        assert rest[0].data["call_id"] == "survivor"
        assert (rest[-1].name, rest[-1].data["status"]) == ("outcome", 200)
        assert "whole" in json.dumps(rest[-1].data)
    finally:
        server.end()
    server.wait_no_leftovers(path.split("/")[3])
