"""The floor: what the building blocks cost on this machine, with nothing of ours in between."""

from __future__ import annotations

import http.client
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Self

import docker
from docker.types import LogConfig

ECHO = "import sys\nfor line in sys.stdin.buffer:\n    sys.stdout.buffer.write(line); sys.stdout.buffer.flush()\n"
HOP = """
import fastapi, uvicorn, sys
app = fastapi.FastAPI()
@app.post("/echo")
async def echo(body: dict) -> dict:
    return body
@app.put("/upload")
async def upload(request: fastapi.Request) -> dict:
    return {"bytes": sum([len(part) async for part in request.stream()])}
uvicorn.run(app, port=int(sys.argv[1]), log_level="error", loop="uvloop", http="httptools")
"""
BODY = {"arguments": {"code": "1+1"}}
BODY_BYTES = json.dumps(BODY).encode()
FLOOD_BYTES = 10_000_000
FLOOD = f"import sys\nfor line in sys.stdin.buffer:\n    sys.stdout.buffer.write(b'x' * {FLOOD_BYTES}); sys.stdout.buffer.flush()\n"


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


class Hop:
    """A bare FastAPI app in a process of its own, on httptools and uvloop. `once` keeps a connection for each thread."""

    def __init__(self) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._address, self._mine = f"127.0.0.1:{port}", threading.local()
        self._process = subprocess.Popen([sys.executable, "-c", HOP, str(port)])

    def __enter__(self) -> Self:
        for _ in range(200):
            try:
                self.once()
                break
            except OSError:
                self._mine = threading.local()
                time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(10)

    def _ask(self, method: str, path: str, body: bytes, kind: str) -> bytes:
        connection: http.client.HTTPConnection | None = getattr(self._mine, "connection", None)
        if connection is None:
            connection = self._mine.connection = http.client.HTTPConnection(self._address, timeout=60)
        connection.request(method, path, body, {"Content-Type": kind})
        return connection.getresponse().read()

    def once(self) -> bytes:
        return self._ask("POST", "/echo", BODY_BYTES, "application/json")

    def upload(self, data: bytes) -> bytes:
        return self._ask("PUT", "/upload", data, "application/octet-stream")


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
        line = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": BODY}).encode() + b"\n"
        with self._attached(ECHO) as wire:
            yield lambda: _round_trip(wire, line, len(line))

    @contextmanager
    def attached_flood(self) -> Iterator[Callable[[], Any]]:
        """A container that answers each line with 10 MB."""
        with self._attached(FLOOD) as wire:
            yield lambda: _round_trip(wire, b"\n", FLOOD_BYTES)

    @contextmanager
    def _attached(self, code: str) -> Iterator[socket.socket]:
        container = self.create(["python3", "-I", "-S", "-c", code])
        holder = self.api.attach_socket(container, {"stdin": 1, "stdout": 1, "stream": 1})
        wire: socket.socket = holder._sock
        self.api.start(container)
        try:
            yield wire
        finally:
            wire.close()
            self.remove(container)


def _round_trip(wire: socket.socket, question: bytes, size: int) -> None:
    """Until so many bytes of the container's output have come, in the engine's frames."""
    wire.sendall(question)
    while size > 0:
        size -= len(_exactly(wire, struct.unpack(">I", _exactly(wire, 8)[4:])[0]))


def _exactly(wire: socket.socket, size: int) -> bytes:
    got = bytearray()
    while len(got) < size:
        part = wire.recv(size - len(got))
        if not part:
            raise ConnectionError("the container is gone")
        got += part
    return bytes(got)


def container_memory_mib(container: str) -> float:
    """MiB in use by a container's cgroup without inactive file pages."""
    usage = docker.from_env().api.stats(container, stream=False)["memory_stats"]
    inactive = usage["stats"].get("total_inactive_file", usage["stats"].get("inactive_file", 0))
    return float(usage["usage"] - inactive) / (1 << 20)


def load() -> str:
    return " ".join(f"{value:.1f}" for value in os.getloadavg())
