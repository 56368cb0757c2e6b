"""Images of scope `shared`: one sandbox for all sessions of a tenant."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.toolserver import crib as cribs
from tests.unit.toolserver.crib import Crib, detail
from toolserver.catalog.catalog import Catalog
from toolserver.store import keys


@pytest.fixture(autouse=True)
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    images = (
        cribs.image("workspace", cribs.TOOLS, workspace="rw", start="eager"),
        cribs.image("foreign", cribs.FOREIGN_TOOLS, scope="shared"),
    )
    monkeypatch.setattr(cribs, "catalog", lambda: Catalog({one.name: one for one in images}))


@pytest.fixture
async def crib(tmp_path: Path) -> AsyncIterator[Crib]:
    async with cribs.running(cribs.settings(tmp_path)) as crib:
        yield crib


RESULT = {"result": {"content": [{"type": "text", "text": "x"}]}}


def sandboxes(crib: Crib) -> set[str]:
    return {one.spec.sandbox_id for one in crib.runtime.sandboxes.values() if one.spec.image == "foreign"}


async def use(crib: Crib, session: str) -> set[str]:
    assert (await crib.call(session, "foreign_result", RESULT)).status_code == 200
    return sandboxes(crib)


async def test_sessions_of_a_tenant_share_it_until_the_last_one_ends(crib: Crib) -> None:
    first, second = [await crib.session(images=["foreign"]) for _ in range(2)]
    used = await use(crib, first)
    assert len(used) == 1
    assert await use(crib, second) == used
    await crib.client.delete(f"/v1/sessions/{first}")
    assert await use(crib, second) == used
    await crib.client.delete(f"/v1/sessions/{second}")
    assert sandboxes(crib) == set()
    third = await crib.session(images=["foreign"])
    fresh = await use(crib, third)
    assert len(fresh) == 1
    assert fresh != used


async def test_another_tenant_has_one_of_its_own(crib: Crib) -> None:
    used = await use(crib, await crib.session(images=["foreign"]))
    text = keys.new_text()
    await crib.server.database.write(lambda connection: keys.ensure(connection, text, "x", "other", "use"))
    head = {"Authorization": f"Bearer {text}"}
    made = await crib.client.post("/v1/sessions", json={"images": ["foreign"]}, headers=head)
    place = f"/v1/sessions/{made.json()['id']}/tools/foreign_result"
    assert (await crib.client.post(place, json={"arguments": RESULT}, headers=head)).status_code == 200
    assert len(sandboxes(crib)) == 2
    assert used < sandboxes(crib)


async def test_its_death_costs_the_calls_in_it_and_no_session(crib: Crib) -> None:
    first, second = [await crib.session(images=["workspace", "foreign"]) for _ in range(2)]
    used = await use(crib, first)
    calls = [asyncio.create_task(crib.call(session, "foreign_wait")) for session in (first, second)]
    await asyncio.sleep(0.2)
    (sandbox,) = [one for one in crib.runtime.sandboxes.values() if one.spec.sandbox_id in used]
    await sandbox.kill()
    for call in calls:
        detail(await call, 500, "tool_crashed")
    fresh = await use(crib, second)
    assert len(fresh) == 1
    assert fresh != used
    assert await use(crib, first) == fresh
    assert (await crib.call(first, "say", {"lines": ["alive"]})).status_code == 200


async def test_a_later_server_starts_a_fresh_one_and_tells_no_end_of_what_ran(tmp_path: Path) -> None:
    chosen = cribs.settings(tmp_path)
    runtime = cribs.new_runtime(chosen)
    async with cribs.crashing(chosen, runtime) as before:
        session = await before.session(images=["foreign"])
        used = await use(before, session)
        detail(await before.call(session, "foreign_wait", wait_s=0, key="cut"), 450, "still_running")
    async with cribs.running(chosen, runtime) as after:
        answer = await after.client.get("/v1/calls/cut?wait_s=10")
        detail(answer, 500, "outcome_unknown")
        assert (await after.call(session, "foreign_result", RESULT)).status_code == 200
        await after.server.reaper.reconcile()
        assert len(sandboxes(after)) == 1
        assert sandboxes(after) != used
