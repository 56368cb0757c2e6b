"""Benchmarks of the ToolServer on the Docker runtime, each beside its floor of the same run. See README.md."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import docker
import httpx
from floor import Engine, container_memory_mib, http_hop, load, milliseconds, percentile

IMAGE = f"toolcrib/workspace:{version('toolcrib')}"


class Server:
    """A ToolServer of its own, on loopback, with a state folder that goes when it ends."""

    def __init__(self, url: str, key: str) -> None:
        self.client = httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=60, trust_env=False
        )

    def open(self) -> str:
        answer = self.client.post("/v1/sessions", json={"ttl_s": 600})
        answer.raise_for_status()
        return str(answer.json()["id"])

    def python(self, session: str, code: str) -> dict[str, Any]:
        answer = self.client.post(f"/v1/sessions/{session}/tools/python_execute", json={"arguments": {"code": code}})
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code} {answer.text}")
        return dict(answer.json())

    def close(self, session: str) -> None:
        self.client.delete(f"/v1/sessions/{session}").raise_for_status()


@contextmanager
def running_server() -> Iterator[Server]:
    key = secrets.token_urlsafe(24)
    with tempfile.TemporaryDirectory(prefix="toolcrib-bench-") as folder:
        ready = Path(folder, "ready.json")
        command = [sys.executable, "-m", "toolserver", "serve", "--port", "0", "--runtime", "docker"]
        command += ["--state-dir", str(Path(folder, "state")), "--ready-file", str(ready)]
        with Path(folder, "server.log").open("wb") as log:
            process = subprocess.Popen(command, env={**os.environ, "TOOLSERVER_API_KEY": key}, stdout=log, stderr=log)
            try:
                until = time.monotonic() + 30
                while not ready.exists():
                    if process.poll() is not None or time.monotonic() > until:
                        raise RuntimeError(
                            f"the server did not start:\n{Path(folder, 'server.log').read_text()[-2000:]}"
                        )
                    time.sleep(0.05)
                yield Server(json.loads(ready.read_text())["url"], key)
            finally:
                process.terminate()
                process.wait(60)


def warm(server: Server, quick: bool) -> dict[str, float]:
    """The bar: p50 at most 6 times the floor; the goal 3 times."""
    times = 200 if quick else 1000
    hop = http_hop(times)
    with Engine(IMAGE).attached_echo() as echo:
        attached = milliseconds(echo, times)
    session = server.open()
    try:
        taken = milliseconds(lambda: server.python(session, "1+1"), times)
    finally:
        server.close(session)
    floor = percentile(hop, 0.5) + percentile(attached, 0.5)
    return {
        "p50_ms": percentile(taken, 0.5), "p95_ms": percentile(taken, 0.95), "floor_hop_ms": percentile(hop, 0.5),
        "floor_echo_ms": percentile(attached, 0.5), "ratio_p50": percentile(taken, 0.5) / floor,
        "ratio_p95_to_floor_p95": percentile(taken, 0.95) / (percentile(hop, 0.95) + percentile(attached, 0.95)),
    }  # fmt: skip


def cold(server: Server, quick: bool) -> dict[str, float]:
    firsts, engine = [], Engine(IMAGE)
    floor = [engine.create_start_remove()[0] * 1000 for _ in range(3 if quick else 7)]
    for _ in range(3 if quick else 7):
        begun = time.perf_counter()
        session = server.open()
        server.python(session, "print(1+1)")
        firsts.append((time.perf_counter() - begun) * 1000)
        server.close(session)
    first, base = statistics.median(firsts), statistics.median(floor)
    return {"session_to_first_result_ms": first, "floor_create_start_ms": base, "ratio": first / base}


def creation(server: Server, quick: bool) -> dict[str, float]:
    count = 8 if quick else 24
    floor = Engine(IMAGE).per_second(count, 4)

    def once(_: int) -> None:
        session = server.open()
        server.python(session, "1")
        server.close(session)

    begun = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(once, range(count)))
    ours = count / (time.perf_counter() - begun)
    return {"per_s": ours, "floor_per_s": floor, "ratio": ours / floor}


def parallel(server: Server, quick: bool) -> dict[str, float]:
    seconds, sessions = (2 if quick else 6), [server.open() for _ in range(8)]

    def work(session: str) -> int:
        done, until = 0, time.monotonic() + seconds
        while time.monotonic() < until:
            server.python(session, "1+1")
            done += 1
        return done

    try:
        with ThreadPoolExecutor(8) as pool:
            total = sum(pool.map(work, sessions))
    finally:
        for session in sessions:
            server.close(session)
    return {"sessions": 8, "calls_per_s": total / seconds}


def memory(server: Server, quick: bool) -> dict[str, float]:
    session = server.open()
    try:
        server.python(session, "1+1")
        time.sleep(1 if quick else 3)
        found = docker.from_env().containers.list(filters={"label": f"toolcrib.session={session}"})
        return {"idle_sandbox_mib": sum(container_memory_mib(str(c.id)) for c in found), "containers": len(found)}
    finally:
        server.close(session)


def files(server: Server, quick: bool) -> dict[str, float]:
    session, data, up, down = server.open(), os.urandom(5_000_000), [], []
    url = f"/v1/sessions/{session}/files/big.bin"
    try:
        for _ in range(2 if quick else 5):
            begun = time.perf_counter()
            server.client.put(url, content=data).raise_for_status()
            up.append((time.perf_counter() - begun) * 1000)
            begun = time.perf_counter()
            if server.client.get(url).content != data:
                raise RuntimeError("the file came back changed")
            down.append((time.perf_counter() - begun) * 1000)
    finally:
        server.close(session)
    return {"up_5mb_ms": statistics.median(up), "down_5mb_ms": statistics.median(down)}


MEASUREMENTS = {
    "warm": warm,
    "cold": cold,
    "creation": creation,
    "parallel": parallel,
    "memory": memory,
    "files": files,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="comma-separated: " + ", ".join(MEASUREMENTS))
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else list(MEASUREMENTS)
    if unknown := set(wanted) - set(MEASUREMENTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    results: dict[str, Any] = {"load_before": load()}
    with running_server() as server:
        for name in wanted:
            results[name] = MEASUREMENTS[name](server, options.quick)
            if not options.json:
                shown = "  ".join(f"{key} {value:.3g}" for key, value in results[name].items())
                print(f"{name:10} {shown}", flush=True)
    results["load_after"] = load()
    print(
        json.dumps(results, indent=2) if options.json else f"load {results['load_before']} -> {results['load_after']}"
    )


if __name__ == "__main__":
    main()
