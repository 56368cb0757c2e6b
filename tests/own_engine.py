"""A Docker engine of the test's own, in a network namespace of its own, to be stopped, killed and given other runtimes.

Needs root and dockerd. It shares nothing with the engine of the machine but the kernel, and is gone afterwards.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

UP_S = 40
RUNSC = {"path": shutil.which("runsc") or "", "runtimeArgs": ["--platform=ptrace", "--network=none", "--host-uds=open"]}
NO_RUNSC = "" if RUNSC["path"] else "runsc is not installed: apt-get install runsc"
# the whole of abuse and conformance takes long on gVisor: `make gvisor`
WITH_GVISOR = ["gvisor"] if os.environ.get("TOOLCRIB_TEST_GVISOR") == "1" else []


def why_not() -> str:
    """Why no such engine can be run here; empty when it can."""
    if os.geteuid() != 0:
        return "only root can run a Docker engine"
    missing = [name for name in ("dockerd", "ip", "nsenter") if shutil.which(name) is None]
    return f"there is no {missing[0]}" if missing else ""


@contextlib.contextmanager
def engine_with_gvisor(folder: Path, *images: str) -> Iterator[OwnEngine]:
    """With these images of the machine's own engine."""
    engine = OwnEngine(folder, {"runtimes": {"runsc": RUNSC}})
    try:
        engine.start().load(*images)
        yield engine
    finally:
        engine.close()


class OwnEngine:
    """`close` it. `settings` are lines of daemon.json, such as {"live-restore": True}."""

    def __init__(self, folder: Path, settings: dict[str, Any] | None = None) -> None:
        # the socket's path must stay short, and so must that of containerd below the exec-root
        self.folder = folder
        self.name = f"tc{uuid.uuid4().hex[:8]}"
        self._run = Path("/run") / f"toolcrib-{self.name}"
        self.host = f"unix://{self._run}/docker.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self._config = folder / "daemon.json"
        folder.mkdir(parents=True, exist_ok=True)
        self._run.mkdir(mode=0o700)
        told = {
            "data-root": str(folder / "data"),
            "exec-root": str(self._run / "exec"),
            "pidfile": str(self._run / "pid"),
            "hosts": [self.host],
            "iptables": False,
            "bridge": "none",
            **(settings or {}),
        }
        self._told = told
        self._config.write_text(json.dumps(told))
        subprocess.run(["ip", "netns", "add", self.name], check=True)

    @property
    def pid(self) -> int:
        return int((self._run / "pid").read_text())

    def start(self) -> OwnEngine:
        # nsenter, not `ip netns exec`, which would mount another /sys and hide the cgroups
        command = ["nsenter", f"--net=/run/netns/{self.name}", "dockerd", "--config-file", str(self._config)]
        with (self.folder / "dockerd.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        until = time.monotonic() + UP_S
        while not self.answers():
            assert self._process.poll() is None and time.monotonic() < until, self.log()[-2000:]  # noqa: PT018
            time.sleep(0.1)
        return self

    def set(self, name: str, value: Any) -> None:
        """For the next start."""
        self._told[name] = value
        self._config.write_text(json.dumps(self._told))

    def containers_run(self) -> bool:
        """Whether some do, though the engine does not."""
        needle = str(self._run / "exec").encode()
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                line = entry.read_bytes()
                if b"containerd-shim" in line and needle in line:
                    return True
        return False

    def answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as wire:
            wire.settimeout(5)
            try:
                wire.connect(self.host.removeprefix("unix://"))
                wire.sendall(b"GET /_ping HTTP/1.0\r\nHost: engine\r\n\r\n")
                return b" 200 " in wire.recv(64)
            except OSError:
                return False

    def log(self) -> str:
        return (self.folder / "dockerd.log").read_text(errors="replace")

    def load(self, *references: str) -> None:
        """Images of the machine's own engine."""
        saving = subprocess.Popen(["docker", "save", *references], stdout=subprocess.PIPE)
        self.docker("load", "--quiet", stdin=saving.stdout)
        assert saving.stdout is not None
        saving.stdout.close()
        assert saving.wait(60) == 0

    @property
    def on_gvisor(self) -> dict[str, str]:
        """Settings of a server whose sandboxes run on this engine's gVisor."""
        return {"TOOLSERVER_RUNTIME__DOCKER_HOST": self.host, "TOOLSERVER_RUNTIME__ISOLATION": "require-gvisor"}

    def docker(self, *arguments: str, **options: Any) -> str:
        command = ["docker", "--host", self.host, *arguments]
        done = subprocess.run(command, check=False, capture_output=True, **options)
        assert done.returncode == 0, done.stderr.decode()
        return str(done.stdout.decode()).strip()

    def end(self, number: int = signal.SIGTERM) -> None:
        """Stop it, by SIGTERM or SIGKILL, and wait until it has gone. Its containerd goes with it, if it may."""
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(40)
        if number == signal.SIGKILL:
            (self._run / "pid").unlink(missing_ok=True)
            self._end_containerd()

    def _end_containerd(self) -> None:
        note = self._run / "exec" / "containerd" / "containerd.pid"
        with contextlib.suppress(OSError, ValueError):
            os.kill(int(note.read_text()), signal.SIGKILL)
        note.unlink(missing_ok=True)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(AssertionError):
                if left := self.docker("ps", "--all", "--quiet").split():
                    self.docker("rm", "--force", *left)
            self.end()
        self._end_containerd()
        for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            place = line.split()[1]
            if place.startswith((str(self.folder), str(self._run))):
                subprocess.run(["umount", "--lazy", place], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "delete", self.name], check=False, capture_output=True)
        shutil.rmtree(self._run, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)
