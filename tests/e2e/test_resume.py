"""The agent is killed at different moments, and goes on: nothing is lost, nothing is done twice."""

from __future__ import annotations

import signal
from collections import Counter

import pytest

from agent.events import EventKind
from agent.planning.task import TaskState
from tests.e2e.agent_process import AgentFolder, processes_with, wait_for

pytestmark = [pytest.mark.bubblewrap, pytest.mark.timeout(240)]

GOAL = "Write four lines"
LINES = ["one", "two", "three", "four"]
UNINTERRUPTED_LLM_CALLS = 12  # plan, 2 × (3 steps, critic, reflector), answer

MOMENTS = [
    pytest.param(EventKind.TOOL_INTENDED, "t1/a1/actor/s2/c0", id="while a tool runs"),
    pytest.param(EventKind.TOOL_SETTLED, "t1/a1/actor/s1/c0", id="after a tool has run"),
    pytest.param(EventKind.TASK_SUBMITTED, "t1", id="before the critic"),
    pytest.param(EventKind.TOOL_INTENDED, "t2/a1/actor/s1/c0", id="in the second task"),
    pytest.param(EventKind.LLM_REQUESTED, "t2/a1/actor/s1", id="while the model is asked"),
    pytest.param(EventKind.LLM_REQUESTED, "answer/summariser/r0", id="while the answer is written"),
]


def kill_at(agent: AgentFolder, kind: EventKind, key: str) -> None:
    process = agent.start("run", GOAL)
    agent.wait_for_event(kind, key, process)
    process.kill()
    process.wait(30)


def check_finished(agent: AgentFolder, done_before: list[str]) -> None:
    story = agent.story()
    run = story.run
    assert (run.state, run.answer) == ("done", "4 lines were written.")
    assert [node.state for node in run.plan.walk()] == [TaskState.SUCCESS, TaskState.SUCCESS]
    assert (agent.run_folder / "workspace" / "counter.txt").read_text().split() == LINES
    assert agent.result()["state"] == "done"
    assert run.cost.llm_calls <= UNINTERRUPTED_LLM_CALLS + 1
    settled = Counter(event.data["key"] for event in agent.events() if event.kind is EventKind.TOOL_SETTLED)
    assert len(settled) == 4
    assert set(settled.values()) == {1}
    replied = [event.data["key"] for event in agent.events() if event.kind is EventKind.LLM_REPLIED]
    assert len(replied) == len(set(replied))
    assert set(done_before) <= set(settled)


@pytest.mark.parametrize(("kind", "key"), MOMENTS)
def test_killed_beside_a_toolserver_that_lives_on(kind: EventKind, key: str, remote: AgentFolder) -> None:
    kill_at(remote, kind, key)
    before = [event.data["key"] for event in remote.events() if event.kind is EventKind.TOOL_SETTLED]
    resumed = remote.hurry().command("resume", remote.run_id)
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.strip() == "4 lines were written."
    check_finished(remote, before)


@pytest.mark.parametrize(("kind", "key"), MOMENTS)
def test_killed_with_its_own_toolserver(kind: EventKind, key: str, agent: AgentFolder) -> None:
    kill_at(agent, kind, key)
    state_folder = str(agent.run_folder / "toolserver")
    before = [event.data["key"] for event in agent.events() if event.kind is EventKind.TOOL_SETTLED]
    resumed = agent.hurry().command("resume", agent.run_id)
    assert resumed.returncode == 0, resumed.stderr
    check_finished(agent, before)
    wait_for(lambda: not processes_with(state_folder), 20, "a ToolServer is left behind")


def test_a_server_whose_agent_was_killed_ends_by_itself(agent: AgentFolder) -> None:
    kill_at(agent, EventKind.TOOL_SETTLED, "t1/a1/actor/s1/c0")
    wait_for(lambda: not processes_with(str(agent.run_folder)), 30, "the ToolServer outlives its agent")


def test_killed_twice_it_still_finishes(remote: AgentFolder) -> None:
    kill_at(remote, EventKind.TOOL_SETTLED, "t1/a1/actor/s1/c0")
    again = remote.start("resume", remote.run_id)
    remote.wait_for_event(EventKind.TOOL_SETTLED, "t2/a1/actor/s1/c0", again)
    again.kill()
    again.wait(30)
    resumed = remote.hurry().command("resume", remote.run_id)
    assert resumed.returncode == 0, resumed.stderr
    story = remote.story()
    assert story.run.resumes == 2
    assert (remote.run_folder / "workspace" / "counter.txt").read_text().split() == LINES
    assert story.run.cost.llm_calls <= UNINTERRUPTED_LLM_CALLS + 2


def test_a_run_that_another_process_works_on_is_refused(remote: AgentFolder) -> None:
    process = remote.start("run", GOAL)
    remote.wait_for_event(EventKind.TOOL_INTENDED, "t1/a1/actor/s1/c0", process)
    process.send_signal(signal.SIGSTOP)  # so that it can't end meanwhile, however slow this machine is
    refused = remote.command("resume", remote.run_id)
    process.send_signal(signal.SIGCONT)
    assert refused.returncode == 2, refused.stdout
    assert "is being worked on" in refused.stderr
    assert process.wait(60) == 0, remote.log()
    assert (remote.run_folder / "workspace" / "counter.txt").read_text().split() == LINES
