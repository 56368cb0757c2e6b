"""A real `toolserver serve` in a process of its own, for tests that speak HTTP to it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

CANARY = (
    f"canary-{secrets.token_hex(8)}"  # stands in the server's environment and state folder; no answer may contain it
)


@dataclass
class ServerProcess:
    """Start, stop, kill and start again on the same state folder. `runtime` is docker, bubblewrap or fake."""

    runtime: str
    folder: Path
    settings: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()  # more of them for `serve`
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    within: tuple[str, ...] = ()  # a command that starts the server's own, given as its last arguments
    url: str = ""
    process: subprocess.Popen[bytes] | None = None

    def start(self, limit_s: float = 40) -> ServerProcess:
        self.folder.mkdir(parents=True, exist_ok=True)
        ready = self.folder / "ready.json"
        ready.unlink(missing_ok=True)
        (self.folder / "canary").write_text(CANARY)
        command = [*self.within, sys.executable, "-m", "toolserver", "serve", "--port", "0", "--runtime", self.runtime]
        command += ["--state-dir", str(self.folder / "state"), "--ready-file", str(ready), *self.arguments]
        environment = {**os.environ, "TOOLSERVER_API_KEY": self.key, "TOOLCRIB_TEST_CANARY": CANARY, **self.settings}
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        until = time.monotonic() + limit_s
        while not ready.exists():
            if self.process.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"the server did not become ready:\n{self.log()[-3000:]}")
            time.sleep(0.05)
        self.url = json.loads(ready.read_text())["url"]
        return self

    @property
    def on_gvisor(self) -> bool:
        return self.settings.get("TOOLSERVER_RUNTIME__ISOLATION") == "require-gvisor"

    def docker(self, *arguments: str) -> str:
        """Of the command line of Docker, on the server's engine."""
        host = self.settings.get("TOOLSERVER_RUNTIME__DOCKER_HOST")
        command = ["docker", *([] if host is None else ["--host", host]), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def log(self) -> str:
        return (self.folder / "server.log").read_text(errors="replace")

    def client(self, key: str | None = None, timeout: float = 60) -> httpx.Client:
        head = {"Authorization": f"Bearer {key or self.key}"}
        return httpx.Client(base_url=self.url, headers=head, timeout=timeout, trust_env=False)

    def stop(self, limit_s: float = 30) -> int:
        """SIGTERM; the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(limit_s)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            try:
                self.stop()
            except subprocess.TimeoutExpired:
                self.kill()

    def resident_mib(self) -> float:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        raise AssertionError("no VmRSS")

    def workspace_id(self, session_id: str) -> str:
        """As the store has it, of sessions that are gone too."""
        with closing(sqlite3.connect(f"file:{self.folder}/state/toolserver.db?mode=ro", uri=True)) as database:
            row = database.execute("SELECT workspace_id FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
        assert row is not None, f"the store does not know {session_id}"
        return str(row[0])

    def containers(self, session_id: str) -> list[str]:
        """Ids of the session's running containers."""
        label = f"label=toolcrib.workspace={self.workspace_id(session_id)}"
        return self.docker("ps", "-q", "--filter", label).split()

    def kill_sandboxes(self, session_id: str) -> None:
        """SIGKILL to the first process of each of the session's sandboxes."""
        if self.runtime == "docker":
            self.docker("kill", *self.containers(session_id))
            return
        workspace = self.workspace_id(session_id).encode()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
                if line.split(b"\0", 1)[0].endswith(b"bwrap") and workspace in line:
                    for child in (entry / "task" / entry.name / "children").read_text().split():
                        os.kill(int(child), signal.SIGKILL)

    def leftovers(self, session_id: str) -> list[str]:
        """What still names the session or its workspace: containers, volumes, processes, files of the state folder."""
        workspace_id = self.workspace_id(session_id)
        found = []
        for folder, folders, files in os.walk(self.folder / "state"):  # unlike rglob, at ease with what goes meanwhile
            found += [os.path.join(folder, name) for name in (*folders, *files) if workspace_id in name]  # noqa: PTH118
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    line = (entry / "cmdline").read_bytes()
                except OSError:
                    continue
                if workspace_id.encode() in line and int(entry.name) != os.getpid():
                    found.append(f"process {entry.name}")
        if self.runtime == "docker":
            for what in ("container", "volume"):
                all_of_them = ["--all"] if what == "container" else []
                label = f"label=toolcrib.workspace={workspace_id}"
                found += self.docker(what, "ls", "-q", "--filter", label, *all_of_them).split()
        return found

    def wait_no_leftovers(self, session_id: str, limit_s: float = 15) -> None:
        until = time.monotonic() + limit_s
        while left := self.leftovers(session_id):
            assert time.monotonic() < until, f"left behind by {session_id}: {left}"
            time.sleep(0.2)


def has_docker() -> bool:
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "version"], capture_output=True, check=False).returncode == 0


def text_of(body: Any) -> str:
    """Everything a model would read in an outcome or an error's detail."""
    if isinstance(body, dict):
        body = body.get("detail", body)
    return json.dumps(body, ensure_ascii=False)
