"""Drives the web image's worker as the server does: a real process, lines of JSON-RPC over its stdin and stdout."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sandbox_images
from tests.unit.web.stand_in_proxy import StandInProxy

ROOT = Path(sandbox_images.__file__).parents[1]
# the worker as it is, but for the port of the proxy: that of a sandbox is there once on this machine
START = """import sys
sys.path.insert(0, {root!r})
from sandbox_images.base import door
door.PROXY = {proxy!r}
from sandbox_images.web.worker import main
sys.exit(main())"""


def command_line(proxy: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", START.format(root=str(ROOT), proxy=proxy)]


class Worker:
    def __init__(self, env: dict[str, str], proxy: str) -> None:
        command = command_line(proxy)
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        self._answers: dict[Any, queue.Queue[dict[str, Any]]] = {}
        self._next = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            message = json.loads(line)
            self._answers.setdefault(message["id"], queue.Queue()).put(message)

    def write(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line)
        self.process.stdin.flush()

    def notify(self, method: str, **params: Any) -> None:
        self.write(json.dumps({"jsonrpc": "2.0", "method": method, "params": params}).encode() + b"\n")

    def send(self, method: str, params: Any) -> int:
        self._next += 1
        self._answers[self._next] = queue.Queue()
        self.write(
            json.dumps({"jsonrpc": "2.0", "id": self._next, "method": method, "params": params}).encode() + b"\n"
        )
        return self._next

    def wait(self, request_id: int | None, timeout_s: float = 30) -> dict[str, Any]:
        return self._answers.setdefault(request_id, queue.Queue()).get(timeout=timeout_s)

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        answer = self.wait(self.send(method, params))
        assert "result" in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def start(self, tool: str, arguments: dict[str, Any], **about: Any) -> int:
        return self.send(
            "tools/call",
            {"name": tool, "arguments": arguments, "_meta": {"toolcrib/call": about}}
            if about
            else {"name": tool, "arguments": arguments},
        )

    def call(self, tool: str, arguments: dict[str, Any], **about: Any) -> Ending:
        answer = self.wait(self.start(tool, arguments, **about), 60)
        assert "result" in answer, answer
        return Ending(answer["result"])

    def fetch(self, url: str, **arguments: Any) -> Ending:
        return self.call("web_fetch", {"url": url, **arguments})

    def rss_bytes(self) -> int:
        return int(self.ask("toolcrib/usage")["memory_bytes"])

    def close(self) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            return self.process.wait(15)
        finally:
            self.process.kill()
            self._reader.join(5)
            self.process.stdout.close()


class Ending:
    """A call's result, taken apart."""

    def __init__(self, result: dict[str, Any]) -> None:
        self.result = result
        self.outcome: dict[str, Any] = result["_meta"]["toolcrib/outcome"]
        self.end: str = self.outcome["end"]
        self.message: str = self.outcome["message"] or ""
        self.structured: dict[str, Any] = result.get("structuredContent", {})
        self.texts: list[str] = [block["text"] for block in result["content"]]
        assert result["isError"] is (self.end != "done")

    @property
    def text(self) -> str:
        """The page itself: the block after the heading."""
        assert self.end == "done", self
        return self.texts[1] if len(self.texts) > 1 else ""

    def __repr__(self) -> str:
        return f"<{self.end}: {self.message or self.texts!r}>"


@contextmanager
def running_worker(proxy: StandInProxy | None = None, **env: str) -> Iterator[Worker]:
    """Without a proxy its port is one where nobody listens."""
    settings = {f"TOOLCRIB_WEB_{name.upper()}": value for name, value in env.items()}
    worker = Worker(settings, proxy.url if proxy is not None else "http://127.0.0.1:9")
    try:
        yield worker
    finally:
        assert worker.close() == 0
