"""The floor: what the building blocks cost on this machine, with nothing of ours in between."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import docker
import httpx
from docker.types import LogConfig

ECHO = "import sys\nfor line in sys.stdin.buffer:\n    sys.stdout.buffer.write(line); sys.stdout.buffer.flush()\n"
HOP = """
import fastapi, uvicorn, sys
app = fastapi.FastAPI()
@app.post("/echo")
async def echo(body: dict) -> dict:
    return body
uvicorn.run(app, port=int(sys.argv[1]), log_level="error", loop="uvloop", http="httptools")
"""
BODY = {"arguments": {"code": "1+1"}}


def milliseconds(work: Callable[[], Any], times: int, warm_up: int = 20) -> list[float]:
    """Sorted durations in ms."""
    for _ in range(warm_up):
        work()
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        taken.append((time.perf_counter() - start) * 1000)
    return sorted(taken)


def percentile(sorted_values: list[float], share: float) -> float:
    return sorted_values[min(len(sorted_values) - 1, int(len(sorted_values) * share))]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def http_hop(times: int) -> list[float]:
    """POST of a small JSON body to a bare FastAPI app in a process of its own, keep-alive."""
    port = free_port()
    server = subprocess.Popen([sys.executable, "-c", HOP, str(port)])
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            for _ in range(200):
                try:
                    client.post("/echo", json=BODY)
                    break
                except httpx.TransportError:
                    time.sleep(0.05)
            return milliseconds(lambda: client.post("/echo", json=BODY).json(), times)
    finally:
        server.terminate()
        server.wait(10)


class Engine:
    """The engine's own speed with an image, through the SDK, at least as plain as ours: network none, no log driver."""

    def __init__(self, image: str) -> None:
        self.image = image
        self.api = docker.from_env().api

    def create(self, command: list[str]) -> str:
        host = self.api.create_host_config(network_mode="none", log_config=LogConfig(type="none"))
        made = self.api.create_container(self.image, command, stdin_open=True, host_config=host, entrypoint=[])
        return str(made["Id"])

    def remove(self, container: str) -> None:
        self.api.remove_container(container, force=True, v=True)

    def create_start_remove(self) -> tuple[float, float]:
        """Seconds of create + start, and of the whole with remove."""
        begun = time.perf_counter()
        container = self.create(["sleep", "600"])
        self.api.start(container)
        started = time.perf_counter() - begun
        self.remove(container)
        return started, time.perf_counter() - begun

    def per_second(self, count: int, at_a_time: int) -> float:
        begun = time.perf_counter()
        with ThreadPoolExecutor(at_a_time) as pool:
            list(pool.map(lambda _: self.create_start_remove(), range(count)))
        return count / (time.perf_counter() - begun)

    @contextmanager
    def attached_echo(self) -> Iterator[Callable[[], Any]]:
        """A container that echoes lines; the yielded function is one round trip."""
        container = self.create(["python3", "-I", "-S", "-c", ECHO])
        holder = self.api.attach_socket(container, {"stdin": 1, "stdout": 1, "stream": 1})
        wire: socket.socket = holder._sock
        self.api.start(container)
        line = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": BODY}).encode() + b"\n"

        def exactly(size: int) -> bytes:
            got = b""
            while len(got) < size:
                part = wire.recv(size - len(got))
                if not part:
                    raise ConnectionError("the echo container is gone")
                got += part
            return got

        def once() -> bytes:
            wire.sendall(line)
            answer = b""
            while not answer.endswith(b"\n"):
                answer += exactly(struct.unpack(">I", exactly(8)[4:])[0])
            return answer

        try:
            yield once
        finally:
            wire.close()
            self.remove(container)


def container_memory_mib(container: str) -> float:
    """MiB in use by a container's cgroup without inactive file pages."""
    usage = docker.from_env().api.stats(container, stream=False)["memory_stats"]
    inactive = usage["stats"].get("total_inactive_file", usage["stats"].get("inactive_file", 0))
    return float(usage["usage"] - inactive) / (1 << 20)


def load() -> str:
    return " ".join(f"{value:.1f}" for value in os.getloadavg())
