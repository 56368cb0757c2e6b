"""A server that does all that a client must bear: each has an outcome with a name, and the next call works or says what was lost."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.real_servers.bench import Bench, add, left_of, serving, state_with, text_of
from tests.unit.toolserver.crib import detail
from toolserver.app import server_id

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("added") / "state"
    return state_with(place, hostile=(), banner=("hostile", "--env", "MODE=banner"))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - no paths are wanted


@pytest.fixture
async def bench(tmp_path: Path, state: Path) -> AsyncIterator[Bench]:
    before = open_files()
    async with serving(tmp_path, state) as bench:
        yield bench
    assert open_files() <= before + 8


async def do(bench: Bench, session: str, what: str, **more: Any) -> httpx.Response:
    return await bench.call(session, "do", {"what": what}, **{"deadline_s": 30, **more})


async def test_what_is_no_answer_is_passed_over(bench: Bench) -> None:
    session = await bench.session("hostile")
    await bench.done(session, "ok")
    for what, said in {
        "noise": "done",
        "garbage": "done",
        "bom": "with a mark",
        "pieces": "in pieces",
        "batch": "one of several",
        "wrong ids": "done",
        "twice": "first",
        "bad progress": "done",
        "storm": "done",
        "stderr": "done",
        "flood of requests": "done",
    }.items():
        answer = await do(bench, session, what)
        assert answer.status_code == 200, (what, answer.text)
        assert text_of(answer.json()) == said, what
        after = await bench.done(session, "ok")
        assert (text_of(after), after.get("sandbox_reset")) == ("ok", None), what


async def test_an_answer_is_bounded_or_named_as_none(bench: Bench) -> None:
    session = await bench.session("hostile")
    large = await bench.done(session, "do", {"what": "large"})
    assert large["truncated"]["bytes_total"] == 3_000_000
    assert len(text_of(large)) < 70_000
    blocks = await bench.done(session, "do", {"what": "many blocks"})
    assert "2000 more blocks were left out" in text_of(blocks)
    for what, why in {
        "giant": "too large to be taken over",
        "no result": "neither a result that is an object nor an error",
        "no content": "is no MCP result",
    }.items():
        assert why in detail(await do(bench, session, what), 500, "tool_failed")["message"], what
    broken = detail(await bench.call(session, "promise"), 500, "tool_failed")
    assert "does not fit its own output_schema" in broken["message"]
    assert broken["errors"][0]["pointer"] == "/n"
    after = await bench.done(session, "ok")
    assert (text_of(after), after.get("sandbox_reset")) == ("ok", None)


async def test_its_end_is_told_and_the_next_call_has_a_fresh_one(bench: Bench) -> None:
    session = await bench.session("hostile")
    for what, code, told in (
        ("half", "tool_crashed", {"exit_code": 3, "sandbox_end": "exited"}),
        ("die", "tool_crashed", {"exit_code": 7, "sandbox_end": "exited"}),
        ("kill", "outcome_unknown", {}),  # the engine tells no kill from within from one from without
        ("flood of noise", "tool_crashed", {"sandbox_end": "killed"}),
        ("endless line", "tool_crashed", {"sandbox_end": "killed"}),
        ("memory", "oom_killed", {"sandbox_end": "oom"}),
    ):
        error = detail(await do(bench, session, what), 500, code)
        assert {name: error.get(name) for name in told} == told, what
        assert error["state"] == "lost", what
        after = await bench.done(session, "ok")
        assert (after["content"][-1]["text"], after["sandbox_reset"]) == ("ok", True), what
        await bench.until_left(1)


async def test_a_sandbox_that_somebody_removes_leaves_its_call_unknown(bench: Bench) -> None:
    session = await bench.session("hostile")
    await bench.done(session, "ok")
    call = asyncio.create_task(do(bench, session, "silence", deadline_s=60))
    await asyncio.sleep(0.5)
    await asyncio.to_thread(remove_containers, bench.server_id, "hostile")
    detail(await call, 500, "outcome_unknown")
    after = await bench.done(session, "ok")
    assert (after["content"][-1]["text"], after["sandbox_reset"]) == ("ok", True)


def remove_containers(server_id: str, image: str) -> None:
    of = ["--filter", f"label=toolcrib.server={server_id}", "--filter", f"label=toolcrib.image={image}"]
    found = subprocess.run(["docker", "ps", "-q", *of], capture_output=True, text=True, check=True).stdout.split()
    subprocess.run(["docker", "rm", "-f", *found], capture_output=True, check=True)


async def test_a_deadline_holds_against_all_of_it(bench: Bench) -> None:
    session = await bench.session("hostile")
    await bench.done(session, "ok")
    for what in ("silence", "progress", "close"):
        begun = time.monotonic()
        error = detail(await do(bench, session, what, deadline_s=0.5), 450, "deadline_exceeded")
        assert error["type"] == "timeout", what
        assert time.monotonic() - begun < 30, what
        after = await bench.done(session, "ok")
        assert (after["content"][-1]["text"], after["sandbox_reset"]) == ("ok", True), what
    running = await do(bench, session, "progress", key="k", wait_s=0.3, deadline_s=60)
    detail(running, 450, "still_running")
    told = (await bench.client.delete("/v1/calls/k")).json()
    assert (told["cancelled"], told["cancelled_by"]) == (True, "caller")
    assert (await bench.done(session, "ok"))["sandbox_reset"] is True


async def test_other_calls_of_a_server_go_on_while_one_is_given_up(bench: Bench) -> None:
    session = await bench.session("hostile")
    await bench.done(session, "ok")
    silent, short, *quick = await asyncio.gather(
        do(bench, session, "silence", deadline_s=2.5),
        do(bench, session, "silence", deadline_s=0.5),
        *(bench.call(session, "ok") for _ in range(20)),
    )
    assert [answer.status_code for answer in quick] == [200] * 20
    assert detail(short, 450, "deadline_exceeded")["state"] == "kept"
    assert detail(silent, 450, "deadline_exceeded")["state"] == "lost"
    assert text_of(await bench.done(session, "ok")).endswith("ok")


async def test_questions_that_make_no_sense_are_refused_by_name(bench: Bench) -> None:
    session = await bench.session("hostile")
    told = (await bench.text(session, "do", {"what": "bad questions"})).split("\n")
    schema, url, form, sampling, roots, unknown, ping = told
    assert "requestedSchema can't be used" in schema
    assert "url of http or https" in url
    assert "needs a message" in form
    assert "no model to sample from" in sampling
    assert "no roots" in roots
    assert "no such method" in unknown
    assert ping == "{}"


async def test_the_bounds_of_its_sandbox_hold(bench: Bench) -> None:
    session = await bench.session("workspace", "hostile")
    assert await bench.text(session, "do", {"what": "fill"}) == "No space left on device"
    assert await bench.text(session, "do", {"what": "forks"}) == "Resource temporarily unavailable after some forks"
    assert text_of(await bench.done(session, "ok")) == "ok"
    assert await bench.text(session, "python_execute", {"code": "print(6 * 7)"}) == "42\n"


async def test_one_that_never_ends_ends_with_its_session(bench: Bench) -> None:
    sessions = [await bench.session("hostile"), await bench.session("banner")]
    assert await bench.text(sessions[0], "ok") == "ok"
    assert await bench.text(sessions[1], "banner.ok") == "ok"
    await bench.until_left(2)
    for session in sessions:
        assert (await bench.client.delete(f"/v1/sessions/{session}")).status_code in (200, 204)
    await bench.until_left(0)


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("pages without end", "more than 100 pages"),
        ("pages in a circle", "the tool list never ends"),
        ("ten thousand tools", "more than 5000 tools"),
        ("dies", "exited with code 9"),
        ("deaf", "not ready within 2 s"),
    ],
)
def test_one_that_can_not_be_used_is_not_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, why: str
) -> None:
    monkeypatch.setenv("TOOLSERVER_RUNTIME__START_TIMEOUT_S", "2" if mode == "deaf" else "60")
    done = add(tmp_path, "hostile", "--env", f"MODE={mode}")
    assert done.exit_code != 0
    assert why in done.output, done.output
    assert left_of(f"{server_id(tmp_path)}-trial") == []
