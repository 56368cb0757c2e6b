"""A run from the command line against a scripted model that misbehaves, and what came of it."""

from __future__ import annotations

import copy
import json
import re
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agent.cli import app
from agent.events import EventKind
from agent.llm.mock_script import parse_script
from agent.llm.mock_server import MockServer
from agent.store.sql_store import SqlStore
from agent.trajectory.keys import StepKey
from tests.server_process import ServerProcess

HERE = Path(__file__).parent
GOAL = "Write both names down"
# the rule whose reply a quirk of a role spoils
FIRST_RULE = {"plan_generator": "plan", "actor": "t1 call", "critic": "t1 verdict", "reflector": "reflector",
              "plan_refiner": "refiner", "summariser": "answer"}  # fmt: skip
QUICK = {
    "AGENT_LLM__MAX_ATTEMPTS": "2",
}
IMPATIENT = {"AGENT_LLM__FIRST_TOKEN_S": "1", "AGENT_LLM__BETWEEN_CHUNKS_S": "1"}  # with a server that falls silent


def story() -> dict[str, Any]:
    return tomllib.loads((HERE / "story.toml").read_text())


def rule(script: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(entry for entry in script["rule"] if entry["name"] == name)
    return found


def spoiled(role: str, mode: str, quirks: list[Any], command: str | None = None) -> dict[str, Any]:
    """The story with quirks in one role: `once` in its first reply, `ever` in that reply again and again, `always` in all.

    `command` is what task t1 runs.
    """
    script = story()
    if command is not None:
        rule(script, "t1 call")["reply"][0]["call"][0]["arguments"]["command"] = command
    if mode == "always":
        for entry in script["rule"]:
            if entry["role"] == role:
                entry["quirks"] = quirks
        return script
    front = {**copy.deepcopy(rule(script, FIRST_RULE[role])), "name": "spoiled", "quirks": quirks}
    if mode == "once":
        front["occurrence"] = 1
    script["rule"].insert(0, front)
    return script


@dataclass
class Ended:
    """What a run left: its result.json, its output, the effects of its calls, the requests that the model got."""

    result: dict[str, Any]
    exit_code: int
    stdout: str
    stderr: str
    folder: Path
    requests: list[Any]
    events: list[Any]
    effects: Counter[str] = field(default_factory=Counter)

    @property
    def report(self) -> str:
        return (self.folder / "report.html").read_text()

    @property
    def bound(self) -> tuple[int, int]:
        """Model calls and tool calls, as they were printed before the start."""
        found = re.search(r"At most ([\d,]+) model calls and ([\d,]+) tool calls", self.stderr)
        assert found, self.stderr
        return int(found[1].replace(",", "")), int(found[2].replace(",", ""))

    def of(self, kind: EventKind) -> list[Any]:
        return [event for event in self.events if event.kind is kind]

    def asked(self, role: str) -> int:
        return sum(request.role == role for request in self.requests)

    def attempts(self, task_id: str) -> int:
        return int(next(task["attempts"] for task in self.result["tasks"] if task["id"] == task_id))

    def check_invariants(self) -> None:
        """What holds of every run, whatever the model said."""
        assert "Traceback" not in self.stdout + self.stderr
        assert "fault in the agent" not in str(self.result["reason"])
        if self.exit_code != 0:
            assert len(self.result["reason"]) > 10
        llm_bound, tool_bound = self.bound
        assert len(self.of(EventKind.LLM_REQUESTED)) <= llm_bound
        assert len(self.of(EventKind.TOOL_INTENDED)) <= tool_bound
        intended = [event.data["key"] for event in self.of(EventKind.TOOL_INTENDED)]
        settled = [event.data["key"] for event in self.of(EventKind.TOOL_SETTLED)]
        assert len(intended) == len(set(intended))
        assert len(settled) == len(set(settled))
        if self.result["state"] == "done":
            assert self.effects["t1"] >= 1
            assert self.effects["t2"] >= 1
        assert sum(self.effects.values()) <= len(intended)

    def fruitless(self, task_id: str = "t1", attempt: int = 1) -> int:
        """Requests of an attempt after the last reply that brought a tool result not seen before."""
        keys = [StepKey.parse(event.data["key"]) for event in self.of(EventKind.LLM_REQUESTED)]
        asked = [key for key in keys if key is not None and (key.task_id, key.attempt) == (task_id, attempt)]
        useful, seen = 0, set[str]()
        for event in self.of(EventKind.TOOL_SETTLED):
            key, outcome = StepKey.parse(event.data["key"]), event.data["outcome"]
            what = json.dumps([outcome["kind"], outcome["content"]])
            if key is None or (key.task_id, key.attempt) != (task_id, attempt) or outcome["executed"] == "none":
                continue
            if what not in seen:
                useful = asked.index(StepKey.parse(key.request) or key) + 1
                seen.add(what)
        return len(asked) - useful


@dataclass
class Stage:
    folder: Path
    toolserver: ServerProcess
    monkeypatch: pytest.MonkeyPatch

    def play(self, script: dict[str, Any], *options: str, **settings: str) -> Ended:
        """`agent run` with this script, in this process: the same code as the command, without the time to start it."""
        runs = self.folder / "runs"
        with MockServer(parse_script(script)) as model:
            connected = {
                "AGENT_LLM__MODEL": "quirky",
                "AGENT_LLM__BASE_URL": model.base_url,
                "AGENT_TOOLSERVER__URL": self.toolserver.url,
                "AGENT_TOOLSERVER__API_KEY": self.toolserver.key,
            }
            with self.monkeypatch.context() as patch:
                for name, value in {**QUICK, **connected, **settings}.items():
                    patch.setenv(name, value)
                done = CliRunner().invoke(app, ["run", GOAL, "--runs-dir", str(runs), *options])
            if done.exception is not None and not isinstance(done.exception, SystemExit):
                raise done.exception
            return self._ended(runs, done.exit_code, done.stdout, done.stderr, list(model.requests))

    def _ended(self, runs: Path, exit_code: int, stdout: str, stderr: str, requests: list[Any]) -> Ended:
        store = SqlStore(f"sqlite:///{runs / 'agent.db'}")
        try:
            row = store.runs()[0]
            events = store.read(row.run_id)
        finally:
            store.close()
        folder = runs / row.run_id
        counted = folder / "workspace" / "effects.txt"
        effects = Counter(counted.read_text().split() if counted.exists() else [])
        result = json.loads((folder / "result.json").read_text())
        return Ended(result, exit_code, stdout, stderr, folder, requests, events, effects)
