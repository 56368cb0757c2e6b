"""The agent, the scripted model and the ToolServer as real processes, started and killed as a person or a machine would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.events import Event, EventKind
from agent.report.story import Story, tell
from agent.store.sql_store import SqlStore

LIMIT_S = 120.0


def clean_environment(**more: str) -> dict[str, str]:
    """Without settings of whoever runs the tests, and without the tool images that they added."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("AGENT_", "OPENAI_", "TOOLSERVER_"))
    }
    return {**kept, "TOOLSERVER_STATE_DIR": "/nonexistent/toolserver", **more}


def wait_for(what: Callable[[], bool], limit_s: float = LIMIT_S, why: str = "it did not happen") -> None:
    until = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < until, why
        time.sleep(0.03)


@contextmanager
def scripted_model(script: Path, folder: Path) -> Iterator[str]:
    """`agent mock SCRIPT`; its base URL."""
    ready = folder / "mock-ready.json"
    command = [
        sys.executable,
        "-m",
        "agent",
        "mock",
        str(script),
        "--port",
        "0",
        "--ready-file",
        str(ready),
        "--exit-with-parent",
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=clean_environment()
    ) as process:
        try:
            wait_for(lambda: ready.exists() or process.poll() is not None, 30, "the scripted model did not start")
            yield str(json.loads(ready.read_text())["url"])
        finally:
            process.terminate()


@dataclass
class AgentFolder:
    """A working folder with runs in it; `settings` go into the environment of each command."""

    path: Path
    settings: dict[str, str] = field(default_factory=dict)
    quick_model: str = ""  # a base URL

    def hurry(self) -> AgentFolder:
        """From the next command on with the model that takes no time."""
        self.settings["AGENT_LLM__BASE_URL"] = self.quick_model
        return self

    def command(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "agent", *arguments], cwd=self.path, env=clean_environment(**{**self.settings, **more}),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip

    def start(self, *arguments: str, **more: str) -> subprocess.Popen[str]:
        """In a session of its own, so that signals to it reach it alone."""
        with (self.path / "agent.log").open("a") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "agent", *arguments], cwd=self.path, env=clean_environment(**{**self.settings, **more}),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True, start_new_session=True,
            )  # fmt: skip

    def log(self) -> str:
        return (self.path / "agent.log").read_text(errors="replace")

    @property
    def run_id(self) -> str:
        """Of the only run."""
        with self._store() as store:
            (row,) = store.runs()
        return row.run_id

    @property
    def run_folder(self) -> Path:
        return self.path / "runs" / self.run_id

    def events(self) -> list[Event]:
        """The journal of the only run as it stands; empty while there is none."""
        if not (self.path / "runs" / "agent.db").exists():
            return []
        with self._store() as store:
            rows = store.runs()
            return store.read(rows[0].run_id) if rows else []

    @contextmanager
    def _store(self) -> Iterator[SqlStore]:
        store = SqlStore(f"sqlite:///{self.path / 'runs' / 'agent.db'}")
        try:
            yield store
        finally:
            store.close()

    def story(self) -> Story:
        return tell(self.events())

    def result(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self.run_folder / "result.json").read_text())
        return value

    def wait_for_event(self, kind: EventKind, key: str, process: subprocess.Popen[str]) -> None:
        """Until an event of `kind` whose key, or task, is `key`. The process must not end before."""

        def there() -> bool:
            return any(
                event.kind is kind and key in {event.data.get("key"), event.data.get("task_id")}
                for event in self.events()
            )

        wait_for(lambda: there() or process.poll() is not None, why=f"{kind} {key} never came:\n{self.log()[-2000:]}")
        assert there(), f"the agent ended before {kind} {key}:\n{self.log()[-2000:]}"


def processes_with(text: str) -> list[int]:
    """Processes whose command line holds `text`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if text.encode() in line:
                found.append(int(entry.name))
    return found
