from __future__ import annotations

import json
import re
import secrets
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.toolserver.crib import KEY, Crib, detail, running, settings
from toolserver.api.application import routes
from toolserver.api.mcp import McpEndpoint
from toolserver.api.services import Phase
from toolserver.store import keys

PROTECTED = (
    ("GET", "/v1/tools"), ("GET", "/v1/tools/search?q=x"), ("GET", "/v1/sessions"), ("POST", "/v1/sessions"),
    ("GET", "/v1/sessions/x"), ("POST", "/v1/sessions/x/tools/echo"), ("GET", "/v1/calls/x"), ("GET", "/v1/sessions/x/files/a"),
    ("GET", "/metrics"), ("GET", "/readyz"), ("POST", "/mcp"), ("GET", "/openapi.json"), ("GET", "/nowhere"),
)  # fmt: skip


@pytest.mark.parametrize(("method", "path"), PROTECTED)
async def test_without_a_key_all_but_healthz_is_401(crib: Crib, method: str, path: str) -> None:
    crib.client.headers.pop("Authorization")
    answer = await crib.client.request(method, path)
    detail(answer, 401, "unauthorized")
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "value",
    ["Bearer wrong", "Bearer", "Bearer ", f"Basic {KEY}", KEY, f"Bearer {KEY}x", "Bearer \xfc", "Bearer " + "x" * 5000],
)
async def test_wrong_keys_are_401(crib: Crib, value: str) -> None:
    raw = [(b"Authorization", value.encode("latin-1"))]
    async with httpx.AsyncClient(transport=crib.client._transport, base_url="http://crib") as client:
        detail(await client.get("/v1/tools", headers=raw), 401, "unauthorized")


async def test_a_key_in_the_query_is_no_key(crib: Crib) -> None:
    crib.client.headers.pop("Authorization")
    detail(await crib.client.get(f"/v1/tools?key={KEY}"), 401, "unauthorized")


async def test_a_key_without_the_scope_is_403(crib: Crib) -> None:
    database = crib.server.database
    await database.write(lambda c: keys.create(c, "reader", "reader", "default", "read"))
    await database.write(lambda c: keys.create(c, "user", "user", "default", "use"))
    reads = {"Authorization": "Bearer reader"}
    assert (await crib.client.get("/v1/tools", headers=reads)).status_code == 200
    detail(await crib.client.post("/v1/sessions", json={}, headers=reads), 403, "forbidden")
    uses = {"Authorization": "Bearer user"}
    detail(await crib.client.get("/v1/sessions?all_tenants=true", headers=uses), 403, "forbidden")


async def test_a_revoked_key_is_refused_within_seconds(tmp_path: Path) -> None:
    now = [1000.0]
    async with running(settings(tmp_path)) as crib:
        crib.server.authenticator._clock = lambda: now[0]
        key = await crib.server.database.write(lambda c: keys.create(c, "brief", "brief", "default", "use"))
        head = {"Authorization": "Bearer brief"}
        assert (await crib.client.get("/v1/tools", headers=head)).status_code == 200
        await crib.server.database.write(lambda c: keys.revoke(c, key.key_id))
        now[0] += 3
        detail(await crib.client.get("/v1/tools", headers=head), 401, "unauthorized")


async def test_an_admin_sees_and_ends_sessions_of_others_only_when_asked_to(crib: Crib) -> None:
    await crib.server.database.write(lambda c: keys.create(c, "other", "other", "other", "use"))
    head = {"Authorization": "Bearer other"}
    session = (await crib.client.post("/v1/sessions", json={"images": ["workspace"]}, headers=head)).json()["id"]
    assert session not in (await crib.client.get("/v1/sessions")).text
    detail(await crib.client.delete(f"/v1/sessions/{session}"), 404, "session_not_found")
    shown = (await crib.client.get("/v1/sessions?all_tenants=true")).json()["sessions"]
    assert [(s["id"], s["tenant"]) for s in shown] == [(session, "other")]
    assert (await crib.client.delete(f"/v1/sessions/{session}?all_tenants=true")).status_code == 204


@pytest.mark.parametrize("path", ["/v1/tools", "/v1/sessions/unknown", "/nowhere", "/healthz"])
async def test_request_and_trace_ids_come_back_on_every_answer(crib: Crib, path: str) -> None:
    trace, sent = secrets.token_hex(16), "req-1.a_B"
    head = {"X-Request-Id": sent, "traceparent": f"00-{trace}-{secrets.token_hex(8)}-01"}
    answer = await crib.client.get(path, headers=head)
    assert answer.headers["x-request-id"] == sent
    assert re.fullmatch(rf"00-{trace}-[0-9a-f]{{16}}-01", answer.headers["traceparent"])
    if answer.status_code >= 400:
        assert answer.json()["detail"]["trace_id"] == trace


@pytest.mark.parametrize("hostile", ["x" * 5000, "a b\"';<script>", "%0d%0aX-Evil: 1", ""])
async def test_hostile_ids_are_replaced(crib: Crib, hostile: str) -> None:
    answer = await crib.client.get("/v1/tools", headers={"X-Request-Id": hostile, "traceparent": hostile})
    assert answer.status_code == 200
    assert re.fullmatch(r"[0-9a-f]+", answer.headers["x-request-id"])
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", answer.headers["traceparent"])


async def test_unknown_paths_and_methods_have_the_error_shape(crib: Crib) -> None:
    for method, path, status, code in (
        ("GET", "/v1/nothing", 404, "not_found"), ("GET", "/", 404, "not_found"), ("GET", "/v1/tools/", 404, "not_found"),
        ("PUT", "/v1/tools", 405, "method_not_allowed"), ("PATCH", "/v1/calls/x", 405, "method_not_allowed"),
    ):  # fmt: skip
        answer = await crib.client.request(method, path)
        detail(answer, status, code)
        assert ("allow" in answer.headers) == (status == 405)


BAD_BODIES: dict[str, tuple[bytes, str]] = {
    "cut": (b'{"ttl_s": ', ""),
    "array": (b"[]", ""),
    "text": (b'"x"', ""),
    "NaN": (b'{"ttl_s": NaN}', "/ttl_s"),
    "Infinity": (b'{"limits": {"cpus": -Infinity}}', "/limits/cpus"),
    "1e999": (b'{"ttl_s": 1e999}', "/ttl_s"),
    "not UTF-8": (b'{"labels": {"a": "\xff"}}', ""),
    "deep": (b'{"labels":' + b"[" * 50_000 + b"]" * 50_000 + b"}", ""),
    "huge number": (b'{"ttl_s": 1' + b"0" * 5000 + b"}", "/ttl_s"),
    "surrogate": (b'{"labels": {"a": "\\ud800"}}', "/labels/a"),
    "surrogate name": (b'{"labels": {"\\udfff": "a"}}', "/labels"),
    "twice": (b'{"ttl_s": 1, "ttl_s": 2}', "/ttl_s"),
    "BOM": (b"\xef\xbb\xbf{}", ""),
}


@pytest.mark.parametrize("name", BAD_BODIES)
async def test_bodies_that_are_no_strict_json_object_are_422(crib: Crib, name: str) -> None:
    body, pointer = BAD_BODIES[name]
    told = detail(await crib.client.post("/v1/sessions", content=body), 422, "invalid_arguments")
    assert told["errors"][0]["pointer"] == pointer


async def test_a_body_beyond_the_limit_is_413_also_without_a_length(tmp_path: Path) -> None:
    async with running(settings(tmp_path, http={"max_body_mb": 1})) as crib:
        big = b'{"labels": {"a": "' + b"x" * (1 << 20) + b'"}}'
        detail(await crib.client.post("/v1/sessions", content=big), 413, "too_large")

        async def pieces() -> Any:
            for _ in range(20):
                yield b"x" * 100_000

        detail(await crib.client.post("/v1/sessions", content=pieces()), 413, "too_large")


async def test_a_compressed_json_body_is_415(crib: Crib) -> None:
    answer = await crib.client.post("/v1/sessions", content=b"{}", headers={"Content-Encoding": "gzip"})
    detail(answer, 415, "unsupported_media_type")


async def test_a_query_of_a_route_that_has_none_is_422(crib: Crib) -> None:
    session = await crib.session()
    plain = [r for r in routes(McpEndpoint()) if r.query is None and r.path.startswith("/v1/")]
    assert len(plain) > 10
    for route in plain:
        path = route.path.replace("{path:anypath}", "{path}").format(
            session_id=session, tool_name="echo", call_id="x", path="a", snapshot_id="x"
        )
        answer = await crib.client.request(route.method, f"{path}?wait_s=1")
        told = detail(answer, 422, "invalid_arguments")
        assert [error["pointer"] for error in told["errors"]] == ["/wait_s"], (route.method, path)
    assert (await crib.client.get("/healthz?at=now")).status_code == 200


@pytest.mark.parametrize("text", ["1_0", "%205", "5%20", "+5", "-0.1", "", "nan", "Infinity", "1e999", "0x5", "%D9%A1"])
async def test_a_query_number_that_is_none_is_422(crib: Crib, text: str) -> None:
    await crib.call(await crib.session(), "echo", {"text": "x"}, key="number-1")
    detail(await crib.client.get(f"/v1/calls/number-1?wait_s={text}"), 422, "invalid_arguments")
    assert (await crib.client.get("/v1/calls/number-1?wait_s=2.5e-1")).status_code == 200


@pytest.mark.parametrize("query", ["q=x&k=abc", "q=x&k=0", "q=x&k=101", "k=3", "q=x&bogus=1", "q=x&q=y"])
async def test_odd_queries_are_422(crib: Crib, query: str) -> None:
    detail(await crib.client.get(f"/v1/tools/search?{query}"), 422, "invalid_arguments")


async def test_search_finds_and_bounds(crib: Crib) -> None:
    found = (await crib.client.get("/v1/tools/search?q=echo&k=1")).json()["tools"]
    assert len(found) == 1
    assert "echo" in found[0]["name"]


async def test_an_unforeseen_failure_is_500_without_a_traceback(crib: Crib, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret detail in /home/somewhere")

    monkeypatch.setattr(crib.server.registry, "listing", broken)
    answer = await crib.client.get("/v1/sessions")
    told = detail(answer, 500, "internal")
    assert "secret" not in answer.text
    assert told["trace_id"] in answer.headers["traceparent"]


async def test_starting_and_draining_are_503_with_retry_after(crib: Crib) -> None:
    session = await crib.session()
    readiness = crib.server.readiness
    readiness.phase = Phase.STARTING
    for path in ("/readyz", "/v1/tools"):
        detail(await crib.client.get(path), 503, "starting")
    readiness.phase = Phase.DRAINING
    crib.server.executor.admission.draining = True
    detail(await crib.client.get("/readyz"), 503, "draining")
    detail(await crib.client.post("/v1/sessions", json={}), 503, "draining")
    detail(await crib.call(session, "echo", {"text": "x"}), 503, "draining")
    assert (await crib.client.get("/healthz")).status_code == 200
    assert (await crib.client.get(f"/v1/sessions/{session}")).status_code == 200


async def test_readyz_tells_when_the_runtime_is_away(crib: Crib) -> None:
    assert (await crib.client.get("/readyz")).json() == {"status": "ready"}
    crib.runtime.unavailable = "The engine does not answer."
    crib.server.readiness._checked = float("-inf")
    assert "engine" in detail(await crib.client.get("/readyz"), 503, "runtime_unavailable")["message"]


async def test_metrics_are_prometheus_text(crib: Crib) -> None:
    session = await crib.session()
    await crib.call(session, "echo", {"text": "x"})
    await crib.call(session, "fail", {})
    text = (await crib.client.get("/metrics")).text
    assert 'toolserver_calls_total{tool="echo",code="ok"} 1' in text
    assert 'toolserver_calls_total{tool="fail",code="tool_failed"} 1' in text
    assert 'toolserver_sessions{state="live"} 1' in text
    assert "toolserver_sandboxes_started_total 1" in text
    assert "# TYPE toolserver_call_seconds histogram" in text
    for line in text.splitlines():
        assert line.startswith("#") or re.fullmatch(r"[a-z_]+(\{[^}]*\})? [-+0-9.e]+", line), line


async def test_the_openapi_document_names_every_route(crib: Crib) -> None:
    document = (await crib.client.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.")
    assert "post" in document["paths"]["/v1/sessions/{session_id}/tools/{tool_name}"]
    assert "get" in document["paths"]["/v1/sessions/{session_id}/files/{path}"]
    body = document["paths"]["/v1/sessions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "memory_mb" in body["properties"]["limits"]["properties"]
    assert "$defs" not in json.dumps(document)
