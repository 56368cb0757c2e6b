"""A process that has imported the server and forks one whenever it is told: a real server process in a tenth of the time.

`python -m tests.faults.ready_to_fork`: a line of JSON in, {"arguments", "environment", "log"}; a line out, the new process's id.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.server_process import CANARY, ServerProcess


def main() -> None:
    import toolserver.serving  # noqa: PLC0415, F401
    from toolserver.cli import app  # noqa: PLC0415

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    for line in sys.stdin:
        told = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.environ.clear()
            os.environ.update(told["environment"])
            log = os.open(told["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            null = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((null, 0), (log, 1), (log, 2)):
                os.dup2(source, target)
            app(told["arguments"])
            os._exit(0)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


class ForkedServer(ServerProcess):
    """As ServerProcess, with servers that are forked. `close` must be called."""

    _maker: subprocess.Popen[bytes] | None = None
    _pid = 0

    def start(self, limit_s: float = 40) -> ForkedServer:
        if self._maker is None:
            command = [sys.executable, "-m", "tests.faults.ready_to_fork"]
            self._maker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.folder.mkdir(parents=True, exist_ok=True)
        ready = self.folder / "ready.json"
        ready.unlink(missing_ok=True)
        arguments = ["serve", "--port", "0", "--runtime", self.runtime, "--state-dir", str(self.folder / "state")]
        environment = {**os.environ, "TOOLSERVER_API_KEY": self.key, "TOOLCRIB_TEST_CANARY": CANARY, **self.settings}
        told = {
            "arguments": [*arguments, "--ready-file", str(ready)],
            "environment": environment,
            "log": str(self.folder / "server.log"),
        }
        assert self._maker.stdin is not None
        assert self._maker.stdout is not None
        self._maker.stdin.write(json.dumps(told).encode() + b"\n")
        self._maker.stdin.flush()
        self._pid = int(self._maker.stdout.readline())
        until = time.monotonic() + limit_s
        while not ready.exists():
            if not self.runs() or time.monotonic() > until:
                raise AssertionError(f"the server did not become ready:\n{self.log()[-3000:]}")
            time.sleep(0.01)
        self.url = json.loads(ready.read_text())["url"]
        return self

    @property
    def pid(self) -> int:
        return self._pid

    def runs(self) -> bool:
        return Path(f"/proc/{self._pid}").exists()

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        self._wait(10)

    def stop(self, limit_s: float = 30) -> int:
        os.kill(self._pid, signal.SIGTERM)
        self._wait(limit_s)
        return 0

    def _wait(self, limit_s: float) -> None:
        until = time.monotonic() + limit_s
        while self.runs():
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("toolserver", limit_s)
            time.sleep(0.005)

    def close(self) -> None:
        if self._pid and self.runs():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.stop()
            if self.runs():
                self.kill()
        if self._maker is not None:
            self._maker.kill()
            self._maker.communicate()


if __name__ == "__main__":
    main()
