"""Cancelling is an operation with an answer of its own, the same each time."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.toolserver.crib import Crib, detail, running, settings
from toolserver.calls.carry_out import stop
from toolserver.journal.read import Wanted, records
from toolserver.store import calls as rows


async def begun(crib: Crib, session: str, tool: str, arguments: Any, key: str) -> asyncio.Task[httpx.Response]:
    task = asyncio.create_task(crib.call(session, tool, arguments, key=key))
    while crib.server.executor.admission.find("default", key) is None:
        assert not task.done(), "it ended before it was seen"
        await asyncio.sleep(0.005)
    return task


async def until_sent(crib: Crib, key: str) -> None:
    call = crib.server.executor.admission.find("default", key)
    assert call is not None
    await asyncio.wait_for(asyncio.shield(call.placed), 5)


async def test_a_call_that_was_not_sent_yet_ends_at_once_without_effects(crib: Crib) -> None:
    session = await crib.session(images=["workspace", "web"], egress={"mode": "open"})
    crib.runtime.start_delay_s = 1.0
    waiting = await begun(crib, session, "web_echo", {"text": "x"}, "unsent-1")
    answer = await asyncio.wait_for(crib.client.delete("/v1/calls/unsent-1"), 0.8)
    assert answer.status_code == 200
    assert answer.json()["cancelled"] is True
    assert answer.json()["effects"] == "none"
    told = detail(await waiting, 500, "cancelled")
    assert (told["effects"], told["cancelled_by"]) == ("none", "caller")
    await asyncio.sleep(1.2)
    assert not [r for r in crib.sandbox(session, "web").requests if r["method"] == "tools/call"]
    assert (await crib.call(session, "web_echo", {"text": "next"})).status_code == 200


async def test_a_call_whose_turn_never_came_is_cancelled_like_any_other(tmp_path: Path) -> None:
    async with running(settings(tmp_path, call={"max_running": 1})) as crib:
        session = await crib.session()
        first = await begun(crib, session, "sleep", {"seconds": 60}, "holds-the-place")
        await until_sent(crib, "holds-the-place")
        waiting = await begun(crib, session, "count", {}, "waits-1")
        body = (await crib.client.delete("/v1/calls/waits-1")).json()
        assert (body["cancelled"], body["effects"]) == (True, "none")
        told = detail(await waiting, 500, "cancelled")
        assert (told["effects"], told["cancelled_by"]) == ("none", "caller")
        assert (await crib.client.delete("/v1/calls/waits-1")).json() == body
        assert detail(await crib.client.get("/v1/calls/waits-1"), 500, "cancelled") == told
        await crib.client.delete("/v1/calls/holds-the-place")
        detail(await first, 500, "cancelled")
        detail(await crib.call(session, "count", {}, key="waits-1"), 500, "cancelled")
        assert "count 1" in (await crib.call(session, "count")).text
        journalled = [one.fields for one in records(crib.server.journal.folder, Wanted())]
        mine = [one for one in journalled if one.get("call_id") == "waits-1"]
        assert [(one["event"], one["code"], one["cause"]) for one in mine] == [("call_ended", "cancelled", "caller")]


async def test_a_cancel_before_a_call_stands_in_the_queue_ends_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its key is looked up in the store it is known already, and has no task yet that could be stopped."""
    async with running(settings(tmp_path, call={"max_running": 1}, queue={"wait_s": 60})) as crib:
        session = await crib.session()
        first = await begun(crib, session, "sleep", {"seconds": 60}, "holds-the-place")
        await until_sent(crib, "holds-the-place")
        stored, truth = crib.server.executor.stored, crib.server.executor.stored.ended

        async def slowly(tenant: str, call_id: str) -> Any:
            await asyncio.sleep(0.2)
            return await truth(tenant, call_id)

        monkeypatch.setattr(stored, "ended", slowly)
        waiting = await begun(crib, session, "count", {}, "early-1")
        body = (await asyncio.wait_for(crib.client.delete("/v1/calls/early-1"), 30)).json()
        assert (body["cancelled"], body["effects"]) == (True, "none")
        detail(await waiting, 500, "cancelled")
        await crib.client.delete("/v1/calls/holds-the-place")
        detail(await first, 500, "cancelled")
        assert "count 1" in (await crib.call(session, "count")).text


async def test_a_cancel_while_the_turn_of_a_call_begins_leaves_no_row_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(settings(tmp_path, call={"max_running": 1})) as crib:
        session = await crib.session()
        first = await begun(crib, session, "sleep", {"seconds": 60}, "holds-the-place")
        await until_sent(crib, "holds-the-place")
        waiting = await begun(crib, session, "count", {}, "begins-1")
        call = crib.server.executor.admission.find("default", "begins-1")
        assert call is not None
        database, written = crib.server.database, asyncio.Event()
        write_small = database.write_small

        async def slowly(job: Any) -> Any:
            value = await write_small(job)
            if not call.queued:
                written.set()
                await asyncio.sleep(0.2)
            return value

        monkeypatch.setattr(database, "write_small", slowly)
        await crib.client.delete("/v1/calls/holds-the-place")
        await asyncio.wait_for(written.wait(), 10)
        body = (await crib.client.delete("/v1/calls/begins-1")).json()
        assert (body["cancelled"], body["effects"]) == (True, "none")
        detail(await waiting, 500, "cancelled")
        detail(await first, 500, "cancelled")
        assert await database.read(rows.running) == []
        assert "count 1" in (await crib.call(session, "count")).text


async def test_who_cancelled_and_what_came_so_far_are_told(crib: Crib) -> None:
    session = await crib.session()
    waiting = await begun(crib, session, "sleep", {"seconds": 60}, "who-1")
    await until_sent(crib, "who-1")
    await asyncio.sleep(0.05)
    answers = await asyncio.gather(*(crib.client.delete("/v1/calls/who-1") for _ in range(3)))
    body = answers[0].json()
    assert body["content"] == [{"type": "text", "text": "sleeping\n"}]
    assert (body["cancelled"], body["cancelled_by"], body["state"]) == (True, "caller", "kept")
    assert "cancelled by its caller" in body["message"]
    assert [answer.json() for answer in answers] == [body] * 3
    assert (await crib.client.delete("/v1/calls/who-1")).json() == body
    told = detail(await waiting, 500, "cancelled")
    assert (told["cancelled_by"], told["effects"]) == ("caller", "possible")


async def test_the_first_who_cancels_is_named(crib: Crib) -> None:
    session = await crib.session()
    waiting = await begun(crib, session, "sleep", {"seconds": 60}, "first-1")
    await until_sent(crib, "first-1")
    call = crib.server.executor.admission.find("default", "first-1")
    assert call is not None
    await asyncio.gather(stop(call, "shutdown", 5), stop(call, "caller", 5))
    assert detail(await waiting, 500, "cancelled")["cancelled_by"] == "shutdown"


async def test_a_call_that_does_not_stop_keeps_its_output_and_loses_its_sandbox(crib: Crib) -> None:
    session = await crib.session()
    sandbox = crib.sandbox(session)
    truth = sandbox.answer

    async def deaf(method: str, params: dict[str, Any]) -> dict[str, Any]:
        return {"found": True} if method == "toolcrib/cancel" else await truth(method, params)

    sandbox.answer = deaf  # type: ignore[method-assign]
    waiting = await begun(crib, session, "sleep", {"seconds": 60}, "deaf-1")
    await until_sent(crib, "deaf-1")
    await asyncio.sleep(0.05)
    body = (await crib.client.delete("/v1/calls/deaf-1")).json()
    assert body["content"] == [{"type": "text", "text": "sleeping\n"}]
    assert (body["cancelled"], body["state"]) == (True, "lost")
    detail(await waiting, 500, "cancelled")
    assert (await crib.call(session, "echo", {"text": "next"})).json()["sandbox_reset"] is True


async def test_a_cancel_that_races_with_the_end_has_one_answer(crib: Crib) -> None:
    session = await crib.session()
    seen = set()
    for number in range(30):
        key = f"race-{number}"
        waiting = await begun(crib, session, "sleep", {"seconds": 0.01}, key)
        await asyncio.sleep(random.uniform(0, 0.03))
        first = (await crib.client.delete(f"/v1/calls/{key}")).json()
        answer = await waiting
        assert first["cancelled"] is (answer.status_code == 500), first
        assert (await crib.client.delete(f"/v1/calls/{key}")).json() == first
        stored = await crib.client.get(f"/v1/calls/{key}")
        assert (stored.status_code, stored.json()) == (answer.status_code, answer.json())
        seen.add(first["cancelled"])
    assert seen == {True, False}


async def test_the_end_of_the_session_is_named_as_such(crib: Crib) -> None:
    session = await crib.session()
    waiting = await begun(crib, session, "sleep", {"seconds": 60}, "ended-1")
    await until_sent(crib, "ended-1")
    await crib.client.delete(f"/v1/sessions/{session}")
    told = detail(await waiting, 410, "session_gone")
    assert (told["cause"], told["effects"]) == ("deleted", "possible")
    body = (await crib.client.delete("/v1/calls/ended-1")).json()
    assert (body["cancelled"], body["code"]) == (False, "session_gone")


@pytest.mark.parametrize("image", ["workspace", "foreign"])
async def test_ten_quick_calls_after_each_cancel_are_answered(crib: Crib, image: str) -> None:
    session = await crib.session(images=["workspace", "foreign"])
    tool, quick = ("sleep", "echo") if image == "workspace" else ("foreign_wait", "foreign_steps")
    arguments = {"seconds": 60} if image == "workspace" else {}
    for round_ in range(50 if image == "workspace" else 3):
        key = f"{image}-{round_}"
        waiting = await begun(crib, session, tool, arguments, key)
        await until_sent(crib, key)
        await crib.client.delete(f"/v1/calls/{key}")
        detail(await waiting, 500, "cancelled")
        calls = (crib.call(session, quick, {"text": "x"}) for _ in range(10))
        assert {answer.status_code for answer in await asyncio.gather(*calls)} == {200}
