"""Sessions: opened late, opened again with their workspace when gone, and what a task is told about it."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from agent.events import EventKind
from agent.tools.outcome import OutcomeKind
from agent.tools.workspace_store import WorkspaceStore
from tests.unit.function_handler.conftest import Agent, until
from tests.unit.function_handler.fake_toolserver import FakeToolServer, done, refusal

POST = ("POST", "/tools/")


def names_in(folder: Path) -> list[str]:
    return [place.name for place in folder.iterdir()]


def writes(server: FakeToolServer, name: str, content: bytes, tool: str = "note") -> None:
    async def write(session_id: str, _arguments: object) -> tuple[int, dict[str, object]]:
        server.sessions[session_id][name] = content
        return 200, done("written", workspace_changed=[name])

    server.behaviours[tool] = write


async def test_no_session_is_opened_before_it_is_needed(agent: Agent, server: FakeToolServer) -> None:
    await agent.handler.catalog()
    await agent.call(arguments="{broken")
    assert server.sent("POST") == []


async def test_input_files_are_in_the_session_before_the_first_call(
    agent: Agent, server: FakeToolServer, tmp_path: Path
) -> None:
    source = tmp_path / "data.csv"
    source.write_bytes(b"a,b\n" * 100_000)
    assert agent.store.add_inputs([source]) == ["data.csv"]
    await agent.call()
    assert server.sessions["s-1"] == {"data.csv": source.read_bytes()}
    assert agent.of(EventKind.SESSION_OPENED) == [{"session_id": "s-1", "reason": "first", "restored_files": 1}]


async def test_changed_files_are_in_the_runs_folder_before_the_call_is_settled(
    agent: Agent, server: FakeToolServer
) -> None:
    writes(server, "out/result.txt", b"\x00\xffdata")
    seen: list[bytes] = []

    def look(event: object) -> None:
        if event.kind is EventKind.TOOL_SETTLED:  # type: ignore[attr-defined]
            seen.append((agent.folder / "out/result.txt").read_bytes())

    agent.journal.subscribe(look)
    outcome = await agent.call()
    assert seen == [b"\x00\xffdata"]
    assert "[Files changed: out/result.txt]" in outcome.observation


async def test_deleted_files_are_deleted_here_too(agent: Agent, server: FakeToolServer) -> None:
    writes(server, "a.txt", b"1")
    await agent.call()

    async def delete(session_id: str, _arguments: object) -> tuple[int, dict[str, object]]:
        del server.sessions[session_id]["a.txt"]
        return 200, done("", workspace_changed=["a.txt"])

    server.behaviours["put"] = delete
    await agent.call("put", key="t1/a1/actor/s2/c0")
    assert agent.store.files() == {}
    assert not (agent.folder / "a.txt").exists()


@pytest.mark.parametrize("cause", ["idle", "expired", "node_lost"])
async def test_a_gone_session_comes_back_with_its_files_and_the_model_is_told(
    agent: Agent, server: FakeToolServer, cause: str
) -> None:
    writes(server, "kept.txt", b"kept")
    await agent.call()
    server.end_session("s-1", cause)
    del server.behaviours["note"]
    outcome = await agent.call(key="t1/a1/actor/s2/c0")
    assert outcome.kind is OutcomeKind.DONE
    assert server.sessions["s-2"] == {"kept.txt": b"kept"}
    assert agent.of(EventKind.SESSION_OPENED)[1] == {"session_id": "s-2", "reason": "gone", "restored_files": 1}
    assert f"The session was gone ({cause})" in outcome.observation
    assert "Python variables" in outcome.observation
    assert "1 files of the workspace were restored" in outcome.observation
    assert "gone" not in (await agent.call(key="t1/a1/actor/s3/c0")).observation, "it is told once"
    assert "gone" in (await agent.call(key="t2/a1/actor/s1/c0")).observation, "and to each task"


async def test_a_session_the_server_never_heard_of_is_replaced(agent: Agent, server: FakeToolServer) -> None:
    await agent.call()
    server.forget()
    outcome = await agent.call(key="t1/a1/actor/s2/c0")
    assert outcome.kind is OutcomeKind.DONE
    assert len(server.effects) == 2


async def test_many_files_travel_as_one_archive_both_ways(agent: Agent, server: FakeToolServer) -> None:
    async def write_many(session_id: str, _arguments: object) -> tuple[int, dict[str, object]]:
        names = [f"d/{n}.txt" for n in range(100)]
        server.sessions[session_id].update({name: name.encode() for name in names})
        return 200, done(workspace_changed=["d", *names])

    server.behaviours["note"] = write_many
    await agent.call()
    assert len(agent.store.files()) == 100
    assert (agent.folder / "d/7.txt").read_bytes() == b"d/7.txt"
    assert len(server.sent("GET", "/archive")) == 1
    assert server.sent("GET", "/files/") == []
    server.end_session("s-1")
    del server.behaviours["note"]
    await agent.call(key="t1/a1/actor/s2/c0")
    assert len(server.sessions["s-2"]) == 100
    assert len(server.sent("PUT")) == 1


async def test_a_file_that_became_a_folder_is_no_file_here_either(agent: Agent, server: FakeToolServer) -> None:
    writes(server, "a", b"1")
    await agent.call()

    async def turn(session_id: str, _arguments: object) -> tuple[int, dict[str, object]]:
        del server.sessions[session_id]["a"]
        server.sessions[session_id]["a/b"] = b"2"
        return 200, done(workspace_changed=["a"])

    server.behaviours["put"] = turn
    await agent.call("put", key="t1/a1/actor/s2/c0")
    assert agent.store.files() == {}


async def test_a_list_of_changes_that_is_not_complete_fetches_all(agent: Agent, server: FakeToolServer) -> None:
    writes(server, "old.txt", b"old")
    await agent.call()

    async def replace(session_id: str, _arguments: object) -> tuple[int, dict[str, object]]:
        server.sessions[session_id].clear()
        server.sessions[session_id]["new.txt"] = b"new"
        return 200, done(workspace_changed=["x"], workspace_changed_more=True)

    server.behaviours["put"] = replace
    await agent.call("put", key="t1/a1/actor/s2/c0")
    assert agent.store.files() == {"new.txt": 3}
    assert not (agent.folder / "a-link").exists()


async def test_a_tool_that_died_has_its_workspace_fetched_whole(agent: Agent, server: FakeToolServer) -> None:
    async def die(session_id: str, _arguments: object) -> tuple[int, dict[str, object]]:
        server.sessions[session_id]["half.txt"] = b"half"
        return 500, {"code": "oom_killed", "content": [], "workspace_changed": []}

    server.behaviours["note"] = die
    assert (await agent.call()).kind is OutcomeKind.FAILED
    assert agent.store.files() == {"half.txt": 4}


@pytest.mark.parametrize("name", ["../out.txt", "/etc/x", "a/../../b", "a\0b", "x" * 300, ""])
async def test_a_name_that_leaves_the_folder_is_left_out_with_a_note(
    agent: Agent, server: FakeToolServer, name: str, tmp_path: Path
) -> None:
    async def lie(session_id: str, _arguments: object) -> tuple[int, dict[str, object]]:
        server.sessions[session_id][name.strip("/")] = b"evil"
        return 200, done(workspace_changed=[name])

    server.behaviours["note"] = lie
    assert (await agent.call()).ok
    assert names_in(tmp_path) == ["workspace"]
    assert names_in(agent.folder) == []
    assert "is left out of the run's folder: its name" in agent.notes()


async def test_a_file_beyond_the_bound_is_left_out_and_an_older_copy_does_not_pass_for_it(
    server: FakeToolServer, tmp_path: Path
) -> None:
    agent = Agent(server, tmp_path / "w")
    agent.store.max_file_bytes = 10
    writes(server, "f.txt", b"small")
    await agent.call()
    writes(server, "f.txt", b"much too large for it")
    await agent.call(key="t1/a1/actor/s2/c0")
    assert agent.store.files() == {}
    assert "f.txt is left out of the run's folder: it is larger than the 10 bytes" in agent.notes()


async def test_a_file_that_could_not_be_fetched_is_fetched_with_the_next_call(
    agent: Agent, server: FakeToolServer
) -> None:
    writes(server, "a.txt", b"1")
    server.fault("GET", "/files/", "drop_before")
    assert (await agent.call()).ok
    assert "1 changed files (a.txt) could not be fetched" in agent.notes()
    del server.behaviours["note"]
    await agent.call(key="t1/a1/actor/s2/c0")
    assert agent.store.files() == {"a.txt": 1}


async def test_a_call_whose_session_vanished_under_it_is_asked_for_and_told_truthfully(
    agent: Agent, server: FakeToolServer
) -> None:
    writes(server, "before.txt", b"before")
    await agent.call()
    gone = refusal(410, "session_gone", cause="oom", call_id="x", effects="possible")
    server.answer_with(*POST, gone)
    server.answer_with("GET", "/v1/calls/", gone)
    server.end_session("s-1", "oom")
    outcome = await agent.call(key="t1/a1/actor/s2/c0")
    assert (outcome.kind, outcome.code, outcome.executed) == (OutcomeKind.UNKNOWN, "session_gone", "possible")
    assert "workspace is restored to the state before this call" in outcome.observation
    assert len(server.sent("GET", "/v1/calls/")) == 1
    assert (await agent.call("peek", key="t1/a1/actor/s3/c0")).ok
    assert server.sessions["s-2"] == {"before.txt": b"before"}


async def test_a_call_that_a_server_forgot_with_its_machine_is_unknown_and_not_sent_again(
    agent: Agent, server: FakeToolServer
) -> None:
    await agent.call("peek")
    server.fault(*POST, "drop_after")
    server.answer_with("GET", "/v1/calls/", refusal(404, "call_not_found"))
    lost = refusal(410, "session_gone", cause="node_lost", successor="s-9", effects="possible")
    server.answer_with("GET", "/v1/sessions/s-1", lost)
    server.end_session("s-1", "node_lost")
    sent = len(server.sent(*POST))
    outcome = await agent.call(key="t1/a1/actor/s2/c0")
    assert (outcome.kind, outcome.executed) == (OutcomeKind.UNKNOWN, "possible")
    assert len(server.sent(*POST)) == sent + 1


async def test_a_call_that_was_done_before_its_session_vanished_keeps_its_outcome(
    agent: Agent, server: FakeToolServer
) -> None:
    await agent.call("peek")
    server.fault(*POST, "drop_after")
    task = asyncio.create_task(agent.call(key="t1/a1/actor/s2/c0"))
    await until(lambda: len(server.effects) >= 2)
    server.end_session("s-1")
    outcome = await task
    assert outcome.kind is OutcomeKind.DONE
    assert len(server.effects) == 2


async def test_a_session_that_can_not_be_filled_is_not_used(
    agent: Agent, server: FakeToolServer, tmp_path: Path
) -> None:
    (tmp_path / "in.txt").write_text("x")
    agent.store.add_inputs([tmp_path / "in.txt"])
    server.answer_with("PUT", "/files/", refusal(503, "runtime_unavailable"))
    outcome = await agent.call()
    assert outcome.kind is OutcomeKind.DONE
    assert "s-1" in server.gone, "the half-filled one is ended"
    assert server.sessions["s-2"] == {"in.txt": b"x"}


async def test_a_resumed_run_goes_on_in_its_live_session(agent: Agent, server: FakeToolServer) -> None:
    await agent.call()
    later = agent.again()
    outcome = await later.call(key="t1/a1/actor/s2/c0")
    assert list(server.sessions) == ["s-1"]
    assert "gone" not in outcome.observation


async def test_a_resumed_run_whose_session_is_gone_gets_another_with_its_files(
    agent: Agent, server: FakeToolServer
) -> None:
    writes(server, "a.txt", b"1")
    await agent.call()
    await agent.handler.close()
    del server.behaviours["note"]
    later = agent.again()
    outcome = await later.call(key="t1/a1/actor/s2/c0")
    assert server.sessions["s-2"] == {"a.txt": b"1"}
    assert "The session was gone (deleted)" in outcome.observation


async def test_what_a_call_changed_is_fetched_in_the_session_it_was_sent_to_again(
    agent: Agent, server: FakeToolServer
) -> None:
    await agent.call()
    server.end_session("s-1")
    writes(server, "late.txt", b"late")
    await agent.call(key="t1/a1/actor/s2/c0")
    assert agent.store.files() == {"late.txt": 4}


async def test_a_resumed_run_fetches_what_the_call_changed_that_it_asks_for(
    agent: Agent, server: FakeToolServer
) -> None:
    writes(server, "a.txt", b"1")
    agent.handler._settlement._sync.pull = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        await agent.call()
    later = agent.again()
    assert (await later.call()).ok
    assert later.store.files() == {"a.txt": 1}
    assert len(server.effects) == 1


async def broken(*_: object, **__: object) -> str:
    """The process ends between the tool's end and its settlement."""
    raise RuntimeError


async def test_files_lost_with_their_session_are_named(agent: Agent, server: FakeToolServer) -> None:
    writes(server, "a.txt", b"1")
    agent.handler._settlement._sync.pull = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        await agent.call()
    server.end_session("s-1")
    outcome = await agent.again().call()
    assert outcome.kind is OutcomeKind.DONE
    assert "ended before the files that this call changed could be fetched: a.txt" in outcome.observation
    assert outcome.workspace_changed == []
    assert "the call of note at t1/a1/actor/s1/c0" in agent.notes(), "the report must show it too"


async def test_files_of_a_session_that_was_kept_count_as_fetched(agent: Agent, server: FakeToolServer) -> None:
    writes(server, "a.txt", b"1")
    agent.handler._settlement._sync.pull = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        await agent.call()
    server.end_session("s-1", "shutdown")
    with agent.store.writer("a.txt") as target:
        target.write(b"1")
        target.commit()
    later = agent.again(options={"kept": frozenset({"s-1"})})
    outcome = await later.call()
    assert (outcome.kind, outcome.workspace_changed) == (OutcomeKind.DONE, ["a.txt"])
    assert "lost" not in outcome.observation
    assert later.notes() == ""
    following = await later.call("peek", key="t1/a1/actor/s2/c0")
    assert "Python variables, open shells and background commands are lost" in following.observation
    assert server.sessions["s-2"] == {"a.txt": b"1"}


async def test_another_session_means_that_the_tool_list_is_fetched_again(agent: Agent, server: FakeToolServer) -> None:
    await agent.call()
    server.end_session("s-1")
    server.add_tool("fresh")
    await agent.call(key="t1/a1/actor/s2/c0")
    assert "fresh" in [tool.name for tool in await agent.handler.catalog()]


async def test_closing_ends_the_session_and_is_never_an_error(
    agent: Agent, server: FakeToolServer, caplog: pytest.LogCaptureFixture
) -> None:
    await agent.call()
    await agent.handler.close()
    assert server.sessions == {}
    other = agent.again()
    await other.call(key="t1/a1/actor/s2/c0")
    await server.stop()
    with caplog.at_level(logging.WARNING, logger="agent"):
        await other.handler.close()
    assert len([record for record in caplog.records if record.name.startswith("agent")]) == 1
    assert "connection refused" in caplog.text


def test_the_store_is_there_again_after_a_restart(tmp_path: Path) -> None:
    store = WorkspaceStore(tmp_path)
    with store.writer("a/b.txt") as target:
        target.write(b"x")
        target.commit()
    assert WorkspaceStore(tmp_path).files() == {"a/b.txt": 1}
