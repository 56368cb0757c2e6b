"""A server that dies and comes back on the same state and the same engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.unit.toolserver.crib import Crib, crashing, detail, new_runtime, running, settings
from toolserver.runtime.base import SandboxEnd
from toolserver.runtime.fake_runtime import FakeSandbox
from toolserver.runtime.fake_workspace import FakeWorkspace

LEFT_OPEN_S = 0.1


async def leave_open(crib: Crib, session: str, key: str, seconds: float, **more: Any) -> None:
    """A call that runs on when the server dies."""
    told = await crib.call(session, "count", {"seconds": seconds}, key=key, wait_s=LEFT_OPEN_S, **more)
    detail(told, 450, "still_running")


async def test_a_session_goes_on_with_its_sandbox(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    runtime = new_runtime(chosen)
    async with crashing(chosen, runtime) as crib:
        session = await crib.session(env={"A": "b"}, labels={"for": "me"})
        before = (await crib.client.get(f"/v1/sessions/{session}")).json()
        first = await crib.call(session, "count", key="one")
    async with running(chosen, runtime) as crib:
        assert (await crib.client.get(f"/v1/sessions/{session}")).json() == before
        assert (await crib.call(session, "count", key="one")).content == first.content
        second = await crib.call(session, "count")
        assert second.json()["content"][0]["text"] == "count 2"
        assert "sandbox_reset" not in second.json()
        bound = crib.sandbox(session).bound
        assert bound is not None
        assert bound["env"] == {"A": "b"}
        assert len(runtime.sandboxes) == 1
        await crib.client.delete(f"/v1/sessions/{session}")
    assert not runtime.sandboxes
    assert not runtime.workspaces


@pytest.mark.parametrize("ended", [False, True], ids=["still running", "ended meanwhile"])
async def test_a_call_that_ran_on_has_its_outcome_and_ran_once(tmp_path: Path, ended: bool) -> None:
    chosen = settings(tmp_path)
    runtime = new_runtime(chosen)
    async with crashing(chosen, runtime) as crib:
        session = await crib.session()
        await leave_open(crib, session, "key-1", 0.3 if ended else 1.0)
    if ended:
        await asyncio.sleep(0.4)
    async with running(chosen, runtime) as crib:
        joined, asked = await asyncio.gather(
            crib.call(session, "count", {"seconds": 0.3 if ended else 1.0}, key="key-1"),
            crib.client.get("/v1/calls/key-1?wait_s=5"),
        )
        assert joined.status_code == 200, joined.text
        assert joined.content == asked.content
        assert joined.json()["content"][0]["text"] == "count 1"
        assert runtime.workspaces[crib.workspace_id(session)].files["count"] == b"x"


async def test_a_call_that_ran_on_can_be_cancelled_and_followed(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    runtime = new_runtime(chosen)
    async with crashing(chosen, runtime) as crib:
        session = await crib.session()
        told = await crib.call(session, "sleep", {"seconds": 30}, key="key-1", wait_s=LEFT_OPEN_S)
        detail(told, 450, "still_running")
    async with running(chosen, runtime) as crib:
        seen = detail(await crib.client.get("/v1/calls/key-1?wait_s=0.3"), 450, "still_running")
        assert seen["content"][0]["text"] == "sleeping\n"
        cancelled = (await crib.client.delete("/v1/calls/key-1")).json()
        assert (cancelled["cancelled"], cancelled["state"]) == (True, "kept")
        detail(await crib.client.get("/v1/calls/key-1"), 500, "cancelled")


async def test_a_deadline_goes_on_over_the_restart(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    runtime = new_runtime(chosen)
    async with crashing(chosen, runtime) as crib:
        session = await crib.session()
        await leave_open(crib, session, "key-1", 30, deadline_s=0.5)
    async with running(chosen, runtime) as crib:
        detail(await crib.client.get("/v1/calls/key-1?wait_s=5"), 450, "deadline_exceeded")


async def test_a_call_whose_sandbox_died_meanwhile_is_unknown_and_the_next_one_tells_the_loss(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    runtime = new_runtime(chosen)
    async with crashing(chosen, runtime) as crib:
        session = await crib.session()
        await leave_open(crib, session, "key-1", 30)
    await next(iter(runtime.sandboxes.values())).kill()
    async with running(chosen, runtime) as crib:
        told = detail(await crib.client.get("/v1/calls/key-1?wait_s=5"), 500, "outcome_unknown")
        assert told["effects"] == "possible"
        again = await crib.call(session, "count", {"seconds": 30}, key="key-1", wait_s=0)
        detail(again, 500, "outcome_unknown")
        after = await crib.call(session, "count")
        assert after.json()["sandbox_reset"] is True
        assert after.json()["content"][1]["text"] == "count 2"  # the workspace is kept


async def test_a_call_that_was_written_down_and_never_sent_gives_its_key_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = settings(tmp_path)
    runtime = new_runtime(chosen)
    async with crashing(chosen, runtime) as crib:
        session = await crib.session()

        async def deaf(_self: FakeSandbox, _data: bytes) -> None:
            await asyncio.Event().wait()

        with monkeypatch.context() as patched:
            patched.setattr(FakeSandbox, "send", deaf)
            detail(await crib.call(session, "count", key="key-1", wait_s=0.1), 450, "still_running")
    async with running(chosen, runtime) as crib:
        told = await crib.call(session, "count", key="key-1")
        if told.status_code != 200:  # it came before the sandbox was asked
            assert detail(told, 503, "runtime_unavailable")["effects"] == "none"
            told = await crib.call(session, "count", key="key-1")
        assert told.json()["content"][0]["text"] == "count 1"


async def test_without_the_extension_a_call_is_unknown_and_the_sandbox_goes_on(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    runtime = new_runtime(chosen)
    async with crashing(chosen, runtime) as crib:
        session = await crib.session(images=["foreign"])
        told = await crib.call(session, "foreign_wait", key="key-1", wait_s=0.1)
        detail(told, 450, "still_running")
    async with running(chosen, runtime) as crib:
        detail(await crib.client.get("/v1/calls/key-1?wait_s=5"), 500, "outcome_unknown")
        result = {"result": {"content": [{"type": "text", "text": "here"}]}}
        assert (await crib.call(session, "foreign_result", result)).json()["content"][0]["text"] == "here"
        assert len(runtime.sandboxes) == 1


async def test_clocks_go_on_over_the_restart(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    runtime = new_runtime(chosen)
    async with crashing(chosen, runtime) as crib:
        expires, idles = await crib.session(ttl_s=0.6), await crib.session(idle_s=0.6)
        stays = await crib.session()
    await asyncio.sleep(0.6)
    async with running(chosen, runtime) as crib:
        for _ in range(100):
            answers = [await crib.client.get(f"/v1/sessions/{name}") for name in (expires, idles)]
            if all(answer.status_code == 410 for answer in answers):
                break
            await asyncio.sleep(0.02)
        assert [detail(answer, 410, "session_gone")["cause"] for answer in answers] == ["expired", "idle"]
        assert (await crib.call(stays, "echo", {"text": "x"})).status_code == 200


async def test_a_session_that_lost_its_workspace_is_node_lost(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    runtime = new_runtime(chosen)
    async with crashing(chosen, runtime) as crib:
        session = await crib.session()
        workspace = crib.workspace_id(session)
    del runtime.workspaces[workspace]
    async with running(chosen, runtime) as crib:
        await crib.server.reaper.reconcile()
        told = detail(await crib.client.get(f"/v1/sessions/{session}"), 410, "session_gone")
        assert told["cause"] == "node_lost"


async def test_an_engine_that_is_away_at_the_restart_is_waited_for(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    runtime = new_runtime(chosen)
    async with crashing(chosen, runtime) as crib:
        session = await crib.session()
        await leave_open(crib, session, "key-1", 0.2)
    runtime.unavailable = "No engine answers."
    async with running(chosen, runtime) as crib:
        detail(await crib.client.get("/v1/calls/key-1?wait_s=0.3"), 450, "still_running")
        told = detail(await crib.call(session, "echo", {"text": "x"}), 503, "runtime_unavailable")
        assert told["effects"] == "none"
        runtime.unavailable = None
        assert (await crib.client.get("/v1/calls/key-1?wait_s=5")).status_code == 200
        assert (await crib.call(session, "echo", {"text": "x"})).status_code == 200


async def test_orphans_go_and_what_sessions_have_stays(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    runtime = new_runtime(chosen)
    async with crashing(chosen, runtime) as crib:
        session = await crib.session()
        kept = crib.workspace_id(session)
    runtime.workspaces["wsp_orphan"] = FakeWorkspace()
    async with running(chosen, runtime) as crib:
        await crib.server.reaper.reconcile()
        assert set(runtime.workspaces) == {kept}
        assert len(runtime.sandboxes) == 1


async def test_a_stream_that_is_cut_is_taken_up_again_and_its_call_goes_on(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    runtime = new_runtime(chosen)
    async with running(chosen, runtime) as crib:
        session = await crib.session()
        running_call = asyncio.create_task(crib.call(session, "count", {"seconds": 0.5}))
        await asyncio.sleep(0.1)
        box = crib.server.registry.live()[0].boxes["workspace"]
        assert box.live is not None
        box.live.client._lose("the stream was cut", cut=True)
        answer = await running_call
        assert answer.json()["content"][0]["text"] == "count 1"
        after = await crib.call(session, "count")
        assert (after.json()["content"][0]["text"], "sandbox_reset" in after.json()) == ("count 2", False)
        assert len(runtime.sandboxes) == 1


async def test_a_shutdown_that_keeps_sessions_leaves_them_to_the_next_start(tmp_path: Path) -> None:
    chosen = settings(tmp_path, session={"at_shutdown": "keep"}, http={"drain_s": 0.1})
    runtime = new_runtime(chosen)
    async with running(chosen, runtime) as crib:
        session = await crib.session()
        waiting = asyncio.create_task(crib.call(session, "count", {"seconds": 0.6}, key="key-1"))
        await asyncio.sleep(0.1)
        await crib.server.drain()
        told = detail(await waiting, 450, "still_running")
        assert told["arguments"] == {"call_id": "key-1"}
    assert len(runtime.sandboxes) == 1
    async with running(chosen, runtime) as crib:
        assert (await crib.client.get("/v1/calls/key-1?wait_s=5")).json()["content"][0]["text"] == "count 1"
        await crib.client.delete(f"/v1/sessions/{session}")
    assert not runtime.sandboxes


async def test_a_worker_hears_from_its_server_well_within_the_lease(tmp_path: Path) -> None:
    chosen = settings(tmp_path, session={"lease_s": 5})
    async with running(chosen) as crib:
        session = await crib.session()
        fake = crib.sandbox(session)
        assert fake.bound is not None
        assert fake.bound["lease_s"] == 5
        box = crib.server.registry.live()[0].boxes["workspace"]
        assert box.live is not None
        box.live.client.last_sent -= 2
        await crib.server.registry.renew_leases()
        await crib.server.registry.renew_leases()
        assert [request["method"] for request in fake.requests].count("ping") == 1


async def test_an_end_that_is_known_is_told_to_the_next_call(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    runtime = new_runtime(chosen)
    async with crashing(chosen, runtime) as crib:
        session = await crib.session()
    await next(iter(runtime.sandboxes.values())).kill()
    async with running(chosen, runtime) as crib:
        await crib.server.reaper.reconcile()
        box = crib.server.registry.live()[0].boxes["workspace"]
        assert not box.needs_care
        assert box._lost == SandboxEnd("killed", 137)
        assert (await crib.call(session, "echo", {"text": "x"})).json()["sandbox_reset"] is True
