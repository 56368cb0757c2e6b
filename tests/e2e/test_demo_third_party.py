"""The demo with a tool of others: an MCP server of PyPI, added by `toolserver tools add`, that the agent's plan uses."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from agent.events import EventKind
from tests.e2e.agent_process import AgentFolder, clean_environment
from tests.e2e.test_demo import DATA, DEMO
from tests.e2e.test_demo_resumed import stopped_in
from tests.server_process import has_docker
from toolserver.app import server_id

LEFT_OUT = "Third-party tool: left out"
pytestmark = [
    pytest.mark.docker,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not has_docker(), reason="no Docker engine answers"),
]


def longest_dry_spell() -> str:
    """As the answer has it."""
    best: list[date] = []
    spell: list[date] = []
    with DATA.open(newline="") as file:
        for row in csv.DictReader(file):
            spell = [] if float(row["precipitation"]) else [*spell, date.fromisoformat(row["date"].replace("/", "-"))]
            best = spell if len(spell) > len(best) else best
    return f"**Longest dry spell:** {len(best)} days, from {best[0]} to {best[-1]}."


def outcomes(folder: AgentFolder) -> list[dict[str, Any]]:
    """What came of the calls of the added tool, out of the agent's journal."""
    events = folder.events()
    asked = {event.data["key"] for event in events if event.data.get("tool") == "read_query"}
    return [e.data["outcome"] for e in events if e.kind is EventKind.TOOL_SETTLED and e.data["key"] in asked]


def server_journal(state_dir: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "toolserver", "journal", "export", "--state-dir", str(state_dir)]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=60, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_added_tool_is_asked_also_after_a_stop_in_the_midst_of_its_call(tmp_path: Path) -> None:
    folder = AgentFolder(tmp_path)
    command = [sys.executable, str(DEMO), "--runtime", "docker", "--runs-dir", "runs"]
    log = stopped_in(folder, command, "t3/a1/actor/s3/c0", signal.SIGINT)
    assert re.search(
        r"^\$ toolserver tools add toolcrib-example/sqlite:\S+ --name sqlite --workspace rw ", log, re.MULTILINE
    )
    assert "sqlite is added, with 1 tool: read_query" in log
    told = re.search(r"^To go on: (.+)$", log, re.MULTILINE)
    assert told, log[-3000:]
    done = subprocess.run(
        [*shlex.split(told[1]), "--json"], cwd=tmp_path, env=clean_environment(), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert "added before" in done.stderr
    assert longest_dry_spell() in json.loads(done.stdout)["answer"]

    kinds = [outcome["kind"] for outcome in outcomes(folder)]
    assert kinds[-1] == "done", kinds
    state_dir = folder.run_folder / "toolserver" / "state"
    ended = [
        r["code"] for r in server_journal(state_dir) if r["event"] == "call_ended" and r.get("tool") == "read_query"
    ]
    assert ended[-1] == "ok", ended
    report = (folder.run_folder / "report.html").read_text()
    assert "read_query" in report
    assert "dry_days" in report
    left = ["docker", "ps", "-aq", "--filter", f"label=toolcrib.server={server_id(state_dir)}"]
    assert subprocess.run(left, capture_output=True, text=True, check=True, env=dict(os.environ)).stdout == ""


def offered(folder: Path, before: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The third-party part alone, after the lines `before`; exit code 3: it was left out."""
    program = f"""
import pathlib, shutil, sys
sys.path.insert(0, sys.argv[1])
import third_party
{before}
raise SystemExit(0 if third_party.offered_in(pathlib.Path("state")) else 3)
"""
    return subprocess.run(
        [sys.executable, "-c", program, str(DEMO.parent)], cwd=folder, env=clean_environment(**environment),
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


def test_when_it_can_not_be_added_that_is_told(tmp_path: Path) -> None:
    done = offered(tmp_path, "", TOOLSERVER_RUNTIME__NAME="bubblewrap")
    assert done.returncode == 3, done.stderr
    assert "added images run on a Docker engine alone" in done.stderr
    assert f"{LEFT_OUT}, since it was not added." in done.stderr


def test_when_its_packages_can_not_be_had_that_is_told(tmp_path: Path) -> None:
    nobody_has = """
third_party.FOLDER = pathlib.Path(shutil.copytree(third_party.FOLDER, "sqlite"))
(third_party.FOLDER / "requirements.txt").write_text("toolcrib-has-no-such-package==1  # as it says")
"""
    done = offered(tmp_path, nobody_has, PIP_NO_INDEX="1")
    assert done.returncode == 3, done.stderr
    assert (
        f"{LEFT_OUT}, since its image can't be built. pip could not fetch toolcrib-has-no-such-package==1"
        in done.stderr
    )
    assert not (tmp_path / "state").exists()


def test_when_no_engine_answers_that_is_told(tmp_path: Path) -> None:
    done = offered(tmp_path, "", DOCKER_HOST=f"unix://{tmp_path}/nobody.sock")
    assert done.returncode == 3, done.stderr
    assert f"{LEFT_OUT}, since its image can't be built. No Docker engine answers." in done.stderr
