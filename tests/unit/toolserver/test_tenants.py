from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.toolserver.crib import Crib, detail, running, settings
from toolserver.api.application import routes
from toolserver.api.mcp import McpEndpoint
from toolserver.store import keys, tenants


@asynccontextmanager
async def with_key(crib: Crib, tenant: str, scope: str = "use") -> AsyncIterator[httpx.AsyncClient]:
    text = f"key-of-{tenant}-{scope}"
    await crib.server.database.write(lambda c: keys.ensure(c, text, tenant, tenant, scope))
    head = {"Authorization": f"Bearer {text}"}
    transport = httpx.ASGITransport(app=crib.server.asgi, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://crib", headers=head, timeout=30) as client:
        yield client


async def set_quotas(crib: Crib, tenant: str = "default", **limits: float | None) -> None:
    """As `toolserver tenants set` does it, and until the server has noticed."""
    await crib.server.database.write(lambda c: tenants.change(c, tenant, limits))
    for _ in range(200):
        own = crib.server.quotas.limits(tenant)
        if all(getattr(own, name) == value for name, value in limits.items() if value is not None):
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the server did not notice")


def quota(answer: httpx.Response) -> dict[str, Any]:
    told = detail(answer, 429, "quota_exceeded")
    return {name: told[name] for name in ("quota", "used", "limit", "left", "asked") if name in told}


async def test_a_changed_quota_holds_within_a_second_and_says_what_is_left(crib: Crib) -> None:
    await crib.session(limits={"memory_mb": 128, "disk_mb": 10})
    await set_quotas(crib, sessions=2, memory_mb=300, disk_mb=25)
    small = {"memory_mb": 64, "disk_mb": 10}

    async def asked(**limits: int) -> httpx.Response:
        return await crib.client.post("/v1/sessions", json={"images": ["workspace"], "limits": {**small, **limits}})

    assert quota(await asked(memory_mb=256)) == {
        "quota": "memory_mb",
        "used": 128,
        "limit": 300,
        "left": 172,
        "asked": 256,
    }
    assert quota(await asked(disk_mb=16)) == {"quota": "disk_mb", "used": 10, "limit": 25, "left": 15, "asked": 16}
    second = await asked()
    assert second.status_code == 201
    assert quota(await asked())["quota"] == "sessions"
    await crib.client.delete(f"/v1/sessions/{second.json()['id']}")
    assert (await asked()).status_code == 201


async def test_memory_counts_for_each_sandbox_that_a_session_can_have(crib: Crib) -> None:
    await set_quotas(crib, memory_mb=250)
    limits = {"memory_mb": 100}
    body = {"images": ["workspace", "web"], "limits": limits}
    both = await crib.client.post("/v1/sessions", json={**body, "egress": {"mode": "open"}})
    assert both.status_code == 201
    assert (
        quota(await crib.client.post("/v1/sessions", json={"images": ["workspace"], "limits": limits}))["used"] == 200
    )
    await crib.client.delete(f"/v1/sessions/{both.json()['id']}")
    for _ in range(2):  # without a network its image can't run
        assert (await crib.client.post("/v1/sessions", json=body)).status_code == 201


async def test_calls_at_a_time_are_bounded_over_all_sessions_of_a_tenant(crib: Crib) -> None:
    first, second = await crib.session(), await crib.session()
    await set_quotas(crib, calls=2)
    for session in (first, second):
        detail(await crib.call(session, "sleep", {"seconds": 30}, wait_s=0), 450, "still_running")
    assert quota(await crib.call(first, "echo", {"text": "x"}, key="later")) == {
        "quota": "calls", "used": 2, "limit": 2, "left": 0, "asked": 1,
    }  # fmt: skip
    async with with_key(crib, "other") as other:
        session = (await other.post("/v1/sessions", json={"images": ["workspace"]})).json()["id"]
        body = {"arguments": {"text": "x"}}
        assert (await other.post(f"/v1/sessions/{session}/tools/echo", json=body)).status_code == 200
    await crib.client.delete(f"/v1/sessions/{second}")
    assert (await crib.call(first, "echo", {"text": "x"}, key="later")).status_code == 200


async def test_cpu_time_is_counted_over_restarts_and_refused_when_it_is_used_up(tmp_path: Path) -> None:
    chosen = settings(tmp_path, limits={"cpus": 2.0})
    async with running(chosen) as crib:
        session = await crib.session(images=["foreign"])
        detail(await crib.call(session, "foreign_wait", {}, deadline_s=0.3), 450, "deadline_exceeded")
        used = crib.server.quotas.cpu.used_s("default")
        assert used >= 0.6  # nobody told how much it was: two cores, all of the time
    async with running(chosen) as crib:
        assert crib.server.quotas.cpu.used_s("default") == pytest.approx(used)
        session = await crib.session()
        await set_quotas(crib, cpu_s=used / 2)
        answer = await crib.call(session, "echo", {"text": "x"})
        told = detail(answer, 429, "quota_exceeded")
        assert (told["quota"], told["left"]) == ("cpu_s", 0)
        assert int(answer.headers["Retry-After"]) > 3600
        await set_quotas(crib, cpu_s=1000.0)
        assert (await crib.call(session, "echo", {"text": "x"})).status_code == 200


def routes_with_scopes() -> list[tuple[str, str, str]]:
    """Of each route the scope that docs/reference/http-api.md gives it."""
    text = (Path(__file__).parents[3] / "docs/reference/http-api.md").read_text().split("## Sessions")[0]
    found: list[tuple[str, str, str]] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) < 4 or not cells[1].startswith("`"):
            continue
        routes = [route.strip("` ") for route in cells[1].split(" · ")]
        scopes = cells[2].split(" · ")
        scopes = scopes if len(scopes) == len(routes) else [scopes[0]] * len(routes)
        found += [(*route.split("?")[0].split(" "), scope) for route, scope in zip(routes, scopes, strict=True)]  # type: ignore[misc]
    return found


@pytest.mark.parametrize(("method", "path", "scope"), routes_with_scopes())
async def test_each_route_needs_the_scope_that_is_documented(crib: Crib, method: str, path: str, scope: str) -> None:
    if scope == "none":
        return
    path = path.format(session_id="x", tool_name="echo", call_id="x", path="x", snapshot_id="x")
    body: dict[str, Any] | None = {} if method == "POST" else None
    holders = {"metrics": {"metrics", "admin"}, "read": {"read", "use", "admin"}, "use": {"use", "admin"}}[scope]
    for held in ("metrics", "read", "use", "admin"):
        async with with_key(crib, "t", held) as client:
            answer = await client.request(method, path, json=body, headers={"Host": "localhost"})
        assert (answer.status_code != 403) == (held in holders), (held, answer.text)
        if held not in holders:
            told = answer.json()["error"]["data"] if path == "/mcp" else detail(answer, 403, "forbidden")
            assert (told["code"], scope in told["message"]) == ("forbidden", True)


def test_every_route_has_a_documented_scope() -> None:
    documented = {(method, path) for method, path, _ in routes_with_scopes()}
    assert documented == {(r.method, r.path.replace(":anypath", "")) for r in routes(McpEndpoint())} | {
        ("GET", "/openapi.json")
    }


async def test_what_belongs_to_another_tenant_does_not_exist(crib: Crib) -> None:
    session = await crib.session()
    await crib.client.put(f"/v1/sessions/{session}/files/secret.txt", content=b"secret")
    await crib.call(session, "echo", {"text": "secret"}, key="their-call")
    await crib.call(session, "sleep", {"seconds": 30}, key="their-running", wait_s=0)
    async with with_key(crib, "other", "admin") as other:
        assert (await other.get("/v1/sessions")).json()["sessions"] == []
        for method, path, _ in routes_with_scopes():
            if "{" not in path:
                continue
            for call_id in ("their-call", "their-running") if "{call_id}" in path else ("",):
                filled = path.format(
                    session_id=session, tool_name="echo", call_id=call_id, path="secret.txt", snapshot_id="x"
                )
                query = {"from": "a", "to": "b"} if path.endswith("/diff") else None
                body: dict[str, Any] = {"snapshot_id": "x"} if path.endswith("/restore") else {}
                answer = await other.request(method, filled, json=body if method == "POST" else None, params=query)
                unknown = await other.request(
                    method,
                    filled.replace(session, "ses_" + "0" * 24).replace(call_id or "\0", "unknown"),
                    json=body if method == "POST" else None,
                    params=query,
                )
                assert answer.status_code == 404, (method, filled, answer.text)
                assert _without_trace(answer) == _without_trace(unknown), (method, filled)
        events = {"Accept": "text/event-stream"}
        assert (await other.get("/v1/calls/their-running", headers=events)).status_code == 404
        mine = (await other.post("/v1/sessions", json={"images": ["workspace"]})).json()["id"]
        for tool in ("call_wait", "call_cancel"):
            body = {"arguments": {"call_id": "their-running"}}
            detail(await other.post(f"/v1/sessions/{mine}/tools/{tool}", json=body), 404, "call_not_found")
        again = await other.post(f"/v1/sessions/{mine}/tools/count", json={}, headers={"Idempotency-Key": "their-call"})
        assert again.json()["content"][0]["text"] == "count 1"  # the same name is another call here
    assert (await crib.client.get("/v1/calls/their-call")).json()["content"][0]["text"] == "secret"
    detail(await crib.client.get("/v1/calls/their-running?wait_s=0"), 450, "still_running")


def _without_trace(answer: httpx.Response) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(answer.text)["detail"]
    return {name: value for name, value in told.items() if name != "trace_id"}


async def test_a_body_is_told_all_that_is_wrong_with_it_at_once(crib: Crib) -> None:
    body = {
        "ttl_s": 10**9, "idle_s": "soon", "images": ["nope", "workspace", "workspace", 5], "env": {"A=B": "x"}, "unknown": 1,
        "limits": {"memory_mb": 10**9, "cpus": -1, "pids": "many"}, "egress": {"mode": "none", "allow": ["a:1"]}, "wait_s": 10**6,
    }  # fmt: skip
    told = detail(await crib.client.post("/v1/sessions", json=body), 422, "invalid_arguments")
    pointers = [error["pointer"] for error in told["errors"]]
    assert sorted(pointers) == sorted(set(pointers)) == [
        "/egress/allow", "/env", "/idle_s", "/images/0", "/images/2", "/images/3", "/limits/cpus", "/limits/memory_mb",
        "/limits/pids", "/ttl_s", "/unknown", "/wait_s",
    ]  # fmt: skip
    session = await crib.session()
    call = {"arguments": [], "wait_s": 10**6, "deadline_s": 10**6, "unknown": 1}
    answer = await crib.client.post(
        f"/v1/sessions/{session}/tools/echo", json=call, headers={"Idempotency-Key": "no key!"}
    )
    told = detail(answer, 422, "invalid_arguments")
    assert sorted(error["pointer"] for error in told["errors"]) == [
        "/arguments", "/deadline_s", "/unknown", "/wait_s", "Idempotency-Key",
    ]  # fmt: skip
