"""What the server writes into its journal, and that nothing runs without."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.unit.toolserver.crib import Crib, crashing, detail, new_runtime, running, settings
from tests.unit.toolserver.test_tenants import with_key
from toolserver.journal.digest import ArgumentsDigest
from toolserver.journal.read import Wanted, records
from toolserver.journal.verify import verify

SECRET = "secret-in-the-arguments"


def told(crib: Crib, event: str | None = None) -> list[dict[str, Any]]:
    found = [one.fields for one in records(crib.server.journal.folder, Wanted())]
    return [fields for fields in found if event in (None, fields["event"])]


async def test_a_call_stands_in_it_with_who_what_and_how_it_ended(crib: Crib) -> None:
    session = await crib.session(env={"PASSWORD": SECRET}, labels={"is": SECRET})
    answer = await crib.call(session, "echo", {"text": SECRET}, key="mine")
    assert SECRET in answer.text
    begun, ended = told(crib, "call_begun")[0], told(crib, "call_ended")[0]
    key_id = told(crib, "key_created")[0]["of_key"]
    for fields in (begun, ended):
        assert (fields["tenant"], fields["key_id"], fields["session_id"]) == ("default", key_id, session)
        assert (fields["call_id"], fields["tool"]) == ("mine", "echo")
        assert answer.headers["traceparent"].split("-")[1] == fields["trace_id"]
    digest = ArgumentsDigest(crib.server.journal.folder)('{"text":"' + SECRET + '"}')
    assert (begun["image"], begun["arguments_digest"]) == ("fake/workspace:1", digest)
    assert (ended["status"], ended["code"]) == (200, "ok")
    assert ended["wall_ms"] > 0
    assert SECRET not in str(told(crib))


async def test_each_end_has_its_code_and_its_cause(crib: Crib) -> None:
    session = await crib.session(images=["workspace", "web"])
    await crib.call(session, "end", {"end": "failed"})
    await crib.call(session, "sleep", {"seconds": 30}, wait_s=0, key="cancelled")
    await crib.client.delete("/v1/calls/cancelled")
    await crib.call(session, "web_echo", {"text": "x"})
    await crib.call(session, "nope", {})
    await crib.call(session, "sleep", {"seconds": 30}, wait_s=0, key="gone")
    await crib.client.delete(f"/v1/sessions/{session}")
    ends = [(one["code"], one["status"], one.get("cause")) for one in told(crib, "call_ended")]
    assert ends == [("tool_failed", 500, None), ("cancelled", 500, "caller"), ("session_gone", 410, "deleted")]
    (denied,) = told(crib, "call_denied")
    assert (denied["tool"], denied["session_id"]) == ("web_echo", session)
    (created,), (ended,) = told(crib, "session_created"), told(crib, "session_ended")
    assert created["images"] == ["fake/workspace:1", "fake/web:1"]
    assert (ended["cause"], ended["key_id"]) == ("deleted", created["key_id"])


async def test_a_key_that_lacks_the_scope_is_noted(crib: Crib) -> None:
    async with with_key(crib, "t", "read") as reader:
        detail(await reader.put("/v1/sessions/x/files/private-name", content=b""), 403, "forbidden")
    (fields,) = told(crib, "forbidden")
    assert (fields["tenant"], fields["operation"], fields["scope"]) == ("t", "files.put", "use")
    assert "private-name" not in str(told(crib))


async def test_start_and_stop_are_noted_and_the_chain_goes_over_them(tmp_path: Path) -> None:
    for _ in range(2):
        async with running(settings(tmp_path)) as crib:
            await crib.session()
    events = [fields["event"] for fields in told(crib)]
    one = ["server_started", "session_created", "session_ended", "server_stopped"]
    assert events == [one[0], "key_created", *one[1:], *one]
    assert verify(crib.server.journal.folder).problems == []


async def test_while_the_journals_disk_is_full_nothing_runs_and_then_it_goes_on(
    crib: Crib, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await crib.session()
    await crib.call(session, "sleep", {"seconds": 0.3}, key="before", wait_s=0)
    write, full = os.write, True

    def short(file: int, data: bytes) -> int:
        return write(file, data[:7]) if full else write(file, data)

    monkeypatch.setattr(os, "write", short)
    refused = detail(await crib.call(session, "count", key="held"), 503, "runtime_unavailable")
    assert "journal" in refused["message"]
    assert refused["effects"] == "none"
    assert (await crib.client.get("/v1/calls/before?wait_s=5")).status_code == 200  # its answer is not lost
    detail(await crib.client.post("/v1/sessions", json={"images": ["workspace"]}), 503, "runtime_unavailable")
    detail(await crib.client.get("/v1/calls/held"), 404, "call_not_found")
    full = False
    assert (await crib.call(session, "count", key="held")).json()["content"][0]["text"] == "count 1"
    assert [one["call_id"] for one in told(crib, "call_ended")] == ["before", "held"]
    assert len((await crib.client.get("/v1/sessions")).json()["sessions"]) == 1
    assert verify(crib.server.journal.folder).problems == []
    assert crib.server.executor.admission.places_taken == 0


async def test_an_outcome_that_a_killed_server_stored_and_did_not_journal_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = settings(tmp_path)
    async with running(chosen) as crib:
        session = await crib.session()
        with monkeypatch.context() as patch:  # as if it had been killed between the two
            patch.setattr(crib.server.call_journal, "ended", lambda *_args: None)
            await crib.call(session, "end", {"end": "failed"}, key="lost")
    async with running(chosen) as crib:
        (ended,) = told(crib, "call_ended")
    assert (ended["call_id"], ended["code"], ended["recovered"]) == ("lost", "tool_failed", True)
    async with running(chosen) as crib:
        assert len(told(crib, "call_ended")) == 1


async def test_a_call_that_outlives_the_server_is_one_call_in_it_and_counts_on(tmp_path: Path) -> None:
    chosen = settings(tmp_path, tenant={"max_calls": 2, "max_memory_mb": 1024}, limits={"memory_mb": 1024})
    runtime = new_runtime(chosen)
    async with crashing(chosen, runtime) as crib:
        session = await crib.session()
        for name in ("lost", "one"):
            await crib.call(session, "sleep", {"seconds": 1}, key=name, wait_s=0)
        path = next(crib.server.journal.folder.glob("*.jsonl"))
        written = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(
            b"".join(line for line in written if b'"call_id":"one"' not in line)
        )  # died before it came to that
    async with running(chosen, runtime) as crib:
        detail(await crib.call(session, "echo", {"text": "x"}), 429, "quota_exceeded")
        body = {"images": ["workspace"]}
        assert detail(await crib.client.post("/v1/sessions", json=body), 429, "quota_exceeded")["quota"] == "memory_mb"
        for name in ("lost", "one"):
            assert (await crib.client.get(f"/v1/calls/{name}?wait_s=10")).status_code == 200
        assert (await crib.call(session, "echo", {"text": "x"})).status_code == 200
    begun, ended = told(crib, "call_begun"), told(crib, "call_ended")
    assert [(one["call_id"], one.get("recovered")) for one in begun[:2]] == [("lost", None), ("one", True)]
    assert {one["call_id"]: one["key_id"] is not None for one in ended[:2]} == {"lost": True, "one": False}
    assert [one["code"] for one in ended] == ["ok"] * 3
    assert verify(crib.server.journal.folder).problems == []
