"""What sessions may reach, over the fake runtime: doors and their policies, changes, denials, restarts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.toolserver.crib import TOOLS, Crib, crashing, detail, new_runtime, running, settings
from toolserver.egress.policy import EgressPolicy
from toolserver.runtime.base import SandboxSpec
from toolserver.runtime.docker_runtime import closed_to_sockets
from toolserver.runtime.fake_egress import FakeEgress
from toolserver.runtime.fake_runtime import FakeRuntime
from toolserver.runtime.fake_server import FakeToolServer
from toolserver.runtime.fake_workspace import FakeWorkspace
from toolserver.sessions.session import Grant
from toolserver.tool_entry import HeaderEntry

ALLOW = {"mode": "allow", "allow": ["example.org:443"]}


def proxy(crib: Crib) -> FakeEgress:
    assert crib.runtime.egress is not None
    return crib.runtime.egress


async def shown(crib: Crib, session: str) -> dict[str, Any]:
    told: dict[str, Any] = (await crib.client.get(f"/v1/sessions/{session}")).json()["egress"]
    return told


def journal(crib: Crib, event: str) -> list[dict[str, Any]]:
    lines = [
        line for file in sorted(crib.server.journal.folder.glob("*.jsonl")) for line in file.read_text().splitlines()
    ]
    return [record for line in lines if (record := json.loads(line))["event"] == event]


async def until(true: Any) -> None:
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)


async def test_a_session_without_egress_needs_no_proxy(crib: Crib) -> None:
    session = await crib.session()
    assert crib.runtime.egress is None
    assert crib.sandbox(session).door is None
    assert await shown(crib, session) == {"mode": "none", "allow": [], "images": {}}


async def test_a_session_gets_a_door_with_its_policy_and_it_is_gone_with_it(crib: Crib) -> None:
    session = await crib.session(egress=ALLOW)
    door = crib.sandbox(session).door
    assert door is not None
    assert proxy(crib).doors == {door: ALLOW}
    assert await shown(crib, session) == {**ALLOW, "images": {}}
    assert door not in (await crib.client.get("/v1/sessions")).text
    await crib.client.delete(f"/v1/sessions/{session}")
    await until(lambda: not proxy(crib).doors)


async def test_a_list_alone_is_the_mode_allow_and_an_empty_one_allows_nothing(crib: Crib) -> None:
    session = await crib.session(images=["web"], egress={"allow": []})
    assert await shown(crib, session) == {"mode": "allow", "allow": [], "images": {}}
    told = detail(await crib.call(session, "web_echo", {"text": "x"}), 500, "policy_denied")
    assert f"/v1/sessions/{session}/egress" in told["message"]


async def test_sessions_have_doors_of_their_own(crib: Crib) -> None:
    first = await crib.session(egress=ALLOW)
    other = await crib.session(egress={"mode": "open"})
    doors = (crib.sandbox(first).door, crib.sandbox(other).door)
    assert proxy(crib).doors == {doors[0]: ALLOW, doors[1]: {"mode": "open"}}


async def test_the_operator_bounds_what_a_session_gets(tmp_path: Path) -> None:
    bounds = {"max_mode": "allow", "allow": ["*.example.org:443"], "allow_private": ["10.0.0.1:80"], "idle_s": 7}
    async with running(settings(tmp_path, egress=bounds)) as crib:
        session = await crib.session(egress={"mode": "open"})
        assert await shown(crib, session) == {"mode": "allow", "allow": ["*.example.org:443"], "images": {}}
        await crib.client.put(f"/v1/sessions/{session}/egress", json={"allow": ["a.example.org:443", "b.test:443"]})
        assert await shown(crib, session) == {"mode": "allow", "allow": ["a.example.org:443"], "images": {}}
        assert proxy(crib).configuration["allow_private"] == ["10.0.0.1:80"]
        assert proxy(crib).configuration["limits"]["idle_s"] == 7
    async with running(settings(tmp_path / "none", egress={"max_mode": "none"})) as crib:
        session = await crib.session(egress={"mode": "open"})
        assert (await shown(crib, session))["mode"] == "none"
        assert crib.runtime.egress is None


async def test_egress_is_changed_while_the_session_runs(crib: Crib) -> None:
    session = await crib.session()
    put = await crib.client.put(f"/v1/sessions/{session}/egress", json=ALLOW)
    assert (put.status_code, put.json()["egress"]) == (200, {**ALLOW, "images": {}})
    door = crib.sandbox(session).door
    assert proxy(crib).doors == {door: ALLOW}
    await crib.client.put(f"/v1/sessions/{session}/egress", json={"mode": "open"})
    assert (crib.sandbox(session).door, proxy(crib).doors) == (door, {door: {"mode": "open"}})
    await crib.client.put(f"/v1/sessions/{session}/egress", json={"mode": "none"})
    assert (crib.sandbox(session).door, proxy(crib).doors) == (None, {})
    assert [one["egress"]["mode"] for one in journal(crib, "egress_changed")] == ["allow", "open", "none"]


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"mode": "all"}, "/mode"),
        ({"mode": "open", "allow": ["a:1"]}, "/allow"),
        ({"allow": ["a:1", "*"]}, "/allow/1"),
        ({"allow": "a:1"}, "/allow"),
        ({"modes": "open"}, "/modes"),
    ],
)
async def test_what_is_no_egress_is_refused(crib: Crib, body: dict[str, Any], pointer: str) -> None:
    session = await crib.session()
    told = detail(await crib.client.put(f"/v1/sessions/{session}/egress", json=body), 422, "invalid_arguments")
    assert [error["pointer"] for error in told["errors"]] == [pointer]


@pytest.mark.parametrize("wrong", ["open", ["example.org:443"], 1])
async def test_an_egress_that_is_no_object_is_told_so_in_words_of_the_contract(crib: Crib, wrong: Any) -> None:
    told = detail(await crib.client.post("/v1/sessions", json={"egress": wrong}), 422, "invalid_arguments")
    assert told["errors"] == [{"pointer": "/egress", "message": "must be an object"}]


async def test_a_session_whose_way_out_does_not_answer_is_not_handed_out(tmp_path: Path) -> None:
    class Deaf(FakeToolServer):
        def __init__(self, spec: SandboxSpec, workspace: FakeWorkspace) -> None:
            super().__init__(spec, workspace, tools=TOOLS)
            self.unready = True

    chosen = settings(tmp_path)
    runtime = FakeRuntime("test", chosen.state_dir, chosen.runtime, server=Deaf)
    async with running(chosen, runtime) as crib:
        body = {"images": ["workspace"], "egress": ALLOW}
        told = detail(await crib.client.post("/v1/sessions", json=body), 503, "runtime_unavailable")
        assert "egress proxy" in told["message"]
        await until(lambda: not runtime.sandboxes and not runtime.workspaces and not proxy(crib).doors)
        session = await crib.session()
        put = await crib.client.put(f"/v1/sessions/{session}/egress", json=ALLOW)
        detail(put, 503, "runtime_unavailable")
        assert (await shown(crib, session))["mode"] == "none"
        assert not proxy(crib).doors


async def test_a_dead_proxy_is_started_again_with_all_doors(crib: Crib) -> None:
    session = await crib.session(egress=ALLOW)
    first = proxy(crib)
    first.die()
    await until(lambda: proxy(crib) is not first and proxy(crib).doors)
    assert proxy(crib).doors == {crib.sandbox(session).door: ALLOW}


async def test_a_later_server_opens_the_same_doors_again(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    runtime = new_runtime(chosen)
    async with crashing(chosen, runtime) as crib:
        session = await crib.session()
        await crib.client.put(f"/v1/sessions/{session}/egress", json=ALLOW)
        door, first = crib.sandbox(session).door, proxy(crib)
    async with running(chosen, runtime) as crib:
        await until(lambda: proxy(crib) is not first and proxy(crib).doors)
        assert proxy(crib).doors == {door: ALLOW}
        assert crib.sandbox(session).door == door
        assert (await shown(crib, session))["mode"] == "allow"


async def test_a_call_that_outlived_its_server_tells_what_was_refused_since(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    runtime = new_runtime(chosen)
    async with crashing(chosen, runtime) as crib:
        session = await crib.session(egress=ALLOW)
        detail(await crib.call(session, "later", {"seconds": 2}, key="a", wait_s=0.1), 450, "still_running")
        door = crib.sandbox(session).door
        assert door is not None
    async with running(chosen, runtime) as crib:
        await until(lambda: any(call.sandbox for call in crib.server.executor.admission.held()))
        await proxy(crib).deny(door, "evil.test", 443)
        told = detail(await crib.client.get("/v1/calls/a?wait_s=10"), 500, "policy_denied")
        assert told["denied"] == [{"host": "evil.test", "port": 443, "rule": "not_allowed"}]
        assert [one.get("call_id") for one in journal(crib, "egress_denied")] == ["a"]


async def test_a_failed_call_tells_what_was_refused_meanwhile(crib: Crib) -> None:
    session, other = await crib.session(egress=ALLOW), await crib.session(egress=ALLOW)
    door = crib.sandbox(session).door
    assert door is not None
    failing = asyncio.create_task(crib.call(session, "sleep", {"seconds": 0.3}, deadline_s=5, key="a"))
    await asyncio.sleep(0.1)
    await proxy(crib).deny(door, "evil.test", 443)
    assert (await failing).status_code == 200  # it got on without
    failing = asyncio.create_task(crib.call(session, "later", {"seconds": 0.3}, key="b"))
    await asyncio.sleep(0.1)
    await proxy(crib).deny(door, "evil.test", 443)
    await proxy(crib).deny(door, "evil.test", 443)
    assert detail(await crib.call(other, "fail", {"message": "no"}), 500, "tool_failed")
    told = detail(await failing, 500, "policy_denied")
    assert told["denied"] == [{"host": "evil.test", "port": 443, "rule": "not_allowed"}]
    assert "evil.test:443" in told["message"]
    records = journal(crib, "egress_denied")
    assert [(one["session_id"], one["image"], one["host"], one.get("call_id")) for one in records] == [
        (session, "workspace", "evil.test", key) for key in ("a", "b", "b")
    ]
    await proxy(crib).use(door, "example.org", 443, up=10, down=20)
    await crib.server.registry.doors.settle()
    metrics = (await crib.client.get("/metrics")).text
    assert 'toolserver_egress_denials_total{rule="not_allowed"} 3' in metrics
    assert 'toolserver_egress_bytes_total{direction="down"} 20' in metrics
    assert "toolserver_egress_connections_total 1" in metrics


@pytest.mark.parametrize(
    ("rule", "advice", "not_said"),
    [
        ("not_allowed", "Allow it with PUT /v1/sessions/", "egress.allow_private"),
        ("private_address", "egress.allow_private", "Allow it with PUT"),
        ("tls_name", "docs/reference/egress.md", "Allow it with PUT"),
    ],
)
async def test_the_advice_of_a_denial_is_what_helps_against_its_rule(
    crib: Crib, rule: str, advice: str, not_said: str
) -> None:
    session = await crib.session(egress=ALLOW)
    door = crib.sandbox(session).door
    assert door is not None
    failing = asyncio.create_task(crib.call(session, "later", {"seconds": 0.3}))
    await asyncio.sleep(0.1)
    await proxy(crib).deny(door, "evil.test", 443, rule)
    message = detail(await failing, 500, "policy_denied")["message"]
    assert advice in message
    assert not_said not in message


async def test_a_session_with_egress_starts_warm(tmp_path: Path) -> None:
    async with running(settings(tmp_path, pool={"enabled": True, "min": 1})) as crib:
        await until(lambda: crib.server.registry.pool.ready() == 1)
        answer = await crib.client.post("/v1/sessions", json={"images": ["workspace"], "egress": ALLOW})
        assert [one["start"] for one in answer.json()["sandboxes"]] == ["warm"]
        assert proxy(crib).doors == {crib.sandbox(answer.json()["id"]).door: ALLOW}


@pytest.mark.parametrize("mode", ["none", "open"])
def test_grants_of_the_first_version_still_load(mode: str) -> None:
    limits = {"memory_mb": 1, "cpus": 1, "pids": 1, "disk_mb": 1}
    text = json.dumps(
        {"ttl_s": 1, "idle_s": 1, "images": ["a"], "limits": limits, "egress": mode, "env": {}, "labels": {}}
    )
    grant = Grant.load(text)
    assert grant.egress == EgressPolicy.load({"mode": mode})
    assert Grant.load(grant.dump()) == grant


@pytest.mark.parametrize(
    ("how", "closed"),
    [
        ({"path": "/usr/bin/runsc"}, True),
        ({"path": "/usr/bin/runsc", "runtimeArgs": ["--platform=ptrace", "--host-uds=none"]}, True),
        ({"path": "/usr/bin/runsc", "runtimeArgs": ["--host-uds=open"]}, False),
        ({"path": "/usr/bin/runsc", "runtimeArgs": ["-host-uds", "all"]}, False),
        ({"path": "/usr/bin/runsc", "runtimeArgs": ["--fsgofer-host-uds"]}, False),
        ({"runtimeType": "io.containerd.runsc.v1"}, False),  # its settings are in a file of its own
    ],
)
def test_gvisor_says_whether_it_opens_sockets(how: dict[str, Any], closed: bool) -> None:
    assert closed_to_sockets({"Runtimes": {"runsc": how}}, "runsc") is closed


@pytest.mark.parametrize(
    "content", [None, "no certificate", "-----BEGIN CERTIFICATE-----\nxx\n-----END CERTIFICATE-----\n"]
)
def test_authorities_that_can_not_be_used_are_refused_at_the_start(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "authorities.pem"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=r"authorities\.pem: (No such file|it holds no certificate)"):
        settings(tmp_path, egress={"ca_file": file})


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        ("API.example.org", "api.example.org"),
        ("a.org:8443", "a.org:8443"),
        ("[::ffff:1.2.3.4]:80", "[::ffff:102:304]:80"),
        ("[2606:4700::1]", "[2606:4700::1]"),
    ],
)
def test_a_secret_header_is_for_one_host_and_the_usual_ports_or_one(told: str, kept: str) -> None:
    assert HeaderEntry(host=told, header="X-Key", source="env:KEY").host == kept


@pytest.mark.parametrize("told", ["*.example.org", "a.org:*", "a.org:0", "127.1", "a b"])
def test_a_secret_header_for_what_is_not_one_host_is_refused(told: str) -> None:
    with pytest.raises(ValueError, match="host"):
        HeaderEntry(host=told, header="X-Key", source="env:KEY")
