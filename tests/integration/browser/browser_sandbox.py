"""A real, fully hardened sandbox of the browser image, with pages that the tests serve through a proxy inside it.

The proxy listens where a sandbox's forwarder does, in the sandbox's own network namespace, and answers for every host by
itself: what it was asked for is all that the browser ever wanted from the outside.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import secrets
import socket
import subprocess
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from toolserver.runtime.base import Limits, Sandbox, SandboxRuntime, SandboxSpec
from toolserver.runtime.bubblewrap_runtime import BubblewrapRuntime
from toolserver.runtime.bubblewrap_sandbox import Processes
from toolserver.runtime.docker_runtime import DockerRuntime
from toolserver.settings import RuntimeSettings

COMMAND = ("python3", "-I", "-S", "/opt/toolcrib/sandbox_images/browser/worker.py")
CLONE_NEWNET = 0x40000000
Raw = Callable[[socket.socket], None]
Page = str | tuple[str, bytes] | Raw


class Proxy:
    """`pages` maps paths to HTML, to (content type, body), or to what writes the whole answer. `asked`: every request line."""

    def __init__(self, pid: int) -> None:
        self.pages: dict[str, Page] = {}
        self.asked: list[str] = []
        self._listening = threading.Event()
        threading.Thread(target=self._serve, args=(pid,), daemon=True).start()
        assert self._listening.wait(10)

    def _serve(self, pid: int) -> None:
        namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.setns(namespace, CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())  # of this thread alone
        os.close(namespace)
        with socket.create_server(("127.0.0.1", 3128), backlog=128) as listener:
            self._listening.set()
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(30)
            head = b""
            while b"\r\n\r\n" not in head:
                more = connection.recv(65_536)
                if not more:
                    return
                head += more
            line = head.split(b"\r\n")[0].decode()
            self.asked.append(line)
            method, url, _ = line.split(" ")
            host = url if method == "CONNECT" else url.split("/")[2]
            if method == "CONNECT" or host.startswith("denied"):
                connection.sendall(
                    answer("403 Forbidden", b"It is not allowed.", "text/plain", "X-Toolcrib-Denied: nothing allows it")
                )
                return
            page = self.pages.get("/" + url.split("/", 3)[3].partition("?")[0])
            if page is None:
                connection.sendall(answer("404 Not Found", b"<h1>not here</h1>"))
            elif callable(page):
                page(connection)
            elif isinstance(page, str):
                connection.sendall(answer("200 OK", page.encode()))
            else:
                connection.sendall(answer("200 OK", page[1], page[0]))


def answer(status: str, body: bytes, content_type: str = "text/html; charset=utf-8", *more: str) -> bytes:
    lines = [
        f"HTTP/1.1 {status}",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *more,
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


class Ending:
    """A call's result, taken apart."""

    def __init__(self, result: dict[str, Any]) -> None:
        self.outcome: dict[str, Any] = result["_meta"]["toolcrib/outcome"]
        self.end: str = self.outcome["end"]
        self.message: str = self.outcome["message"] or ""
        self.structured: dict[str, Any] = result.get("structuredContent", {})
        self.content: list[dict[str, Any]] = result["content"]
        self.texts = [block["text"] for block in self.content if block["type"] == "text"]

    @property
    def page(self) -> str:
        """The page's own text: what stands before the last block."""
        assert self.end == "done", self
        return self.texts[-2] if len(self.texts) > 2 or "total_chars" in self.structured else ""

    @property
    def notes(self) -> str:
        return " ".join(self.structured.get("notes", []))

    def __repr__(self) -> str:
        return f"<{self.end}: {self.message or self.texts!r}>"


class BrowserSandbox:
    """Its own event loop runs in a thread, so that tests of a module can share it."""

    def __init__(self, state: Path, limits: Limits, runtime: str = "docker") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._lines, self._next = b"", 0
        self.epoch = 0  # of the calls
        self.ended: dict[int, dict[str, Any]] = {}  # answers that came while another one was waited for
        made = {"docker": DockerRuntime, "bubblewrap": BubblewrapRuntime}[runtime]
        self._runtime: SandboxRuntime = made(f"browser-{secrets.token_hex(4)}", state, RuntimeSettings())
        self._workspace = f"ws-{secrets.token_hex(4)}"
        self.sandbox: Sandbox = self._do(self._start(limits))
        self.ask("initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo={"name": "t", "version": "1"})

    async def _start(self, limits: Limits) -> Sandbox:
        await self._runtime.open()
        await self._runtime.create_workspace(self._workspace, limits.disk_mb)
        spec = SandboxSpec(
            f"sb-{secrets.token_hex(4)}",
            self._workspace,
            "browser",
            f"toolcrib/browser:{version('toolcrib')}",
            COMMAND,
            limits,
            draws_pages=True,
        )
        return await self._runtime.start(spec)

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(150)

    def proxy(self) -> Proxy:
        if isinstance(self._runtime, BubblewrapRuntime):
            processes = Processes.load(self.sandbox.handle)
            assert processes is not None
            return Proxy(processes.first.pid)
        command = ["docker", "inspect", "-f", "{{.State.Pid}}", self.sandbox.handle]
        return Proxy(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout))

    def run(self, *command: str) -> str:
        """Output of a program in the sandbox, for looking at what is there."""
        done = subprocess.run(
            ["docker", "exec", self.sandbox.handle, *command], capture_output=True, text=True, check=False
        )
        return done.stdout

    def send(self, method: str, params: dict[str, Any]) -> int:
        self._next += 1
        message = {"jsonrpc": "2.0", "id": self._next, "method": method, "params": params}
        self._do(self.sandbox.send(json.dumps(message).encode() + b"\n"))
        return self._next

    def wait(self, number: int) -> dict[str, Any]:
        async def read() -> dict[str, Any]:
            while True:
                while b"\n" not in self._lines:
                    data = await self.sandbox.receive()
                    assert data, "the sandbox ended"
                    self._lines += data
                line, _, self._lines = self._lines.partition(b"\n")
                message: dict[str, Any] = json.loads(line)
                if message.get("id") == number:
                    return message
                self.ended[message["id"]] = message

        message: dict[str, Any] = self._do(read())
        return message

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        answered = self.wait(self.send(method, params))
        assert "result" in answered, answered
        result: dict[str, Any] = answered["result"]
        return result

    def start(self, tool: str, call_id: str, deadline_s: float = 100, **arguments: Any) -> int:
        about = {"call_id": call_id, "deadline_s": deadline_s, "max_text_bytes": 65_536, "epoch": self.epoch}
        return self.send(
            "tools/call", {"name": f"browser_{tool}", "arguments": arguments, "_meta": {"toolcrib/call": about}}
        )

    def call(self, tool: str, deadline_s: float = 100, **arguments: Any) -> Ending:
        answered = self.wait(self.start(tool, secrets.token_hex(8), deadline_s, **arguments))
        assert "result" in answered, answered
        return Ending(answered["result"])

    def close(self) -> None:
        async def end() -> None:
            await self.sandbox.remove()
            await self._runtime.delete_workspace(self._workspace)
            await self._runtime.close()

        self._do(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
