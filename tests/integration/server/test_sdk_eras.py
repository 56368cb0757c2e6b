"""Servers made with an SDK of each era of MCP, in Python and TypeScript: all that a tool may do in a call, in both."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.real_servers.bench import Bench, serving, state_with, text_of
from tests.unit.toolserver.crib import detail

ERAS = {"legacy": "2025-11-25", "modern": "2026-07-28", "both-eras": "2026-07-28", "modern-only": "2026-07-28"}
WRITTEN_IN_PYTHON = ["legacy", "modern"]
pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return state_with(
        tmp_path_factory.mktemp("added") / "state",
        legacy=(),
        modern=(),
        both_eras=(),
        modern_only=(),
        common=("legacy", "--scope", "shared"),
    )


@pytest.fixture
async def bench(tmp_path: Path, state: Path) -> AsyncIterator[Bench]:
    async with serving(tmp_path, state) as bench:
        yield bench


async def named(bench: Bench, image: str, tool: str) -> str:
    """What the tool is called here: `image.tool` where another image had the name first."""
    listed = (await bench.client.get("/v1/tools")).json()["tools"]
    names = {entry["name"] for entry in listed if entry["image"] == image}
    return tool if tool in names else f"{image}.{tool}"


async def test_each_is_spoken_to_in_its_own_era(bench: Bench) -> None:
    assert {
        name: one.image.era for name, one in bench.server.catalog.added.items() if one.image and name in ERAS
    } == ERAS
    session = await bench.session(*ERAS)
    for image in ERAS:
        told = await bench.done(session, await named(bench, image, "add"), {"a": 20, "b": 22})
        assert "42" in text_of(told), image
        if image == "modern":
            assert told["structured"] == {"total": 42}
    for image, box in bench.server.registry.live()[0].boxes.items():
        live = box.live
        assert live is not None
        assert live.era == ERAS[image]


@pytest.mark.parametrize("image", WRITTEN_IN_PYTHON)
async def test_progress_errors_and_answers(bench: Bench, image: str) -> None:
    session = await bench.session(image)
    count = await named(bench, image, "count")
    answer = await bench.client.post(
        f"/v1/sessions/{session}/tools/{count}",
        json={"arguments": {"to": 3, "pause_s": 0.05}},
        headers={"Accept": "text/event-stream"},
    )
    told = [
        json.loads(line.removeprefix("data: "))
        for part in answer.text.split("\n\n")
        if "event: progress" in part
        for line in part.split("\n")
        if line.startswith("data: ")
    ]
    seen = [(one["progress"], one["total"], one["message"]) for one in told]
    assert seen[-1] == (3, 3, "at 3")
    assert seen == [
        (at, 3, f"at {at}") for at in (1, 2, 3) if (at, 3, f"at {at}") in seen
    ]  # the newest may overtake older ones
    assert "counted to 3" in answer.text
    failed = await bench.call(session, await named(bench, image, "fail"), {"why": "no more tea"})
    assert "no more tea" in detail(failed, 500, "tool_failed")["message"]
    wrong = detail(await bench.call(session, count, {"to": "many"}), 422, "invalid_arguments")
    assert wrong["errors"][0]["pointer"] == "/arguments/to"


@pytest.mark.parametrize("image", WRITTEN_IN_PYTHON)
async def test_a_question_in_the_midst_of_a_call(bench: Bench, image: str) -> None:
    session = await bench.session(image)
    ask = await named(bench, image, "ask")

    async def answered(key: str, **answer: Any) -> str:
        told = detail(await bench.call(session, ask, key=key), 450, "still_running")
        assert (told["type"], told["next_calling"]) == ("input_required", "call_answer")
        assert told["elicitation"]["message"] == "Which colour?"
        assert told["elicitation"]["requested_schema"]["required"] == ["colour"]
        return await bench.text(session, "call_answer", {"call_id": key, **answer})

    assert await answered("a", action="accept", content={"colour": "red"}) == 'accept: {"colour":"red","count":1}'
    assert await answered("b", action="decline") == "decline"
    assert await answered("c", action="cancel") == "cancel"
    detail(await bench.call(session, ask, key="d", deadline_s=2), 450, "still_running")
    events = await bench.client.get("/v1/calls/d", headers={"Accept": "text/event-stream"})
    assert '"text":"cancel"' in events.text.replace('\\"', '"').replace(": ", ":")


async def test_a_question_that_may_be_another_sessions_is_put_to_nobody(bench: Bench) -> None:
    one, two = await bench.session("common"), await bench.session("common")
    ask = await named(bench, "common", "ask")
    told = detail(await bench.call(one, ask, key="one"), 450, "still_running")
    assert told["type"] == "input_required"
    refused = detail(await bench.call(two, ask), 500, "tool_failed")
    assert "Calls of several sessions are running" in refused["message"]
    assert await bench.text(one, "call_answer", {"call_id": "one", "action": "decline"}) == "decline"


async def test_what_a_server_of_the_old_era_may_want_of_us(bench: Bench) -> None:
    session = await bench.session("legacy")
    sampled = detail(await bench.call(session, "sample"), 500, "tool_failed")
    assert "no model to sample from" in sampled["message"]
    rooted = detail(await bench.call(session, "roots"), 500, "tool_failed")
    assert "no roots" in rooted["message"]
    sound, memo = (await bench.done(session, "hear"))["content"]
    assert (sound["type"], sound["mimeType"], sound["data"]) == ("audio", "audio/wav", "UklGRg==")
    assert memo["resource"] == {"uri": "memo://1", "mimeType": "text/plain", "text": "a memo"}


@pytest.mark.parametrize(("image", "times"), [("legacy", 50), ("modern", 3)])
async def test_calls_after_cancelled_ones_are_answered_each_time(
    tmp_path: Path, state: Path, image: str, times: int
) -> None:
    """A server of the new era is silent about a cancelled call, so that its sandbox is ended each time, and that is told once."""
    async with serving(tmp_path, state, call={"kill_grace_s": 0.3 if image == "modern" else 20}) as bench:
        await _cancel_and_go_on(bench, image, times)


async def _cancel_and_go_on(bench: Bench, image: str, times: int) -> None:
    session = await bench.session(image)
    add, count = await named(bench, image, "add"), await named(bench, image, "count")
    await bench.done(session, add, {"a": 1, "b": 1})
    for turn in range(times):
        running = await bench.call(session, count, {"to": 600, "pause_s": 0.1}, key=f"k{turn}", wait_s=0.05)
        detail(running, 450, "still_running")
        told = (await bench.client.delete(f"/v1/calls/k{turn}")).json()
        assert (told["cancelled"], told["cancelled_by"]) == (True, "caller")
        sums = await asyncio.gather(*(bench.call(session, add, {"a": turn, "b": other}) for other in range(10)))
        assert [answer.status_code for answer in sums] == [200] * 10
        resets = [answer.json().get("sandbox_reset", False) for answer in sums]
        assert sum(resets) == (1 if image == "modern" else 0)
    if image == "legacy":
        ended = (await bench.done(session, "cancelled"))["structured"]
        assert ended == {"result": ["CancelledError"] * times}
        late = await bench.call(session, count, {"to": 600, "pause_s": 0.1}, deadline_s=0.5)
        assert detail(late, 450, "deadline_exceeded")["state"] == "kept"
        assert "sandbox_reset" not in await bench.done(session, add, {"a": 1, "b": 1})


@pytest.mark.parametrize("image", WRITTEN_IN_PYTHON)
async def test_a_list_of_tools_that_grows_withholds_them_until_it_is_approved(bench: Bench, image: str) -> None:
    session = await bench.session(image)
    add = await named(bench, image, "add")
    await bench.done(session, await named(bench, image, "grow"))
    async with asyncio.timeout(30):
        for _ in range(300):
            if (await bench.call(session, add, {"a": 1, "b": 1})).status_code != 200:
                break
            await asyncio.sleep(0.1)
    error = detail(await bench.call(session, add, {"a": 1, "b": 1}), 404, "tool_not_found")
    assert "approve" in error["message"]
    listed = (await bench.client.get("/v1/tools")).json()
    assert all(tool["image"] != image for tool in listed["tools"])
    assert image in json.dumps(listed["withheld"])
