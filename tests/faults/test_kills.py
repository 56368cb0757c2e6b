"""The server killed again and again, at random moments, with sessions and calls under way.

Each call appends a line to a file in its session's workspace before it ends. Whatever the moment of the kill: no call runs twice,
none that was answered 200 is lost, each that was left open is told of afterwards, and every live session goes on.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.faults.ready_to_fork import ForkedServer
from tests.server_process import ServerProcess

RUNTIMES = [pytest.param("docker", marks=pytest.mark.docker), pytest.param("bubblewrap", marks=pytest.mark.bubblewrap)]
SESSIONS, ROUNDS = 4, int(os.environ.get("TOOLCRIB_TEST_KILLS", "100"))
USABLE_S = 60.0  # none may hang; how soon they are is the benchmark's (benchmarks/ours.py)
CODE = "import time; n = globals().get('n', 0) + 1; open('ran', 'a').write({name!r} + '\\n'); time.sleep({seconds}); print({name!r}, n)"


@dataclass
class Driver:
    """One session's client: makes one call after the other, and remembers what it was told of each."""

    server: ServerProcess
    session: str
    name: str
    random: random.Random
    stop: threading.Event
    told: dict[str, int] = field(default_factory=dict)  # call id to the last status
    unexpected: list[str] = field(default_factory=list)
    open_at_kill: int = 0

    def run(self) -> None:
        with self.server.client(timeout=10) as client:
            while not self.stop.is_set():
                call = f"{self.name}-{len(self.told)}"
                seconds = self.random.choice((0, 0, 0.02, 0.2))
                self.told[call] = 0
                body = {"arguments": {"code": CODE.format(name=call, seconds=seconds)}, "wait_s": 5}
                stream = {"Accept": "text/event-stream"} if self.random.random() < 0.3 else {}
                try:
                    answer = client.post(
                        f"/v1/sessions/{self.session}/tools/python_execute",
                        json=body,
                        headers={"Idempotency-Key": call, **stream},
                    )
                    status = _status(answer) if stream else answer.status_code
                except httpx.HTTPError:
                    self.open_at_kill += 1
                    return  # the server is gone
                self.told[call] = status
                if status != 200 and status not in (450, 503):
                    self.unexpected.append(f"{call}: {answer.text[:300]}")


def _status(answer: httpx.Response) -> int:
    """Of a stream of events: that of its outcome; 0 when it was cut."""
    if answer.status_code != 200:
        return answer.status_code
    for line in answer.text.splitlines():
        if line.startswith('data: {"status":'):
            return int(line.removeprefix('data: {"status":').split(",")[0])
    return 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_no_kill_of_the_server_loses_or_repeats_a_call(runtime: str, tmp_path: Path) -> None:
    seed = int(os.environ.get("TOOLCRIB_TEST_SEED", random.randrange(1 << 32)))
    sys.stdout.write(f"seed {seed}: TOOLCRIB_TEST_SEED={seed} repeats it\n")
    chance = random.Random(seed)
    # no pool: that starts at the same time as the rest is another test's matter
    server = ForkedServer(runtime, tmp_path, {"TOOLSERVER_POOL__ENABLED": "false"}).start()
    ran: dict[str, list[str]] = {}
    drivers: list[Driver] = []
    slowest = 0.0
    try:
        with server.client() as client:
            sessions = [
                str(client.post("/v1/sessions", json={"images": ["workspace"]}).json()["id"]) for _ in range(SESSIONS)
            ]
        for number in range(ROUNDS):
            stop = threading.Event()
            current = [
                Driver(server, session, f"r{number}s{place}", random.Random(chance.random()), stop)
                for place, session in enumerate(sessions)
            ]
            threads = [threading.Thread(target=driver.run) for driver in current]
            making = threading.Thread(target=_make_a_session, args=(server,))  # killed in the middle of it, too
            for thread in (*threads, making):
                thread.start()
            time.sleep(chance.uniform(0.0, 0.6))
            server.kill()
            stop.set()
            for thread in (*threads, making):
                thread.join(20)
            drivers += current
            server.start()
            begun = time.monotonic()
            with ThreadPoolExecutor(SESSIONS) as pool:
                for answer in pool.map(lambda session: _use(server, session), sessions):
                    assert answer.status_code == 200, (seed, number, answer.text)
                    assert "sandbox_reset" not in answer.json(), (seed, number, answer.text)
            slowest = max(slowest, time.monotonic() - begun)
        with server.client() as client:
            for driver in drivers:
                for call, status in driver.told.items():
                    driver.told[call] = _settled(client, call, status)
            for session in sessions:
                text = client.get(f"/v1/sessions/{session}/files/ran").text
                ran[session] = text.split()
            for session in client.get("/v1/sessions").json()["sessions"]:
                assert client.delete(f"/v1/sessions/{session['id']}").status_code == 204
        _check(drivers, ran, seed)
        for session in sessions:
            server.wait_no_leftovers(session, 30)
        assert slowest < USABLE_S, slowest
        left_open = sum(driver.open_at_kill for driver in drivers)
        calls = sum(len(driver.told) for driver in drivers)
        told = f"{ROUNDS} kills of the server, {left_open} calls under way at one, {calls} calls"
        sys.stdout.write(f"{told}; usable after {slowest:.2f} s at most\n")
    finally:
        server.close()


def _use(server: ServerProcess, session: str) -> httpx.Response:
    path, body = f"/v1/sessions/{session}/tools/python_execute", {"arguments": {"code": "n = 0; 1"}, "wait_s": 30}
    with server.client() as client:
        return client.post(path, json=body)


def _make_a_session(server: ServerProcess) -> None:
    try:
        with server.client(timeout=10) as client:
            client.post("/v1/sessions", json={"images": ["workspace"], "idle_s": 5})
    except httpx.HTTPError:
        pass


def _settled(client: httpx.Client, call: str, status: int) -> int:
    """What the server says of a call in the end; 404: it never ran. An answer that was given stays."""
    answer = client.get(f"/v1/calls/{call}?wait_s=30")
    if status == 200:
        assert answer.status_code == 200, (call, answer.text)
    return answer.status_code


def _check(drivers: list[Driver], ran: dict[str, list[str]], seed: int) -> None:
    for driver in drivers:
        assert not driver.unexpected, (seed, driver.unexpected)
        lines = ran[driver.session]
        for call, status in driver.told.items():
            count = lines.count(call)
            assert count <= 1, f"seed {seed}: {call} ran {count} times"
            if status == 200:
                assert count == 1, f"seed {seed}: {call} was answered 200 and did not run"
            elif status in (404, 503):
                assert count == 0, f"seed {seed}: {call} ran, and its answer says that it did not ({status})"
            else:
                assert status == 500, f"seed {seed}: {call} ended with {status}"
