"""`kill -9` at random moments: of the agent, of the agent with its own ToolServer, of the ToolServer alone. Then `agent resume`.

Each effect takes place at most once, and a run ends done, or says plainly which call's end nobody knows.
TOOLCRIB_TEST_KILLS=N makes N times as many kills.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.cli import app
from agent.events import Event, EventKind
from agent.store.sql_store import SqlStore
from agent.trajectory.keys import StepKey
from tests.e2e.agent_process import AgentFolder, clean_environment, processes_with, scripted_model, wait_for
from tests.server_process import ServerProcess

pytestmark = [pytest.mark.bubblewrap, pytest.mark.timeout(300 * int(os.environ.get("TOOLCRIB_TEST_KILLS", "1")))]

TIMES = int(os.environ.get("TOOLCRIB_TEST_KILLS", "1"))
EFFECTS = [f"t{task}s{step}" for task in (1, 2, 3) for step in (1, 2, 3)]
UNINTERRUPTED_LLM_CALLS = 20  # plan, 3 × (4 steps, critic, reflector), answer, and one to spare
KNOWN_END = {"done"}
HONEST_END = {"done", "unknown", "cancelled", "unavailable"}


@dataclass
class Forked:
    """`agent …` in a process of its own, forked from this one: it has loaded all that it needs, so it begins at once."""

    pid: int
    code: int | None = None

    @classmethod
    def start(cls, agent: AgentFolder, *arguments: str) -> Forked:
        pid = os.fork()
        if pid:
            return cls(pid)
        code = 99
        try:
            os.setsid()
            os.chdir(agent.path)
            log = os.open("agent.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for number, target in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
                os.dup2(target, number)
            sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115 - the process's own
            environment = clean_environment(**agent.settings)
            os.environ.clear()
            os.environ.update(environment)
            app(list(arguments))
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self, limit_s: float = 90) -> int:
        wait_for(lambda: self.poll() is not None, limit_s, "the agent does not end")
        assert self.code is not None
        return self.code

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.wait(10)


@pytest.fixture(scope="module")
def killed_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with scripted_model(Path(__file__).with_name("kills.toml"), tmp_path_factory.mktemp("killed")) as url:
        yield url


@pytest.fixture
def folder(tmp_path: Path, killed_model: str) -> AgentFolder:
    settings = {
        "AGENT_LLM__MODEL": "killed",
        "AGENT_LLM__BASE_URL": killed_model,
        "AGENT_TOOLSERVER__RUNTIME": "bubblewrap",
    }
    return AgentFolder(tmp_path, settings)


def runs_of(agent: AgentFolder) -> list[str]:
    """One that was killed before its first event counts too."""
    database = agent.path / "runs" / "agent.db"
    if not database.exists():
        return []
    store = SqlStore(f"sqlite:///{database}")
    try:
        return [row.run_id for row in store.runs()]
    finally:
        store.close()


def go_on(agent: AgentFolder) -> Forked:
    """The run, or, where there is one already, what is left of it."""
    begun = runs_of(agent)
    return Forked.start(agent, "resume", begun[0]) if begun else Forked.start(agent, "run", "Write nine lines")


def torment(
    agent: AgentFolder, chance: random.Random, kills: int, span_s: float, kill: Callable[[Forked], None]
) -> int:
    """Kill after a random part of `span_s`, go on, and so forth; how many kills hit. In the end the run is let through."""
    hits = 0
    for _ in range(kills):
        process = go_on(agent)
        time.sleep(chance.uniform(0.02, span_s))
        if process.poll() is not None:
            break
        kill(process)
        hits += 1
    for _ in range(3):
        if go_on(agent).wait() in {0, 1}:
            break
    return hits


def check(agent: AgentFolder, hits: int, seed: int, allowed: set[str]) -> None:
    told = f"seed {seed}, {hits} kills\n{agent.log()[-3000:]}"
    result = agent.result()
    counter = agent.run_folder / "workspace" / "effects.txt"
    effects = Counter(counter.read_text().split() if counter.exists() else [])
    assert max(effects.values(), default=0) <= 1, (effects, told)
    assert set(effects) <= set(EFFECTS)
    settled = [event for event in agent.events() if event.kind is EventKind.TOOL_SETTLED]
    keys = [event.data["key"] for event in settled]
    assert len(keys) == len(set(keys)) == len(EFFECTS), told
    ends = {event.data["outcome"]["kind"] for event in settled}
    assert ends <= allowed, (ends, told)
    assert (result["state"], result["answer"]) == ("done", "Nine lines."), told
    if ends == {"done"}:
        assert set(EFFECTS) - set(effects) == {effect for event in settled for effect in told_lost(event)}, told
    replies = [event.data["key"] for event in agent.events() if event.kind is EventKind.LLM_REPLIED]
    assert len(replies) == len(set(replies)), told
    assert result["costs"]["total"]["llm_calls"] <= UNINTERRUPTED_LLM_CALLS + hits, told
    assert "Traceback" not in agent.log(), told


def told_lost(event: Event) -> list[str]:
    """The effect of a call that ran, was told as run, and whose files went with the session before they were fetched."""
    place = StepKey.parse(event.data["key"])
    assert place is not None
    outcome = event.data["outcome"]
    if "They are lost" not in outcome["observation"]:
        return []
    assert not outcome["workspace_changed"]
    return [f"{place.task_id}s{place.step}"]


@pytest.mark.parametrize("seed", range(1, 5 * TIMES + 1))
def test_the_agent_alone(seed: int, folder: AgentFolder, toolserver: ServerProcess) -> None:
    folder.settings |= {"AGENT_TOOLSERVER__URL": toolserver.url, "AGENT_TOOLSERVER__API_KEY": toolserver.key}
    hits = torment(folder, random.Random(seed), 4, 1.2, lambda process: process.kill())
    check(folder, hits, seed, KNOWN_END)


@pytest.mark.parametrize("seed", range(1, 5 * TIMES + 1))
def test_the_agent_and_its_own_toolserver_in_one_moment(seed: int, folder: AgentFolder) -> None:
    def kill(process: Forked) -> None:
        for pid_file in folder.path.glob("runs/*/toolserver/pid"):
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(pid_file.read_text().split()[0]), signal.SIGKILL)
        process.kill()

    hits = torment(folder, random.Random(seed), 3, 2.5, kill)
    check(folder, hits, seed, HONEST_END)
    wait_for(lambda: not processes_with(str(folder.path)), 30, f"seed {seed}: something is left behind")


class SamePort(ServerProcess):
    """A ToolServer that comes back at the address that it had."""

    def start(self, limit_s: float = 40) -> SamePort:
        if not self.url:
            with socket.create_server(("127.0.0.1", 0)) as free:
                self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        ready = self.folder / "ready.json"
        self.folder.mkdir(parents=True, exist_ok=True)
        ready.unlink(missing_ok=True)
        command = [
            sys.executable,
            "-m",
            "toolserver",
            "serve",
            "--port",
            self.url.rpartition(":")[2],
            "--runtime",
            self.runtime,
        ]
        command += ["--state-dir", str(self.folder / "state"), "--ready-file", str(ready)]
        environment = clean_environment(TOOLSERVER_API_KEY=self.key)
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        process = self.process
        wait_for(lambda: ready.exists() or process.poll() is not None, limit_s, f"no server: {self.log()[-2000:]}")
        assert ready.exists(), self.log()[-2000:]
        return self


@pytest.mark.parametrize("seed", range(1, 2 * TIMES + 1))
def test_the_toolserver_alone_and_it_comes_back(seed: int, folder: AgentFolder) -> None:
    chance, server = random.Random(seed), SamePort("bubblewrap", folder.path / "server")
    server.start()
    folder.settings |= {"AGENT_TOOLSERVER__URL": server.url, "AGENT_TOOLSERVER__API_KEY": server.key}
    hits = 0
    try:
        for _ in range(3):
            process = go_on(folder)
            time.sleep(chance.uniform(0.05, 1.2))
            server.kill()
            hits += 1
            server.start()
            if process.wait() in {0, 1}:
                break
        for _ in range(3):
            if go_on(folder).wait() in {0, 1}:
                break
        check(folder, hits, seed, HONEST_END)
    finally:
        server.end()
    wait_for(lambda: not processes_with(str(folder.path)), 30, f"seed {seed}: something is left behind")
