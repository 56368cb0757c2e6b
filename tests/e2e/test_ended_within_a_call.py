"""The agent ends in the middle of a call that has written a file already: the file is there afterwards, once."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.events import EventKind
from tests.e2e.agent_process import AgentFolder, processes_with, scripted_model, wait_for

pytestmark = [pytest.mark.bubblewrap, pytest.mark.timeout(240)]

CALL = "t1/a1/actor/s1/c0"
GOAL = "Write two lines"


@pytest.fixture(scope="module")
def long_call_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with scripted_model(Path(__file__).with_name("long_call.toml"), tmp_path_factory.mktemp("long")) as url:
        yield url


@pytest.fixture
def agent(tmp_path: Path, long_call_model: str) -> AgentFolder:
    """Each command starts its own ToolServer, on bubblewrap."""
    settings = {
        "AGENT_LLM__MODEL": "long-call",
        "AGENT_LLM__BASE_URL": long_call_model,
        "AGENT_TOOLSERVER__RUNTIME": "bubblewrap",
    }
    return AgentFolder(tmp_path, settings)


def in_the_call(agent: AgentFolder, seconds: int, *options: str) -> subprocess.Popen[str]:
    """A run whose first call, of so many seconds, has just written its line in the sandbox."""
    (agent.path / "seconds.txt").write_text(str(seconds))
    process = agent.start("run", GOAL, "--file", "seconds.txt", *options)
    agent.wait_for_event(EventKind.TOOL_INTENDED, CALL, process)
    kept = agent.run_folder / "toolserver" / "state" / "bubblewrap" / "workspaces"
    wait_for(lambda: any(p.stat().st_size for p in kept.glob("*/workspace/counter.txt")), 60, "nothing was written")
    return process


def outcome(agent: AgentFolder) -> dict[str, object]:
    (settled,) = [e for e in agent.events() if e.kind is EventKind.TOOL_SETTLED and e.data["key"] == CALL]
    value: dict[str, object] = settled.data["outcome"]
    return value


def lines(agent: AgentFolder) -> list[str]:
    return (agent.run_folder / "workspace" / "counter.txt").read_text().split()


def check_resumed(agent: AgentFolder, *options: str) -> None:
    resumed = agent.command("resume", agent.run_id, *options)
    assert resumed.returncode == 0, resumed.stderr
    assert lines(agent) == ["one", "two"]
    assert list((agent.run_folder / "toolserver" / "kept").iterdir()) == []
    wait_for(lambda: not processes_with(str(agent.run_folder)), 30, "something is left behind")


def test_killed_in_a_call_that_ends_by_itself(agent: AgentFolder) -> None:
    process = in_the_call(agent, 3)
    process.kill()
    process.wait(30)
    check_resumed(agent)
    assert outcome(agent)["kind"] == "done"
    assert outcome(agent)["workspace_changed"] == ["counter.txt"]
    assert "lost" not in str(outcome(agent)["observation"])
    assert any("kept the workspace" in note for note in agent.result()["notes"])


def test_killed_in_a_call_that_its_server_has_to_stop(agent: AgentFolder) -> None:
    process = in_the_call(agent, 100)
    process.kill()
    process.wait(30)
    check_resumed(agent)
    assert outcome(agent)["kind"] == "cancelled"


def test_killed_again_while_it_waits_for_its_call(agent: AgentFolder) -> None:
    process = in_the_call(agent, 3)
    process.kill()
    process.wait(30)
    again = agent.start("resume", agent.run_id)
    agent.wait_for_event(EventKind.TOOL_SETTLED, CALL, again)
    again.kill()
    again.wait(30)
    check_resumed(agent)


def test_killed_together_with_its_server_the_call_runs_on_and_is_taken_up(agent: AgentFolder) -> None:
    process = in_the_call(agent, 6)
    os.kill(server_of(agent), signal.SIGKILL)
    process.kill()
    process.wait(30)
    check_resumed(agent)
    assert outcome(agent)["kind"] == "done"


def test_killed_together_with_its_server_and_sandbox_tells_that_the_end_is_unknown(agent: AgentFolder) -> None:
    process = in_the_call(agent, 100)
    os.kill(server_of(agent), signal.SIGKILL)
    for pid in processes_with(str(agent.run_folder / "toolserver" / "state" / "bubblewrap")):
        os.kill(pid, signal.SIGKILL)
    process.kill()
    process.wait(30)
    check_resumed(agent)  # the workspace is kept
    assert outcome(agent)["kind"] == "unknown"


def server_of(agent: AgentFolder) -> int:
    return int((agent.run_folder / "toolserver" / "pid").read_text().split()[0])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_in_a_call_has_its_files_and_goes_on(number: signal.Signals, agent: AgentFolder) -> None:
    process = in_the_call(agent, 100)
    process.send_signal(number)
    assert process.wait(60) == 130, agent.log()
    assert lines(agent) == ["one"]
    assert outcome(agent)["kind"] == "cancelled"
    assert "interrupted while it ran" in str(outcome(agent)["observation"])
    assert not processes_with(str(agent.run_folder)), "something is left behind"
    check_resumed(agent)


def test_out_of_time_in_a_call_has_its_files_and_goes_on(agent: AgentFolder) -> None:
    process = in_the_call(agent, 100, "--max-seconds", "8")
    assert process.wait(60) == 3, agent.log()
    assert lines(agent) == ["one"]
    assert outcome(agent)["kind"] == "cancelled"
    check_resumed(agent, "--max-seconds", "600")


def test_a_second_ctrl_c_in_a_call_loses_nothing_either(agent: AgentFolder) -> None:
    process = in_the_call(agent, 3)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    check_resumed(agent)
