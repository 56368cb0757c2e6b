"""A worker under test: the real program over its stdio, plain or as PID 1 of a sandbox that may be attacked."""

from __future__ import annotations

import base64
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from toolserver.runtime.bubblewrap_host import find_bwrap

REPOSITORY = Path(__file__).resolve().parents[3]
WORKER = REPOSITORY / "sandbox_images" / "workspace" / "worker.py"
PATIENCE_S = 40.0


def sandboxed(workspace: Path) -> list[str]:
    """A command line that runs what follows as PID 1 of namespaces of its own, with nothing of the host writable."""
    return [
        *(find_bwrap(), "--unshare-all", "--as-pid-1", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
        *("--uid", "10001", "--gid", "10001", "--ro-bind", "/", "/", *_mounts(workspace)),
    ]


def with_few_processes(workspace: Path, pids: int) -> list[str]:
    """The same, with a limit of processes that holds. The kernel exempts root, also behind another uid of a user namespace:
    so root runs it as a uid that nothing else uses, and without a user namespace.
    """
    if os.geteuid() != 0:
        return [*sandboxed(workspace), "prlimit", f"--nproc={pids}", "--"]
    uid = str(1_970_000 + os.getpid() % 10_000)
    needed = [part for name in ("SETUID", "SETGID", "SETPCAP") for part in ("--cap-add", f"CAP_{name}")]
    return [
        *(
            find_bwrap(),
            "--unshare-pid",
            "--unshare-ipc",
            "--unshare-net",
            "--unshare-uts",
            "--as-pid-1",
            "--die-with-parent",
        ),
        *("--cap-drop", "ALL", *needed, "--ro-bind", "/", "/", *_mounts(workspace)),
        *("setpriv", "--reuid", uid, "--regid", uid, "--clear-groups", "--inh-caps=-all"),
        *("--bounding-set=-all", "--no-new-privs", "--", "prlimit", f"--nproc={pids}", "--"),
    ]


def _mounts(workspace: Path) -> list[str]:
    private = ("--tmpfs", "/sys", "--perms", "1777", "--size", str(64 << 20), "--tmpfs", "/tmp")
    needed = (WORKER.parents[1], Path(sys.prefix), Path(sys.base_prefix))
    place = ("--bind", str(workspace), "/mnt", "--chdir", "/mnt")
    return ["--proc", "/proc", "--dev", "/dev", *private, *_shown_to_all(needed), *place]


def _shown_to_all(paths: tuple[Path, ...]) -> list[str]:
    """Mounts that show `paths` wherever they are: below the new /tmp, or in a folder that other users may not enter."""
    covered, made = {Path("/tmp")}, list[str]()
    for path in paths:
        closed = next((folder for folder in reversed(path.parents) if not folder.stat().st_mode & 0o001), None)
        if closed is not None and not covered & {closed, *closed.parents}:
            covered.add(closed)
            made += ["--perms", "0755", "--tmpfs", str(closed)]
        top = covered & set(path.parents)
        if top:
            below = [folder for folder in reversed(path.parents) if top & set(folder.parents)]
            made += [part for folder in below for part in ("--perms", "0755", "--dir", str(folder))]
            made += ["--ro-bind", str(path), str(path)]
    return made


class WorkerProcess:
    """Requests go out at once; answers are taken from a reader thread, so any number may be open."""

    def __init__(self, workspace: Path, prefix: list[str] | None = None, root: str | None = None) -> None:
        self.workspace = workspace
        command = [*(prefix or []), sys.executable, "-I", "-S", str(WORKER), "--workspace", root or str(workspace)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._ids = itertools.count(1)
        self._answers: dict[Any, dict[str, Any]] = {}
        self._lines: queue.Queue[bytes] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        stdout = self.process.stdout
        assert stdout is not None
        with stdout:
            for line in stdout:
                self._lines.put(line)
        self._lines.put(b"")

    def write(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def send(self, method: str, **params: Any) -> int:
        number = next(self._ids)
        self.write(json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": params}).encode())
        return number

    def message(self, patience_s: float = PATIENCE_S) -> dict[str, Any]:
        """The next message, whatever it answers."""
        line = self._lines.get(timeout=patience_s)
        assert line, f"the worker has ended: {self.process.poll()}"
        found: dict[str, Any] = json.loads(line)
        return found

    def answer(self, number: Any, patience_s: float = PATIENCE_S) -> dict[str, Any]:
        until = time.monotonic() + patience_s
        while number not in self._answers:
            message = self.message(max(0.01, until - time.monotonic()))
            self._answers[message["id"]] = message
        return self._answers.pop(number)

    def request(self, method: str, **params: Any) -> dict[str, Any]:
        return self.answer(self.send(method, **params))

    def result(self, method: str, **params: Any) -> dict[str, Any]:
        answer = self.request(method, **params)
        assert "result" in answer, answer
        found: dict[str, Any] = answer["result"]
        return found

    def refusal(self, method: str, **params: Any) -> str:
        """The data.kind of a request that must be refused."""
        answer = self.request(method, **params)
        assert "error" in answer, answer
        return str(answer["error"].get("data", {}).get("kind"))

    def start(
        self, tool: str, *, call_id: str = "", deadline_s: float = 30.0, max_text_bytes: int = 65_536, **arguments: Any
    ) -> int:
        meta = {
            "call_id": call_id or f"c{os.urandom(4).hex()}",
            "deadline_s": deadline_s,
            "max_text_bytes": max_text_bytes,
        }
        return self.send("tools/call", name=tool, arguments=arguments, _meta={"toolcrib/call": meta})

    def call(self, tool: str, **options: Any) -> Outcome:
        return Outcome(self.answer(self.start(tool, **options)))

    def python(self, code: str, **options: Any) -> Outcome:
        return self.call("python_execute", code=code, **options)

    def shell(self, command: str, **options: Any) -> Outcome:
        return self.call("shell_execute", command=command, **options)

    def finish(self, number: int) -> Outcome:
        return Outcome(self.answer(number))

    def upload(self, path: str, data: bytes) -> None:
        handle = self.result("toolcrib/file.open", path=path, mode="w")["handle"]
        for at in range(0, len(data), 1 << 20):
            self.result("toolcrib/file.write", handle=handle, data=base64.b64encode(data[at : at + (1 << 20)]).decode())
        self.result("toolcrib/file.close", handle=handle, commit=True)

    def close(self) -> int:
        """End its stdin; its exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            return self.process.wait(15)
        finally:
            self.process.kill()
            self.process.wait()
            self._reader.join(10)


class Outcome:
    """The answer to a tools/call, with the readings that tests need."""

    def __init__(self, answer: dict[str, Any]) -> None:
        assert "result" in answer, answer
        self.result = answer["result"]
        self.content: list[dict[str, Any]] = self.result["content"]
        self.structured: dict[str, Any] = self.result.get("structuredContent") or {}
        self.meta: dict[str, Any] = self.result["_meta"]["toolcrib/outcome"]
        self.end: str = self.meta["end"]
        self.message: str = self.meta["message"] or ""
        assert self.result["isError"] == (self.end != "done")
        assert self.end == "done" or self.message

    @property
    def text(self) -> str:
        return "\n".join(block["text"] for block in self.content if block["type"] == "text")

    @property
    def stdout(self) -> str:
        return str(self.structured["stdout"])

    def __repr__(self) -> str:
        return f"<{self.end}: {self.message!r} {self.text[:600]!r} {self.meta}>"
