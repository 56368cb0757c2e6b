"""A ToolServer of the run's own: a child process on loopback that ends with us, however we end.

The child has a key made for this run and a state folder of its own; both stay in the run's folder, so that after a crash
the same run finds its calls again. It offers the tool images that were added for all servers of this user. It reads its standard input and ends when that closes, so that a killed agent leaves
no server behind. It runs in a process group of its own: Ctrl-C reaches it only through us, after the session was closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from agent.errors import Unreachable

_POLL_S = 0.03
_STOP_S = 30.0  # a clean end waits for running calls, keeps the workspaces and removes sandboxes
_KILL_S = 5.0
_LOG_TAIL_LINES = 15


@dataclass(frozen=True)
class Address:
    """Where a ToolServer answers, and the key for it."""

    url: str
    api_key: str


class EmbeddedToolServer:
    """Owns the child process between `start` and `close`. Use it as an async context manager."""

    def __init__(self, folder: Path, *, runtime: str, start_s: float, command: Sequence[str] | None = None) -> None:
        """`folder` takes the server's state, log and ready file. `command` is the program that gets `serve …`."""
        self._folder, self._runtime, self._start_s = folder.resolve(), runtime, start_s
        self._command = tuple(command or (sys.executable, "-m", "toolserver"))
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def kept(self) -> Path:
        """Where it leaves the workspaces of sessions that its shutdown ended: those of an agent that was killed."""
        return kept_in(self._folder)

    @property
    def log(self) -> Path:
        return self._folder / "toolserver.log"

    async def start(self) -> Address:
        """Start it and wait until it is ready. Raises Unreachable with the log's last lines; nothing is left running then."""
        self._folder.mkdir(parents=True, exist_ok=True)
        await self._outlive_predecessor()
        ready_file = self._folder / "ready.json"
        ready_file.unlink(missing_ok=True)
        api_key = _key_in(self._folder / "key")
        own = {"TOOLSERVER_API_KEY": api_key, "TOOLSERVER_RUNTIME__NAME": self._runtime}
        one_run = {
            "TOOLSERVER_POOL__ENABLED": "false"
        }  # which takes its session at once: a start ahead of it would be wasted
        environment = {**one_run, **_without_model_keys(os.environ), **own}
        arguments = ("serve", "--host", "127.0.0.1", "--port", "0", "--state-dir", str(self._folder / "state"))
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, *arguments, "--ready-file", str(ready_file), "--exit-with-parent",
                "--usual-tools", "--keep-workspaces", str(self.kept),
                stdin=asyncio.subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True,
            )  # fmt: skip
        (self._folder / "pid").write_text(f"{self._process.pid} {_born(self._process.pid)}", "ascii")
        try:
            return Address(await self._ready(ready_file, self._process), api_key)
        except BaseException:
            await self.close()
            raise

    async def _outlive_predecessor(self) -> None:
        """After a crash the server of the run's last process may still be ending its sandboxes: wait for it, then end it."""
        pid, born = _named_in(self._folder / "pid")
        ends_at = time.monotonic() + _STOP_S
        while born and _born(pid) == born:
            if time.monotonic() > ends_at:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(_POLL_S)

    async def _ready(self, ready_file: Path, process: asyncio.subprocess.Process) -> str:
        try:
            async with asyncio.timeout(self._start_s):
                while process.returncode is None:
                    if url := _url_in(ready_file):
                        return url
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise Unreachable(self._explain(f"was not ready within {self._start_s:g} s")) from None
        raise Unreachable(self._explain(f"ended at once with exit code {process.returncode}"))

    def _explain(self, what: str) -> str:
        lines = self.log.read_text("utf-8", "replace").splitlines()[-_LOG_TAIL_LINES:] if self.log.exists() else []
        tail = "\n  ".join(lines) or "(nothing)"
        return f"The embedded ToolServer {what}. Its log ({self.log}) ends with:\n  {tail}\nTry: toolserver doctor"

    async def close(self) -> None:
        """End the child: politely through its standard input, then by signals. Never raises for a child that is gone."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        if process.stdin is not None:
            process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            if not await _ended(process, _STOP_S):
                process.terminate()
            if not await _ended(process, _KILL_S):
                process.kill()
                await _ended(process, _KILL_S)


def kept_in(folder: Path) -> Path:
    """The folder of kept workspaces of the server whose folder this is."""
    return folder / "kept"


async def _ended(process: asyncio.subprocess.Process, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await process.wait()
    except TimeoutError:
        return False
    return True


def _without_model_keys(environment: Mapping[str, str]) -> dict[str, str]:
    """What the server runs must not find the model's key, whatever sandbox it is in."""
    return {name: value for name, value in environment.items() if not name.upper().startswith(("AGENT_", "OPENAI_"))}


def _named_in(file: Path) -> tuple[int, str]:
    """Process id and birth of the server that was started last; (0, "") when none was."""
    try:
        pid, _, born = file.read_text("ascii").partition(" ")
        return int(pid), born
    except (OSError, ValueError):
        return 0, ""


def _born(pid: int) -> str:
    """When a living process was started, in the kernel's ticks: with it a process id names one process for good."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in {"Z", "X"} else fields[19]


def _key_in(file: Path) -> str:
    """The key of this run: calls belong to the key that made them, so a resumed run has to come with the same."""
    try:
        return file.read_text("ascii")
    except FileNotFoundError:
        key, part = "run_" + secrets.token_urlsafe(24), file.with_suffix(".part")
        part.unlink(missing_ok=True)
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "w") as stream:
            stream.write(key)
        part.replace(file)
        return key


def _url_in(ready_file: Path) -> str | None:
    """The address, once the file is there and complete."""
    try:
        url = json.loads(ready_file.read_text("utf-8"))["url"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(url)
