"""The demo is stopped again and again in the middle of its tool calls, and goes on with the very command that it prints."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from agent.events import EventKind
from tests.e2e.agent_process import AgentFolder, clean_environment, wait_for

DEMO = Path(__file__).parents[2] / "examples" / "weather" / "demo.py"
# each stops the demo in this call of the actor, at the latest
STOPS = [
    "t1/a1/actor/s1/c0",
    "t1/a1/actor/s2/c0",
    "t2/a1/actor/s1/c0",
    "t3/a1/actor/s1/c0",
    "t3/a1/actor/s2/c0",
    "t3/a1/actor/s3/c0",
]

pytestmark = [pytest.mark.bubblewrap, pytest.mark.timeout(240)]


def stopped_in(folder: AgentFolder, command: Sequence[str], key: str, number: signal.Signals) -> str:
    """Start `command` and end it, with all that Ctrl-C in a terminal reaches, in the call `key`. What it printed."""
    with (folder.path / "agent.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder.path, env=clean_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    seen = len(folder.events())

    def intended() -> bool:
        fresh = folder.events()[seen:]
        return any(event.kind is EventKind.TOOL_INTENDED and event.data["key"] >= key for event in fresh)

    wait_for(lambda: intended() or process.poll() is not None, 60, f"{key} never came")
    assert process.poll() is None, folder.log()[-3000:]
    os.killpg(process.pid, number)
    process.wait(40)
    return folder.log()


def test_stopped_in_every_task_it_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    folder = AgentFolder(tmp_path)
    command = [sys.executable, str(DEMO), "--runtime", "bubblewrap", "--runs-dir", "runs"]
    for key in STOPS:
        log = stopped_in(folder, command, key, signal.SIGINT)
        told = re.search(r"^To go on: (.+)$", log, re.MULTILINE)
        assert told, log[-3000:]
        assert "demo.py" in told[1]
        command = shlex.split(told[1])
    stopped_in(folder, command, "t4/a1/actor/s1/c0", signal.SIGKILL)
    done = subprocess.run(
        command, cwd=tmp_path, env=clean_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Wettest month:** November with 160.6 mm" in done.stdout
    workspace = folder.run_folder / "workspace"
    made = {"clean.csv", "weather.db", "monthly.csv", "yearly.csv", "climate.png", "years.png", "summary.md"}
    assert made <= {place.name for place in workspace.iterdir()}
    attempts = [task["attempts"] for task in folder.result()["tasks"]]
    assert attempts == [1, 2, 1, 1]
