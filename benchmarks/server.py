"""A ToolServer to measure, and the leanest client: http.client with a connection of its own for each thread."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

UP_S = 60.0


class Server:
    """A process of its own on loopback, with a state folder that goes when it ends."""

    def __init__(self, *, pool: bool = True) -> None:
        key = secrets.token_urlsafe(24)
        self.headers = {"Authorization": f"Bearer {key}"}
        self._settings = {
            "TOOLSERVER_API_KEY": key,
            "TOOLSERVER_SESSION__MAX_SESSIONS_PER_TENANT": "64",
            "TOOLSERVER_POOL__ENABLED": str(pool).lower(),
        }
        self._folder = tempfile.TemporaryDirectory(prefix="toolcrib-bench-", ignore_cleanup_errors=True)
        self._mine = threading.local()
        self._address = ""
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self.begin()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def begin(self) -> float:
        """Start it; seconds until it took requests."""
        folder = Path(self._folder.name)
        ready, log = folder / "ready.json", folder / "server.log"
        ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "toolserver", "serve", "--port", "0", "--runtime", "docker"]
        command += ["--state-dir", str(folder / "state"), "--ready-file", str(ready)]
        begun = time.perf_counter()
        with log.open("ab") as out:
            self.process = subprocess.Popen(command, env={**os.environ, **self._settings}, stdout=out, stderr=out)
        while not ready.exists():
            if self.process.poll() is not None or time.perf_counter() - begun > UP_S:
                raise RuntimeError(f"the server did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.005)
        self._address = json.loads(ready.read_text())["url"].removeprefix("http://")
        self._mine = threading.local()
        return time.perf_counter() - begun

    def crash(self) -> None:
        """kill -9."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(10)

    def __exit__(
        self, _kind: type[BaseException] | None, _problem: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(60)
        self._folder.cleanup()

    def ask(self, method: str, path: str, body: bytes | None = None, kind: str = "application/json") -> bytes:
        """Raises RuntimeError for any answer but a success."""
        connection: http.client.HTTPConnection | None = getattr(self._mine, "connection", None)
        if connection is None:
            connection = self._mine.connection = http.client.HTTPConnection(self._address, timeout=120)
        connection.request(method, path, body, {**self.headers, "Content-Type": kind})
        answer = connection.getresponse()
        data = answer.read()
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path}: {answer.status} {data[:500]!r}")
        return data

    def create(self) -> dict[str, Any]:
        made: dict[str, Any] = json.loads(self.ask("POST", "/v1/sessions", b'{"ttl_s": 1800, "images": ["workspace"]}'))
        return made

    def open(self) -> str:
        return str(self.create()["id"])

    def python(self, session: str, code: str) -> dict[str, Any]:
        body = json.dumps({"arguments": {"code": code}}).encode()
        outcome: dict[str, Any] = json.loads(self.ask("POST", f"/v1/sessions/{session}/tools/python_execute", body))
        return outcome

    def close(self, session: str) -> None:
        self.ask("DELETE", f"/v1/sessions/{session}")

    @property
    def url(self) -> str:
        return f"http://{self._address}"

    @contextmanager
    def session(self) -> Iterator[str]:
        made = self.open()
        try:
            yield made
        finally:
            self.close(made)
