"""What is measured of the ToolServer. Each function gives figures, with the floor of the same run beside them."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version

import docker
import httpx
from floor import BODY, Engine, Hop, container_memory_mib, milliseconds, percentile
from server import Server

IMAGE = f"toolcrib/workspace:{version('toolcrib')}"
REFILL_S = 20.0
FIFTY = 50


@dataclass(frozen=True)
class Figure:
    """One row. `better`: which way a good value goes; `goal` is for `ratio` when there is a floor, else for `value`."""

    name: str
    value: float
    unit: str
    floor: float | None = None
    floor_name: str = ""
    goal: float | None = None
    better: str = "less"

    @property
    def ratio(self) -> float | None:
        return None if not self.floor else self.value / self.floor

    @property
    def reached(self) -> bool | None:
        if self.goal is None:
            return None
        judged = self.ratio if self.ratio is not None else self.value
        return judged <= self.goal if self.better == "less" else judged >= self.goal


def wait_for_pool(server: Server) -> None:
    """Until the pool holds all that it wants to. Without a pool: at once."""
    until = time.monotonic() + REFILL_S
    while time.monotonic() < until:
        gauges = dict(
            line.rsplit(" ", 1) for line in server.ask("GET", "/metrics").decode().splitlines() if line[0] != "#"
        )
        ready, wanted = (float(gauges.get(f"toolserver_pool_{name}", 0)) for name in ("ready", "wanted"))
        if ready >= wanted:
            return
        time.sleep(0.05)


def timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return (time.perf_counter() - begun) * 1000


def warm(server: Server, quick: bool) -> list[Figure]:
    """A call in a session that has run one, by httpx as the agent does it, and the hop by the same."""
    times = 200 if quick else 1000
    with Hop() as hop, Engine(IMAGE).attached_echo() as echo, server.session() as session:
        with httpx.Client(base_url=hop.url, trust_env=False) as client:
            hops = milliseconds(lambda: client.post("/echo", json=BODY).json(), times)
        echoes = milliseconds(echo, times)
        path = f"/v1/sessions/{session}/tools/python_execute"
        with httpx.Client(base_url=server.url, headers=server.headers, trust_env=False) as client:
            calls = milliseconds(lambda: client.post(path, json=BODY).raise_for_status().json(), times)
    return [
        Figure(
            f"warm call, p{share * 100:.0f}",
            percentile(calls, share),
            "ms",
            percentile(hops, share) + percentile(echoes, share),
            "FastAPI hop + attached echo",
            3.0 if share == 0.5 else None,
        )
        for share in (0.5, 0.95)
    ]


def start(server: Server, quick: bool) -> list[Figure]:
    """A session out of the pool, one without the pool, and the end of one."""
    times, engine = (3 if quick else 7), Engine(IMAGE)
    floors = [engine.create_start_remove()[0] * 1000 for _ in range(times)]
    claims, firsts, closes, colds = [], [], [], []
    for _ in range(times):
        wait_for_pool(server)
        sessions: list[str] = []
        claims.append(timed(lambda: sessions.append(server.open())))  # noqa: B023 - called at once
        firsts.append(timed(lambda: server.python(sessions[0], "print(1+1)")))  # noqa: B023
        closes.append(timed(lambda: server.close(sessions[0])))  # noqa: B023
    with Server(pool=False) as without:
        for _ in range(times):
            begun = time.perf_counter()
            session = without.open()
            without.python(session, "print(1+1)")
            colds.append((time.perf_counter() - begun) * 1000)
            without.close(session)
    floor, cold, claim = statistics.median(floors), statistics.median(colds), statistics.median(claims)
    warm_first = statistics.median([a + b for a, b in zip(claims, firsts, strict=True)])
    return [
        Figure("session, warm", claim, "ms", goal=15.0),
        Figure("session, cold to first result", cold, "ms", floor, "engine's create + start", 1.5),
        Figure("session, warm to first result", warm_first, "ms", floor, "engine's create + start"),
        Figure("how much faster warm is than cold", cold / claim, "x", goal=20.0, better="more"),
        Figure("close", statistics.median(closes), "ms", goal=50.0),
    ]


def creation(server: Server, quick: bool) -> list[Figure]:
    """Sessions up to their first result and their end, 4 at a time, for so long that the pool can't hide it."""
    count = 12 if quick else 40
    floor = Engine(IMAGE).per_second(count, 4)

    def once(_: int) -> None:
        with server.session() as session:
            server.python(session, "1")

    wait_for_pool(server)
    begun = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(once, range(count)))
    rate = count / (time.perf_counter() - begun)
    return [Figure("sessions, 4 at a time", rate, "/s", floor, "engine's create + start + remove", 0.8, "more")]


def throughput(server: Server, quick: bool) -> list[Figure]:
    """Calls a second with one thread a session."""
    figures, seconds = [], 2.0 if quick else 6.0

    def rate(works: list[Callable[[], object]]) -> float:
        def work(once: Callable[[], object]) -> int:
            done, until = 0, time.monotonic() + seconds
            while time.monotonic() < until:
                once()
                done += 1
            return done

        with ThreadPoolExecutor(len(works)) as pool:
            return sum(pool.map(work, works)) / seconds

    for count in (1, 8, 32):
        sessions = [server.open() for _ in range(count)]
        try:
            calls = [lambda s=s: server.python(s, "1+1") for s in sessions]  # type: ignore[misc]
            for call in calls:
                call()
            ours = rate(list(calls))
        finally:
            for session in sessions:
                server.close(session)
        with Hop() as hop:
            floor = rate([hop.once] * count)
        goal = {8: 600 / floor}.get(count)
        figures.append(Figure(f"calls, {count} sessions", ours, "/s", floor, "FastAPI hop", goal, "more"))
    return figures


def memory(server: Server, quick: bool) -> list[Figure]:
    """Of a sandbox that has run something, without inactive file pages."""
    with server.session() as session:
        server.python(session, "1+1")
        time.sleep(1 if quick else 3)
        sandbox = json.loads(server.ask("GET", f"/v1/sessions/{session}"))["sandboxes"][0]["sandbox_id"]
        found = docker.from_env().containers.list(filters={"label": f"toolcrib.sandbox={sandbox}"})
        used = sum(container_memory_mib(str(container.id)) for container in found)
    return [Figure("memory of an idle session", used, "MiB", goal=15.0)]


def data(server: Server, quick: bool) -> list[Figure]:
    """Large output, a large file up and down."""
    times, payload = (2 if quick else 5), os.urandom(5_000_000)
    with server.session() as session, Hop() as hop, Engine(IMAGE).attached_flood() as flood:
        floods = milliseconds(flood, times, 1)
        outputs = milliseconds(lambda: server.python(session, "print('x' * 10_000_000)"), times, 1)
        floor = milliseconds(lambda: hop.upload(payload), times, 1)
        path, ups, downs = f"/v1/sessions/{session}/files/big.bin", [], []
        for _ in range(times):
            ups.append(timed(lambda: server.ask("PUT", path, payload, "application/octet-stream")))
            begun = time.perf_counter()
            if server.ask("GET", path) != payload:
                raise RuntimeError("the file came back changed")
            downs.append((time.perf_counter() - begun) * 1000)
    hop_ms = statistics.median(floor)
    return [
        Figure("10 MB of output", statistics.median(outputs), "ms", statistics.median(floods), "10 MB over attached stdio"),
        Figure("5 MB up", statistics.median(ups), "ms", hop_ms, "5 MB to a FastAPI hop"),
        Figure("5 MB down", statistics.median(downs), "ms", hop_ms, "5 MB to a FastAPI hop"),
    ]  # fmt: skip


def restart(_server: Server, quick: bool) -> list[Figure]:
    """kill -9 with sessions open; the time from the new process until each has run a call again."""
    count = 10 if quick else FIFTY
    with Server() as server, ThreadPoolExecutor(8) as pool:
        sessions = list(pool.map(lambda _: server.open(), range(count)))
        list(pool.map(lambda s: server.python(s, "x = 41"), sessions))
        server.crash()
        begun = time.perf_counter()
        up = server.begin()

        def usable(session: str) -> bool:
            try:
                return "42" in str(server.python(session, "x + 1")["content"])
            except RuntimeError:
                return False

        found = sum(pool.map(usable, sessions))
        took = time.perf_counter() - begun
        list(pool.map(server.close, sessions))
    return [
        Figure(f"restart with {count} sessions, all usable", took, "s", goal=5.0),
        Figure("restart, until requests are taken", up, "s"),
        Figure("restart, sessions with their state", found / count, "of 1", goal=1.0, better="more"),
    ]


MEASUREMENTS = {
    "warm": warm,
    "start": start,
    "creation": creation,
    "throughput": throughput,
    "memory": memory,
    "data": data,
    "restart": restart,
}
