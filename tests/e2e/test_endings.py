"""How runs end other than well: budgets, Ctrl-C, what can't be reached. Each leaves a partial report and can be resumed."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from agent.events import EventKind
from tests.e2e.agent_process import AgentFolder, processes_with, wait_for
from tests.server_process import ServerProcess

pytestmark = [pytest.mark.bubblewrap, pytest.mark.timeout(240)]

GOAL = "Write four lines"
LINES = ["one", "two", "three", "four"]
NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing listens there


def lines_of(agent: AgentFolder) -> list[str]:
    return (agent.run_folder / "workspace" / "counter.txt").read_text().split()


def test_json_gives_one_object_and_progress_goes_to_standard_error(remote: AgentFolder) -> None:
    done = remote.hurry().command("run", GOAL, "--json", "--max-llm-calls", "40")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["schema"], result["state"], result["answer"]) == (1, "done", "4 lines were written.")
    assert result == {**remote.result(), "folder": str(remote.run_folder)}
    assert [task["state"] for task in result["tasks"]] == ["success", "success"]
    assert [entry["path"] for entry in result["artifacts"]] == ["counter.txt"]
    assert "At most 40 model calls" in done.stderr
    assert "t2 is success" in done.stderr


def test_quiet_prints_the_answer_alone(remote: AgentFolder) -> None:
    done = remote.hurry().command("run", GOAL, "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "4 lines were written.\n", "")


@pytest.mark.parametrize(
    ("option", "low", "high"),
    [("--max-llm-calls", "5", "60"), ("--max-tool-calls", "2", "60"), ("--max-tokens", "9000", "900000")],
)
def test_a_budget_stops_with_3_and_a_higher_one_goes_on(option: str, low: str, high: str, remote: AgentFolder) -> None:
    stopped = remote.hurry().command("run", GOAL, option, low)
    assert stopped.returncode == 3, stopped.stderr
    assert "agent resume" in stopped.stderr
    result = remote.result()
    assert (result["state"], result["exit_code"]) == ("stopped", 3)
    assert "Why it ended" in (remote.run_folder / "report.html").read_text()
    resumed = remote.command("resume", remote.run_id, option, high)
    assert resumed.returncode == 0, resumed.stderr
    assert lines_of(remote) == LINES
    total = remote.result()["costs"]["total"]
    assert total["llm_calls"] <= 14
    assert total["tool_calls"] == 4


def test_seconds_stop_a_run_too(remote: AgentFolder) -> None:
    stopped = remote.command("run", GOAL, "--max-seconds", "2")
    assert stopped.returncode == 3, stopped.stderr
    resumed = remote.hurry().command("resume", remote.run_id, "--max-seconds", "600")
    assert resumed.returncode == 0, resumed.stderr
    assert len(lines_of(remote)) == len(set(lines_of(remote)))


def test_a_budget_that_is_used_up_stays_so_without_a_higher_one(remote: AgentFolder) -> None:
    for command in (("run", GOAL, "--max-llm-calls", "1"), ("resume", "2")):
        assert remote.hurry().command(*command).returncode == 3
    assert remote.result()["costs"]["total"]["llm_calls"] == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_with_130_a_partial_report_and_goes_on_later(number: signal.Signals, agent: AgentFolder) -> None:
    process = agent.start("run", GOAL)
    agent.wait_for_event(EventKind.TASK_CHANGED, "t2", process)
    process.send_signal(number)
    assert process.wait(60) == 130, agent.log()
    result = agent.result()
    assert (result["state"], result["exit_code"]) == ("interrupted", 130)
    assert result["tasks"][0]["state"] == "success"
    assert (agent.run_folder / "report.html").exists()
    assert not processes_with(str(agent.run_folder)), "something is left behind"
    resumed = agent.hurry().command("resume", agent.run_id)
    assert resumed.returncode == 0, resumed.stderr
    assert lines_of(agent)[:2] == ["one", "two"]
    assert len(lines_of(agent)) == len(set(lines_of(agent)))


def test_a_second_ctrl_c_ends_at_once_and_leaves_nothing(agent: AgentFolder) -> None:
    process = agent.start("run", GOAL)
    agent.wait_for_event(EventKind.TOOL_INTENDED, "t1/a1/actor/s1/c0", process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert time.monotonic() - started < 10
    wait_for(lambda: not processes_with(str(agent.run_folder)), 30, "something is left behind")


def test_nothing_is_left_of_a_run_that_is_done(agent: AgentFolder) -> None:
    done = agent.hurry().command("run", GOAL)
    assert done.returncode == 0, done.stderr
    assert lines_of(agent) == LINES
    assert not processes_with(str(agent.run_folder)), "a ToolServer or a sandbox is left behind"


def test_a_model_that_cannot_be_reached_is_5(remote: AgentFolder) -> None:
    done = remote.command("run", GOAL, "--base-url", f"{NOWHERE}/v1", AGENT_LLM__MAX_ATTEMPTS="2")
    assert done.returncode == 5, done.stderr
    assert "model" in remote.result()["reason"]
    assert remote.result()["state"] == "stopped"
    resumed = remote.hurry().command("resume", remote.run_id)
    assert resumed.returncode == 0, resumed.stderr
    assert lines_of(remote) == LINES


def test_a_model_server_that_refuses_is_5_and_names_what_to_change(remote: AgentFolder, counting_model: str) -> None:
    done = remote.command("run", GOAL, "--base-url", counting_model.removesuffix("/v1") + "/nowhere")
    assert done.returncode == 5, done.stderr
    assert "404" in done.stderr


def test_a_toolserver_that_is_down_is_5(agent: AgentFolder) -> None:
    done = agent.command("run", GOAL, "--toolserver", NOWHERE, AGENT_TOOLSERVER__MAX_ATTEMPTS="2")
    assert done.returncode == 5, done.stderr
    assert NOWHERE in done.stderr
    assert not (agent.path / "runs").exists()


def test_a_toolserver_that_dies_under_a_run_leaves_result_and_report(agent: AgentFolder, tmp_path: Path) -> None:
    server = ServerProcess("bubblewrap", tmp_path / "server")
    server.start()
    try:
        agent.settings |= {
            "AGENT_TOOLSERVER__URL": server.url,
            "AGENT_TOOLSERVER__API_KEY": server.key,
            "AGENT_TOOLSERVER__MAX_ATTEMPTS": "1",
        }
        process = agent.start("run", GOAL)
        agent.wait_for_event(EventKind.TOOL_SETTLED, "t1/a1/actor/s1/c0", process)
        server.kill()
        assert process.wait(90) == 5, agent.log()
    finally:
        server.end()
    assert agent.result()["state"] == "stopped"
    assert lines_of(agent) == ["one"]
    assert (agent.run_folder / "report.html").exists()
    assert "Traceback" not in agent.log()


def test_a_wrong_key_of_the_toolserver_is_told(remote: AgentFolder) -> None:
    done = remote.command("run", GOAL, AGENT_TOOLSERVER__API_KEY="wrong")
    assert done.returncode == 5, done.stderr
    assert "API_KEY" in done.stderr


def test_an_embedded_toolserver_that_does_not_start_is_5_with_its_log(agent: AgentFolder) -> None:
    done = agent.command(
        "run", GOAL, "--runtime", "docker", DOCKER_HOST="unix:///nowhere/docker.sock", AGENT_TOOLSERVER__START_S="10"
    )
    assert done.returncode == 5, done.stderr
    assert "Traceback" not in done.stderr


def test_runs_side_by_side_in_one_folder_do_not_mix(remote: AgentFolder) -> None:
    both = [remote.hurry().start("run", GOAL), remote.start("run", GOAL)]
    assert [process.wait(120) for process in both] == [0, 0], remote.log()
    folders = [place for place in (remote.path / "runs").iterdir() if (place / "result.json").exists()]
    assert len(folders) == 2
    for folder in folders:
        assert (folder / "workspace" / "counter.txt").read_text().split() == LINES


def test_doctor_tries_model_toolserver_and_sandbox(remote: AgentFolder) -> None:
    done = remote.command("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert {name: check["ok"] for name, check in checks.items()} == {
        "runs folder": True, "model": True, "ToolServer": True, "tools": True, "sandbox": True,
    }, done.stdout  # fmt: skip
    assert done.returncode == 0
    assert "python_execute" in checks["tools"]["text"]
    down = remote.command(
        "doctor", "--json", "--toolserver", NOWHERE, "--base-url", f"{NOWHERE}/v1", AGENT_LLM__MAX_ATTEMPTS="1"
    )
    assert down.returncode == 5
    failed = {check["name"] for check in json.loads(down.stdout)["checks"] if not check["ok"]}
    assert failed == {"model", "ToolServer"}
