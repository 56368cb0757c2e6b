from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.unit.toolserver.crib import Crib, detail, new_runtime, running, settings
from toolserver.egress.policy import EgressPolicy
from toolserver.errors import RuntimeUnavailable
from toolserver.runtime.base import Inventory, Limits, SandboxEnd
from toolserver.runtime.fake_runtime import FakeRuntime, FakeSandbox
from toolserver.runtime.fake_server import FakeToolServer
from toolserver.runtime.fake_workspace import FakeWorkspace
from toolserver.sessions.session import Grant


async def _until_removed(crib: Crib, session_id: str) -> None:
    workspace_id = crib.workspace_id(session_id)
    for _ in range(200):
        if workspace_id not in crib.runtime.workspaces and all(
            s.spec.workspace_id != workspace_id for s in crib.runtime.sandboxes.values()
        ):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("something of the session is left")


async def test_a_session_shows_what_is_in_effect(crib: Crib) -> None:
    asked = {"memory_mb": 128, "cpus": 0.5, "pids": 32, "disk_mb": 16}
    body = {
        "images": ["workspace"],
        "limits": asked,
        "ttl_s": 60,
        "labels": {"a": "b"},
        "env": {"SECRET": "hidden-value"},
    }
    answer = await crib.client.post("/v1/sessions", json=body)
    told = answer.json()
    assert answer.status_code == 201
    assert answer.headers["location"] == f"/v1/sessions/{told['id']}"
    assert told["limits"] == asked
    assert (told["state"], told["egress"]["mode"], told["labels"]) == ("ready", "none", {"a": "b"})
    assert told["isolation"]["runtime"] == "fake"
    assert told["expires_at"].endswith("Z")
    assert {"echo", "call_wait", "call_cancel"} <= {tool["name"] for tool in told["tools"]}
    again = await crib.client.get(f"/v1/sessions/{told['id']}")
    assert again.json() == told
    assert told["id"] in {s["id"] for s in (await crib.client.get("/v1/sessions")).json()["sessions"]}
    assert "hidden-value" not in answer.text + again.text
    assert crib.sandbox(told["id"]).bound == {
        "env": {"SECRET": "hidden-value"},
        "limits": {"memory_mb": 128, "disk_mb": 16, "cpus": 0.5},
        "epoch": 1_000_000,
        "lease_s": 900,
    }


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"ttl_s": "soon"}, "/ttl_s"),
        ({"ttl_s": -5}, "/ttl_s"),
        ({"ttl_s": 10**7}, "/ttl_s"),
        ({"memory": 5}, "/memory"),
        ({"limits": {"memory_gb": 1}}, "/limits/memory_gb"),
        ({"limits": {"memory_mb": 10**9}}, "/limits/memory_mb"),
        ({"limits": {"pids": 0}}, "/limits/pids"),
        ({"limits": []}, "/limits"),
        ({"egress": {"mode": "everything"}}, "/egress/mode"),
        ({"egress": {"mode": "allow", "allow": ["a:1", "http://example.org/"]}}, "/egress/allow/1"),
        ({"egress": {"mode": "none", "allow": ["example.org:443"]}}, "/egress/allow"),
        ({"env": {"A=B": "x"}}, "/env"),
        ({"env": {"A": "x\0y"}}, "/env"),
        ({"env": {"A": {"b": 1}}}, "/env/A"),
        ({"images": "workspace"}, "/images"),
        ({"images": []}, "/images"),
        ({"images": ["workspace", "nope"]}, "/images/1"),
        ({"images": ["workspace", "workspace"]}, "/images/1"),
    ],
)
async def test_what_can_not_be_granted_is_422_with_its_pointer(crib: Crib, body: dict[str, Any], pointer: str) -> None:
    told = detail(await crib.client.post("/v1/sessions", json=body), 422, "invalid_arguments")
    assert pointer in {e["pointer"] for e in told["errors"]}
    assert not crib.runtime.workspaces


async def test_an_unknown_snapshot_is_404(crib: Crib) -> None:
    detail(await crib.client.post("/v1/sessions", json={"from_snapshot": "nope"}), 404, "snapshot_not_found")


async def test_a_failed_start_is_503_and_leaves_nothing(crib: Crib) -> None:
    crib.runtime.unavailable = "The engine is away."
    told = detail(await crib.client.post("/v1/sessions", json={}), 503, "runtime_unavailable")
    assert "The engine is away." in told["message"]
    assert told["effects"] == "none"
    assert not crib.runtime.workspaces
    assert not crib.runtime.sandboxes
    crib.runtime.unavailable = None
    await crib.session()


async def test_deleting_is_204_twice_then_410_with_cause_and_time(crib: Crib) -> None:
    session = await crib.session()
    for _ in range(2):
        assert (await crib.client.delete(f"/v1/sessions/{session}")).status_code == 204
    for answer in (
        await crib.client.get(f"/v1/sessions/{session}"),
        await crib.call(session, "echo", {"text": "x"}),
        await crib.client.get(f"/v1/sessions/{session}/files/a"),
        await crib.client.get(f"/v1/sessions/{session}/tools"),
    ):
        told = detail(answer, 410, "session_gone")
        assert told["cause"] == "deleted"
        assert told["ended_at"].endswith("Z")
    await _until_removed(crib, session)


async def test_an_unknown_session_is_404_everywhere(crib: Crib) -> None:
    base = "/v1/sessions/unknown"
    for method, path in (
        ("GET", ""), ("DELETE", ""), ("GET", "/tools"), ("POST", "/tools/echo"), ("GET", "/files?path="), ("GET", "/files/a"),
        ("PUT", "/files/a"), ("DELETE", "/files/a"), ("GET", "/archive"), ("PUT", "/archive"), ("POST", "/snapshots"),
        ("GET", "/snapshots"), ("GET", "/diff?from=a&to=b"), ("POST", "/restore"),
    ):  # fmt: skip
        detail(
            await crib.client.request(method, base + path, json={} if method == "POST" else None),
            404,
            "session_not_found",
        )


async def test_a_running_call_of_a_deleted_session_ends_at_once(crib: Crib) -> None:
    session = await crib.session()
    running_call = asyncio.create_task(crib.call(session, "sleep", {"seconds": 30}, key="mine"))
    await asyncio.sleep(0.1)
    await crib.client.delete(f"/v1/sessions/{session}")
    told = detail(await asyncio.wait_for(running_call, 5), 410, "session_gone")
    assert (told["cause"], told["effects"], told["call_id"]) == ("deleted", "possible", "mine")
    detail(await crib.client.get("/v1/calls/mine"), 410, "session_gone")


async def test_ttl_and_idle_end_a_session_with_their_cause(crib: Crib) -> None:
    expires, idles = await crib.session(ttl_s=0.3), await crib.session(idle_s=0.3)
    await asyncio.sleep(0.4)
    await crib.server.reaper.tick()
    assert detail(await crib.client.get(f"/v1/sessions/{expires}"), 410, "session_gone")["cause"] == "expired"
    assert detail(await crib.client.get(f"/v1/sessions/{idles}"), 410, "session_gone")["cause"] == "idle"
    await _until_removed(crib, expires)
    await _until_removed(crib, idles)


async def test_a_running_call_counts_as_activity(crib: Crib) -> None:
    session = await crib.session(idle_s=0.2)
    assert (await crib.call(session, "sleep", {"seconds": 0.6})).status_code == 200
    assert (await crib.call(session, "echo", {"text": "still there"})).status_code == 200


async def test_too_many_sessions_are_429_for_the_tenant_and_503_for_all(tmp_path: Path) -> None:
    async with running(settings(tmp_path, session={"max_sessions_per_tenant": 2, "max_sessions": 3})) as crib:
        first = [await crib.session() for _ in range(2)]
        detail(await crib.client.post("/v1/sessions", json={"images": ["workspace"]}), 429, "quota_exceeded")
        grant = Grant(60, 60, ("workspace",), Limits(128, 1, 32, 16), EgressPolicy())
        await crib.server.registry.create("another", grant)
        await crib.client.delete(f"/v1/sessions/{first[0]}")
        await crib.server.registry.create("another", grant)
        full = await crib.client.post("/v1/sessions", json={"images": ["workspace"], "wait_s": 0})
        assert detail(full, 503, "no_capacity")["queue_position"] == 1


async def test_a_lazy_sandbox_is_started_once_for_many_first_calls(crib: Crib) -> None:
    session = await crib.session(images=["web"], egress={"mode": "open"})
    assert not crib.runtime.sandboxes
    crib.runtime.start_delay_s = 0.1
    answers = await asyncio.gather(*(crib.call(session, "web_echo", {"text": str(n)}) for n in range(5)))
    assert {a.status_code for a in answers} == {200}
    assert len(crib.runtime.sandboxes) == 1


async def test_a_call_whose_sandbox_can_not_start_is_503_and_its_key_is_free(crib: Crib) -> None:
    session = await crib.session(images=["web"], egress={"mode": "open"})
    crib.runtime.unavailable = "away"
    detail(await crib.call(session, "web_echo", {"text": "x"}, key="again"), 503, "runtime_unavailable")
    crib.runtime.unavailable = None
    assert (await crib.call(session, "web_echo", {"text": "x"}, key="again")).status_code == 200


async def test_a_sandbox_that_lacks_a_tool_of_the_catalog_is_refused(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    runtime = FakeRuntime(
        "test", tmp_path, chosen.runtime, server=lambda spec, tree: FakeToolServer(spec, tree, tools=())
    )
    async with running(chosen, runtime) as crib:
        told = detail(await crib.client.post("/v1/sessions", json={}), 503, "runtime_unavailable")
    assert "images build" in told["message"]
    assert not runtime.sandboxes


async def test_close_leaves_nothing_behind(tmp_path: Path) -> None:
    async with running(settings(tmp_path)) as crib:
        for _ in range(3):
            await crib.session()
        runtime = crib.runtime
    assert not runtime.sandboxes
    assert not runtime.workspaces


async def test_a_reconcile_that_fails_does_not_hold_up_the_start_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = settings(tmp_path)
    runtime = new_runtime(chosen)
    runtime.workspaces["wsp_orphan"] = FakeWorkspace()
    inventory, away = runtime.inventory, True

    async def failing() -> Inventory:
        if away:
            raise RuntimeUnavailable("away")
        return await inventory()

    monkeypatch.setattr(runtime, "inventory", failing)
    async with running(chosen, runtime) as crib:
        session = await crib.session()
        away = False
        await crib.server.reaper.reconcile()
        assert set(runtime.workspaces) == {crib.workspace_id(session)}


async def test_a_sandbox_that_can_not_be_removed_is_left_to_a_reconcile(
    crib: Crib, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await crib.session()
    remove = FakeSandbox.remove

    async def failing(_self: FakeSandbox) -> SandboxEnd:
        raise RuntimeUnavailable("No engine at unix:///var/run/docker.sock")

    monkeypatch.setattr(FakeSandbox, "remove", failing)
    told = detail(await crib.call(session, "die", {}), 500, "outcome_unknown")
    assert (told["effects"], told["sandbox_end"]) == ("possible", "runtime_lost")
    monkeypatch.setattr(FakeSandbox, "remove", remove)
    assert (await crib.call(session, "echo", {"text": "again"})).json()["sandbox_reset"] is True
    assert len(crib.runtime.sandboxes) == 2
    await crib.server.reaper.reconcile()
    assert len(crib.runtime.sandboxes) == 1


async def test_paths_of_the_host_are_not_told(crib: Crib) -> None:
    crib.runtime.unavailable = (
        "No engine at unix:///var/run/docker.sock or /home/me/x. Start one: systemctl start docker."
    )
    told = detail(await crib.client.post("/v1/sessions", json={}), 503, "runtime_unavailable")
    assert "docker.sock" not in told["message"]
    assert "/home" not in told["message"]
    assert "systemctl start docker" in told["message"]
