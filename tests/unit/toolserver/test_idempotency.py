from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection

from tests.unit.toolserver.crib import Crib, detail, new_runtime, running, settings
from toolserver.store import keys


async def test_the_key_is_the_call_id_and_the_tool_runs_once(crib: Crib) -> None:
    session = await crib.session()
    first = await crib.call(session, "count", {}, key="key-1")
    second = await crib.call(session, "count", {}, key="key-1")
    assert first.json()["call_id"] == "key-1"
    assert second.content == first.content
    assert second.headers["Idempotent-Replay"] == "true"
    assert "Idempotent-Replay" not in first.headers
    assert crib.runtime.workspaces[crib.workspace_id(session)].files["count"] == b"x"
    assert (await crib.client.get("/v1/calls/key-1")).content == first.content


async def test_how_long_the_caller_waits_is_not_part_of_the_request(crib: Crib) -> None:
    session = await crib.session()
    first = await crib.call(session, "count", {}, key="key-1", wait_s=1)
    assert (await crib.call(session, "count", {}, key="key-1", wait_s=2)).content == first.content


@pytest.mark.parametrize("change", ["arguments", "tool", "deadline", "session"])
async def test_another_request_under_the_key_is_409_and_runs_nothing(crib: Crib, change: str) -> None:
    session = await crib.session()
    await crib.call(session, "count", {}, key="key-1")
    other: dict[str, Any] = {"session_id": session, "name": "count", "arguments": {}}
    more: dict[str, Any] = {}
    if change == "arguments":
        other["arguments"] = {"seconds": 0}
    elif change == "tool":
        other["name"] = "die"
    elif change == "deadline":
        more["deadline_s"] = 5
    else:
        other["session_id"] = await crib.session()
    detail(await crib.call(**other, key="key-1", **more), 409, "idempotency_conflict")
    assert crib.runtime.workspaces[crib.workspace_id(session)].files["count"] == b"x"


async def test_requests_at_the_same_time_join_one_run(crib: Crib) -> None:
    session = await crib.session()
    answers = await asyncio.gather(*(crib.call(session, "count", {"seconds": 0.2}, key="same") for _ in range(5)))
    assert {a.status_code for a in answers} == {200}
    assert len({a.content for a in answers}) == 1
    assert crib.runtime.workspaces[crib.workspace_id(session)].files["count"] == b"x"


async def test_another_request_joins_no_running_call(crib: Crib) -> None:
    session = await crib.session()
    await crib.call(session, "sleep", {"seconds": 5}, key="same", wait_s=0)
    detail(await crib.call(session, "sleep", {"seconds": 6}, key="same"), 409, "idempotency_conflict")


async def test_a_stored_failure_is_given_again(crib: Crib) -> None:
    session = await crib.session()
    answers = [await crib.call(session, "fail", {"message": "no"}, key="bad") for _ in range(2)]
    detail(answers[1], 500, "tool_failed")
    assert answers[0].content == answers[1].content


async def test_a_refusal_is_not_held_against_the_key(crib: Crib) -> None:
    session = await crib.session()
    detail(await crib.call(session, "echo", {}, key="k"), 422, "invalid_arguments")
    detail(await crib.call(session, "nope", {}, key="k"), 404, "tool_not_found")
    detail(await crib.call(session, "end", {"end": "invalid"}, key="k"), 422, "invalid_arguments")
    assert (await crib.call(session, "echo", {"text": "now"}, key="k")).status_code == 200


async def test_keys_belong_to_their_tenant(crib: Crib) -> None:
    await crib.server.database.write(_other_key)
    session = await crib.session()
    await crib.call(session, "count", {}, key="shared")
    theirs = {"Authorization": "Bearer other-key"}
    made = await crib.client.post("/v1/sessions", json={"images": ["workspace"]}, headers=theirs)
    path = f"/v1/sessions/{made.json()['id']}/tools/echo"
    answer = await crib.client.post(
        path, json={"arguments": {"text": "x"}}, headers={**theirs, "Idempotency-Key": "shared"}
    )
    assert answer.json()["content"][0]["text"] == "x"
    detail(await crib.client.get(f"/v1/sessions/{session}", headers=theirs), 404, "session_not_found")


def _other_key(connection: Connection) -> None:
    keys.create(connection, "other-key", "other", "other", "use")


@pytest.mark.parametrize("key", ["k" * 129, "two words", "a/b", "a.b", "schlüssel", ""])
async def test_a_malformed_key_is_422(crib: Crib, key: str) -> None:
    session = await crib.session()
    headers = [(b"Idempotency-Key", key.encode("latin-1"))]
    answer = await crib.client.post(
        f"/v1/sessions/{session}/tools/echo", json={"arguments": {"text": "x"}}, headers=headers
    )
    assert detail(answer, 422, "invalid_arguments")["errors"][0]["pointer"] == "Idempotency-Key"


async def test_outcomes_outlive_the_server_and_its_sessions(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    async with running(chosen) as crib:
        session = await crib.session()
        first = await crib.call(session, "count", {}, key="lasting")
    async with running(chosen, new_runtime(chosen)) as crib:
        again = await crib.call(session, "count", {}, key="lasting")
        assert (again.status_code, again.content) == (200, first.content)
        assert again.headers["Idempotent-Replay"] == "true"
        detail(await crib.call(session, "count", {"seconds": 1}, key="lasting"), 409, "idempotency_conflict")
        detail(await crib.call(session, "count", {}, key="fresh"), 410, "session_gone")


async def test_a_call_that_was_running_when_the_server_died_is_outcome_unknown(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    async with running(chosen) as crib:
        session = await crib.session()
        first = await crib.call(session, "count", {}, key="cut")
        undo = "UPDATE calls SET ended_at = NULL, status = NULL, body = NULL"  # as it is when the process is killed
        await crib.server.database.write(lambda c: c.exec_driver_sql(undo))
    assert first.status_code == 200
    async with running(chosen, new_runtime(chosen)) as crib:
        for answer in (await crib.client.get("/v1/calls/cut"), await crib.call(session, "count", {}, key="cut")):
            told = detail(answer, 500, "outcome_unknown")
            assert (told["effects"], told["call_id"]) == ("possible", "cut")
