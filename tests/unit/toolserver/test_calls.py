from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.toolserver import crib as cribs
from tests.unit.toolserver.crib import Crib, detail
from toolserver.catalog.catalog import Catalog


async def test_an_outcome_has_every_promised_field(crib: Crib) -> None:
    session = await crib.session()
    answer = await crib.call(session, "echo", {"text": "hello ü"})
    body = answer.json()
    assert answer.status_code == 200
    assert body["content"] == [{"type": "text", "text": "hello ü"}]
    assert body["call_id"].startswith("call_")
    assert set(body["usage"]) == {"wall_ms", "cpu_ms", "memory_peak_bytes"}
    assert body["artifacts"] == body["workspace_changed"] == []


@pytest.mark.parametrize(
    ("end", "status", "code"),
    [
        ("failed", 500, "tool_failed"),
        ("crashed", 500, "tool_crashed"),
        ("oom", 500, "oom_killed"),
        ("disk_full", 500, "disk_full"),
        ("denied", 500, "policy_denied"),
        ("cancelled", 500, "cancelled"),
        ("deadline", 450, "deadline_exceeded"),
    ],
)
async def test_the_workers_end_decides_the_code_and_keeps_the_output(
    crib: Crib, end: str, status: int, code: str
) -> None:
    session = await crib.session()
    told = detail(await crib.call(session, "end", {"end": end, "message": "It said why."}), status, code)
    assert told["message"] == "It said why."
    assert told["content"] == [{"type": "text", "text": "output so far"}]
    assert told["exit_code"] == 3
    assert told["effects"] == "possible"
    assert told.get("type") == ("timeout" if end == "deadline" else None)


async def test_arguments_that_only_the_tool_can_judge_are_422(crib: Crib) -> None:
    session = await crib.session()
    told = detail(
        await crib.call(session, "end", {"end": "invalid", "message": "no such line"}), 422, "invalid_arguments"
    )
    assert told["errors"] == [{"pointer": "/arguments", "message": "no such line"}]
    assert told["effects"] == "none"


@pytest.mark.parametrize(
    ("cause", "code"),
    [("oom", "oom_killed"), ("exited", "tool_crashed"), ("killed", "tool_crashed"), ("unknown", "outcome_unknown")],
)
async def test_a_sandbox_that_dies_in_a_call_is_named_and_replaced(crib: Crib, cause: str, code: str) -> None:
    session = await crib.session()
    told = detail(await crib.call(session, "exit", {"cause": cause}), 500, code)
    assert told["effects"] == "possible"
    after = (await crib.call(session, "echo", {"text": "again"})).json()
    assert after["sandbox_reset"] is True
    assert "lost" in after["content"][0]["text"]
    assert after["content"][1]["text"] == "again"
    assert "sandbox_reset" not in (await crib.call(session, "echo", {"text": "third"})).json()


async def test_all_errors_of_the_arguments_come_at_once_with_pointers(crib: Crib) -> None:
    session = await crib.session()
    told = detail(await crib.call(session, "echo", {"bogus": 1}), 422, "invalid_arguments")
    assert {e["pointer"] for e in told["errors"]} >= {"/arguments"}
    assert len(told["errors"]) == 2
    assert not [r for r in crib.sandbox(session).requests if r["method"] == "tools/call"]


@pytest.mark.parametrize("arguments", ["{}", [], 5, None])
async def test_arguments_that_are_no_object_are_422(crib: Crib, arguments: Any) -> None:
    session = await crib.session()
    answer = await crib.client.post(f"/v1/sessions/{session}/tools/echo", json={"arguments": arguments})
    assert "/arguments" in {e["pointer"] for e in detail(answer, 422, "invalid_arguments")["errors"]}


@pytest.mark.parametrize(
    "extra",
    [
        {"bogus": 1},
        {"wait_s": -1},
        {"wait_s": "5"},
        {"deadline_s": 0},
        {"deadline_s": True},
        {"wait_s": 1e308},
        {"deadline_s": 1e9},
    ],
)
async def test_unknown_fields_and_impossible_times_are_422(crib: Crib, extra: dict[str, Any]) -> None:
    session = await crib.session()
    answer = await crib.call(session, "echo", {"text": "x"}, **extra)
    assert detail(answer, 422, "invalid_arguments")["errors"][0]["pointer"] == f"/{next(iter(extra))}"


async def test_an_unknown_tool_is_404_with_suggestions(crib: Crib) -> None:
    session = await crib.session()
    assert "echo" in detail(await crib.call(session, "eco", {}), 404, "tool_not_found")["suggestions"]


async def test_a_tool_of_an_image_that_the_session_lacks_is_404(crib: Crib) -> None:
    session = await crib.session()
    detail(await crib.call(session, "web_echo", {}), 404, "tool_not_found")


async def test_a_call_past_wait_s_is_450_and_goes_on(crib: Crib) -> None:
    session = await crib.session()
    told = detail(await crib.call(session, "sleep", {"seconds": 0.4}, wait_s=0.05), 450, "still_running")
    assert told["type"] == "retry"
    assert told["next_calling"] == "call_wait"
    assert told["content"] == [{"type": "text", "text": "sleeping\n"}]
    waited = await crib.call(session, told["next_calling"], told["arguments"])
    assert waited.status_code == 200
    assert waited.json()["call_id"] == told["call_id"]
    got = await crib.client.get(f"/v1/calls/{told['call_id']}")
    assert got.content == waited.content


async def test_output_that_is_known_already_is_left_out_of_a_450(crib: Crib) -> None:
    session = await crib.session()
    told = detail(await crib.call(session, "sleep", {"seconds": 5}, wait_s=0), 450, "still_running")
    await asyncio.sleep(0.05)
    path = f"/v1/calls/{told['call_id']}?wait_s=0"
    assert detail(await crib.client.get(path + "&after=5"), 450, "still_running")["content"] == [
        {"type": "text", "text": "ing\n"}
    ]
    assert detail(await crib.client.get(path + "&after=99"), 450, "still_running")["content"] == []


async def test_an_unknown_call_is_404(crib: Crib) -> None:
    session = await crib.session()
    for answer in (
        await crib.client.get("/v1/calls/nobody"),
        await crib.client.delete("/v1/calls/nobody"),
        await crib.call(session, "call_wait", {"call_id": "nobody"}),
    ):
        detail(answer, 404, "call_not_found")


async def test_the_deadline_is_the_workers_and_the_state_is_told(crib: Crib) -> None:
    session = await crib.session()
    told = detail(await crib.call(session, "sleep", {"seconds": 30}, deadline_s=0.1), 450, "deadline_exceeded")
    assert told["type"] == "timeout"
    assert told["state"] == "kept"
    assert told["content"][0]["text"] == "sleeping\n"


@pytest.mark.parametrize("how", ["delete", "tool"])
async def test_a_cancelled_call_is_200_with_its_output_and_whoever_waits_hears(crib: Crib, how: str) -> None:
    session = await crib.session()
    running = asyncio.create_task(crib.call(session, "sleep", {"seconds": 30}, key="long-1"))
    await asyncio.sleep(0.1)
    if how == "delete":
        answer = await crib.client.delete("/v1/calls/long-1")
    else:
        answer = await crib.call(session, "call_cancel", {"call_id": "long-1"})
    assert answer.status_code == 200
    assert answer.json()["cancelled"] is True
    assert answer.json()["content"][0]["text"] == "sleeping\n"
    detail(await running, 500, "cancelled")
    detail(await crib.client.get("/v1/calls/long-1"), 500, "cancelled")
    assert (await crib.client.delete("/v1/calls/long-1")).json()["cancelled"] is True


async def test_cancelling_an_ended_call_gives_its_outcome(crib: Crib) -> None:
    session = await crib.session()
    done = (await crib.call(session, "echo", {"text": "done"})).json()
    answer = await crib.client.delete(f"/v1/calls/{done['call_id']}")
    assert answer.status_code == 200
    assert answer.json()["cancelled"] is False
    assert answer.json()["content"] == done["content"]


async def test_too_many_calls_at_a_time_are_429(crib: Crib) -> None:
    session = await crib.session()
    most = crib.server.settings.call.max_concurrent_per_session
    for _ in range(most):
        detail(await crib.call(session, "sleep", {"seconds": 30}, wait_s=0), 450, "still_running")
    detail(await crib.call(session, "echo", {"text": "x"}), 429, "quota_exceeded")


async def test_a_web_tool_without_egress_is_policy_denied_and_says_how(crib: Crib) -> None:
    session = await crib.session(images=["workspace", "web"])
    told = detail(await crib.call(session, "web_echo", {"text": "x"}), 500, "policy_denied")
    assert "egress" in told["message"]
    assert told["effects"] == "none"
    granted = await crib.session(images=["web"], egress={"mode": "open"})
    assert (await crib.call(granted, "web_echo", {"text": "x"})).status_code == 200
    assert crib.sandbox(granted, "web").door is not None


async def test_text_that_is_no_unicode_never_breaks_an_answer(crib: Crib) -> None:
    session = await crib.session()
    raw = b'{"arguments": {"text": "\\ud800"}}'
    answer = await crib.client.post(f"/v1/sessions/{session}/tools/echo", content=raw)
    assert detail(answer, 422, "invalid_arguments")["errors"][0]["pointer"] == "/arguments/text"


async def test_a_foreign_image_works_without_the_extension(crib: Crib) -> None:
    session = await crib.session(images=["foreign"])
    good = {"content": [{"type": "text", "text": "fine"}], "structuredContent": {"a": 1}}
    body = (await crib.call(session, "foreign_result", {"result": good})).json()
    assert (body["content"], body["structured"], body["workspace_changed"]) == (good["content"], {"a": 1}, [])
    bad = {"content": [{"type": "text", "text": "no such thing"}], "isError": True}
    assert (
        detail(await crib.call(session, "foreign_result", {"result": bad}), 500, "tool_failed")["message"]
        == "no such thing"
    )
    detail(await crib.call(session, "foreign_result", {"result": {"content": "text"}}), 500, "tool_failed")


async def test_long_output_of_a_foreign_image_keeps_head_and_tail(crib: Crib) -> None:
    session = await crib.session(images=["foreign"])
    text = "HEAD" + "x" * 300_000 + "TAIL"
    body = (
        await crib.call(session, "foreign_result", {"result": {"content": [{"type": "text", "text": text}]}})
    ).json()
    shown = body["content"][0]["text"]
    assert shown.startswith("HEAD")
    assert shown.endswith("TAIL")
    assert len(shown) <= 65_536
    assert body["truncated"]["bytes_total"] == len(text)
    assert body["truncated"]["bytes_kept"] == len(shown.encode())


async def test_a_foreign_call_that_ignores_its_deadline_costs_its_sandbox(crib: Crib) -> None:
    session = await crib.session(images=["foreign"])
    told = detail(await crib.call(session, "foreign_wait", {}, deadline_s=0.2), 450, "deadline_exceeded")
    assert told["state"] == "lost"
    assert (await crib.call(session, "foreign_result", {"result": {"content": []}})).json()["sandbox_reset"] is True


async def test_a_foreign_server_hears_of_the_cancel(crib: Crib) -> None:
    session = await crib.session(images=["foreign"])
    told = detail(await crib.call(session, "foreign_wait", {}, wait_s=0.1), 450, "still_running")
    sandbox = crib.sandbox(session, "foreign")
    answer = await crib.client.delete(f"/v1/calls/{told['call_id']}")
    assert answer.json()["cancelled"] is True
    heard = [r for r in sandbox.requests if r["method"] == "notifications/cancelled"]
    asked = [r for r in sandbox.requests if r["method"] == "tools/call"]
    assert [r["params"]["requestId"] for r in heard] == [r["id"] for r in asked]


async def test_a_client_that_hangs_up_stops_nothing(crib: Crib) -> None:
    session = await crib.session()
    request = asyncio.create_task(crib.call(session, "count", {"seconds": 0.3}, key="kept"))
    await asyncio.sleep(0.1)
    request.cancel()
    await asyncio.wait([request])
    answer = await crib.client.get("/v1/calls/kept")
    assert answer.status_code == 200
    assert json.loads(answer.content)["content"][0]["text"] == "count 1"


async def test_an_image_may_bound_the_deadlines_of_its_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bounded = cribs.image("foreign", cribs.FOREIGN_TOOLS, deadline_s=0.2)
    monkeypatch.setattr(cribs, "catalog", lambda: Catalog({"foreign": bounded}))
    async with cribs.running(cribs.settings(tmp_path)) as crib:
        session = await crib.session(images=["foreign"])
        detail(await crib.call(session, "foreign_wait", deadline_s=60), 450, "deadline_exceeded")
