"""The whole run that docs/reference/mock-scripts.md shows is one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.agent_process import AgentFolder, scripted_model

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "mock-scripts.md").read_text("utf-8")

pytestmark = [pytest.mark.bubblewrap, pytest.mark.timeout(120)]


def test_the_example_of_two_tasks_runs_to_its_end(tmp_path: Path) -> None:
    found = re.search(r"^## A whole run\n.*?```toml\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)
    assert found
    assert len(found[1].splitlines()) <= 60
    script = tmp_path / "sum.toml"
    script.write_text(found[1], "utf-8")
    with scripted_model(script, tmp_path) as url:
        agent = AgentFolder(tmp_path, {"AGENT_TOOLSERVER__RUNTIME": "bubblewrap"})
        done = agent.command("run", "Sum up 1 to 10", "--model", "scripted", "--base-url", url)
        doctor = agent.command("doctor", "--model", "scripted", "--base-url", url)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "The sum of 1 to 10 is 55; it is in total.txt.\n"
    assert (agent.run_folder / "workspace" / "total.txt").read_text() == "55"
    assert "cost unknown" in done.stderr
    assert "Starting a ToolServer (bubblewrap)" in done.stderr
    assert doctor.returncode == 0, doctor.stdout
