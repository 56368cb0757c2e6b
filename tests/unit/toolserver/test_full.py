"""What the server does when it is full."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.toolserver.crib import Crib, detail, running, settings
from tests.unit.toolserver.test_tenants import with_key
from toolserver.errors import RuntimeUnavailable


@pytest.fixture
async def full(tmp_path: Path) -> AsyncIterator[Crib]:
    """Two calls may run, and two do: `a` and `b`."""
    async with running(settings(tmp_path, call={"max_running": 2}, session={"max_sessions": 4})) as crib:
        session = await crib.session(labels={"is": "the first"})
        for name in ("a", "b"):
            detail(await crib.call(session, "sleep", {"seconds": 30}, wait_s=0, key=name), 450, "still_running")
        yield crib


async def first_session(crib: Crib) -> str:
    return str((await crib.client.get("/v1/sessions")).json()["sessions"][0]["id"])


async def until_waiting(crib: Crib, count: int) -> None:
    for _ in range(500):
        if len(crib.server.executor.admission.queue) + len(crib.server.registry.places.queue) == count:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("not in the queue")


async def test_a_call_waits_for_its_turn_and_runs(full: Crib) -> None:
    session = await first_session(full)
    waiting = asyncio.create_task(full.call(session, "count", key="c"))
    await until_waiting(full, 1)
    detail(await full.client.get("/v1/calls/c?wait_s=0"), 450, "still_running")
    await full.client.delete("/v1/calls/a")
    assert (await waiting).json()["content"][0]["text"] == "count 1"
    assert len(full.server.executor.admission.queue) == 0


async def test_past_its_wait_a_call_is_503_with_its_position_and_its_key_is_free(full: Crib) -> None:
    session = await first_session(full)
    patient = asyncio.create_task(full.call(session, "count", key="c"))
    await until_waiting(full, 1)
    for wait_s in (0, 0.1):
        told = detail(await full.call(session, "count", key="d", wait_s=wait_s), 503, "no_capacity")
        assert (told["queue_position"], told["queue_length"], told["effects"]) == (2, 2, "none")
    detail(await full.client.get("/v1/calls/d"), 404, "call_not_found")
    await full.client.delete("/v1/calls/a")
    assert (await patient).status_code == 200
    assert (await full.call(session, "count", key="d")).json()["content"][0]["text"] == "count 2"


async def test_a_stored_outcome_is_given_without_waiting(full: Crib) -> None:
    session = await first_session(full)
    await full.client.delete("/v1/calls/a")
    done = await full.call(session, "count", key="done")
    detail(await full.call(session, "sleep", {"seconds": 30}, wait_s=0, key="e"), 450, "still_running")
    again = await full.call(session, "count", key="done", wait_s=0)
    assert (again.content, again.headers["Idempotent-Replay"]) == (done.content, "true")
    detail(await full.call(session, "count", {"seconds": 0}, key="done", wait_s=0), 409, "idempotency_conflict")
    assert full.server.executor.admission.places_taken == 2


async def test_a_waiting_call_can_be_joined_and_cancelled_and_nothing_of_it_ran(full: Crib) -> None:
    session = await first_session(full)
    both = [asyncio.create_task(full.call(session, "count", key="c")) for _ in range(2)]
    await until_waiting(full, 1)
    cancelled = (await full.client.delete("/v1/calls/c")).json()
    assert cancelled["cancelled"] is True
    for answer in await asyncio.gather(*both):
        assert detail(answer, 500, "cancelled")["effects"] == "none"
    assert len(full.server.executor.admission.queue) == 0
    await full.client.delete("/v1/calls/a")
    assert detail(await full.call(session, "count", key="c"), 500, "cancelled")["effects"] == "none"
    assert (await full.call(session, "count", key="d")).json()["content"][0]["text"] == "count 1"


async def test_the_end_of_its_session_ends_a_waiting_call(full: Crib) -> None:
    second = await full.session()
    waiting = asyncio.create_task(full.call(second, "count", key="c"))
    await until_waiting(full, 1)
    await full.client.delete(f"/v1/sessions/{second}")
    told = detail(await waiting, 410, "session_gone")
    assert (told["cause"], told["effects"]) == ("deleted", "none")


async def test_a_shutdown_refuses_those_that_wait(full: Crib) -> None:
    session = await first_session(full)
    waiting = asyncio.create_task(full.call(session, "count", key="c"))
    await until_waiting(full, 1)
    draining = asyncio.create_task(full.server.drain())
    detail(await waiting, 503, "draining")
    for name in ("a", "b"):
        await full.client.delete(f"/v1/calls/{name}")
    await draining


class Hangup(httpx.ASGITransport):
    """A client that goes as soon as it is told to."""

    def __init__(self, app: Any) -> None:
        self.gone = asyncio.Event()

        async def leaving(scope: Any, receive: Any, send: Any) -> None:
            sent = False

            async def until_gone() -> Any:
                nonlocal sent
                if not sent:
                    message = await receive()
                    sent = not message.get("more_body", False)
                    return message
                await self.gone.wait()
                return {"type": "http.disconnect"}

            await app(scope, until_gone, send)

        super().__init__(app=leaving, raise_app_exceptions=False)


@pytest.mark.parametrize("what", ["call", "events", "session"])
async def test_a_client_that_hangs_up_leaves_the_queue(full: Crib, what: str) -> None:
    session = await first_session(full)
    for _ in range(3):
        await full.session()
    transport = Hangup(full.server.asgi)
    head = dict(full.client.headers) | ({"Accept": "text/event-stream"} if what == "events" else {})
    async with httpx.AsyncClient(transport=transport, base_url="http://crib", headers=head, timeout=30) as client:
        path, body = f"/v1/sessions/{session}/tools/count", {"wait_s": 30}
        if what == "session":
            path, body = "/v1/sessions", {"wait_s": 30}
        request = asyncio.create_task(client.post(path, json=body))
        await until_waiting(full, 1)
        transport.gone.set()
        await until_waiting(full, 0)
        await asyncio.wait([request], timeout=10)
    for name in ("a", "b"):
        await full.client.delete(f"/v1/calls/{name}")
    assert (await full.call(session, "count")).json()["content"][0]["text"] == "count 1"  # that one did not run
    assert full.server.executor.admission.places_taken == 0


async def test_one_who_hangs_up_does_not_take_another_one_with_him(full: Crib) -> None:
    session = await first_session(full)
    transport = Hangup(full.server.asgi)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://crib", headers=full.client.headers, timeout=30
    ) as client:
        head = {"Idempotency-Key": "c"}
        leaving = asyncio.create_task(client.post(f"/v1/sessions/{session}/tools/count", json={}, headers=head))
        await until_waiting(full, 1)
        joined = asyncio.create_task(full.call(session, "count", key="c"))
        await asyncio.sleep(0.1)
        transport.gone.set()
        await asyncio.sleep(0.1)
        await full.client.delete("/v1/calls/a")
        assert (await joined).status_code == 200
        await asyncio.wait([leaving], timeout=10)


async def test_a_session_waits_for_a_place(tmp_path: Path) -> None:
    bounds = {"max_sessions": 2, "total_memory_mb": 400}
    async with running(settings(tmp_path, session=bounds)) as crib:
        first = await crib.session(limits={"memory_mb": 300})
        asked = {"images": ["workspace"], "limits": {"memory_mb": 200}}
        told = detail(await crib.client.post("/v1/sessions", json={**asked, "wait_s": 0.1}), 503, "no_capacity")
        assert (told["queue_position"], told["queue_length"]) == (1, 1)
        more = {**asked, "limits": {"memory_mb": 500}}
        told = detail(await crib.client.post("/v1/sessions", json=more), 422, "invalid_arguments")
        assert told["errors"][0]["pointer"] == "/limits/memory_mb"
        waiting = asyncio.create_task(crib.client.post("/v1/sessions", json=asked))
        await until_waiting(crib, 1)
        await crib.client.delete(f"/v1/sessions/{first}")
        assert (await waiting).status_code == 201


async def test_a_session_that_can_not_be_made_gives_its_place_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(settings(tmp_path, session={"max_sessions": 1})) as crib:
        create, begun = crib.runtime.create_workspace, asyncio.Event()

        async def failing(*arguments: Any) -> None:
            await begun.wait()
            monkeypatch.setattr(crib.runtime, "create_workspace", create)
            raise RuntimeUnavailable("away")

        monkeypatch.setattr(crib.runtime, "create_workspace", failing)
        first = asyncio.create_task(crib.client.post("/v1/sessions", json={"images": ["workspace"]}))
        await asyncio.sleep(0.1)
        second = asyncio.create_task(crib.client.post("/v1/sessions", json={"images": ["workspace"]}))
        await until_waiting(crib, 1)
        begun.set()
        detail(await first, 503, "runtime_unavailable")
        assert (await second).status_code == 201
        detail(await crib.client.post("/v1/sessions", json={"wait_s": 0}), 503, "no_capacity")


async def test_a_tenant_with_many_waiting_calls_holds_up_another_ones_first_by_one_turn(full: Crib) -> None:
    session = await first_session(full)
    order: list[str] = []

    async def one(client: httpx.AsyncClient, where: str, name: str) -> None:
        body = {"arguments": {"text": name}, "wait_s": 60}
        answer = await client.post(f"/v1/sessions/{where}/tools/echo", json=body)
        assert answer.status_code == 200, answer.text
        order.append(name)

    async with with_key(full, "other") as other:
        theirs = (await other.post("/v1/sessions", json={"images": ["workspace"]})).json()["id"]
        many = [asyncio.create_task(one(full.client, session, f"a{n}")) for n in range(29)]
        await until_waiting(full, 29)
        few = [asyncio.create_task(one(other, theirs, f"b{n}")) for n in range(3)]
        await until_waiting(full, 32)
        await full.client.delete("/v1/calls/a")
        await full.client.delete("/v1/calls/b")
        await asyncio.gather(*many, *few)
    assert max(order.index(f"b{n}") for n in range(3)) <= 8
