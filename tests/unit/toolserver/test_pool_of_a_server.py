"""The pool as clients of a server see it, over HTTP and the fake runtime."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.unit.toolserver.crib import Crib, running, settings
from toolserver.errors import StoreUnavailable

TEN_S = 10


async def until_ready(crib: Crib, count: int) -> None:
    async with asyncio.timeout(TEN_S):
        while crib.server.registry.pool.ready() != count:  # noqa: ASYNC110 - it has no event for this
            await asyncio.sleep(0.01)


async def create(crib: Crib, **body: Any) -> dict[str, Any]:
    answer = await crib.client.post("/v1/sessions", json={"images": ["workspace"], **body})
    assert answer.status_code == 201, answer.text
    told: dict[str, Any] = answer.json()
    return told


async def test_sessions_say_how_their_sandboxes_began(tmp_path: Path) -> None:
    async with running(settings(tmp_path, pool={"enabled": True, "min": 1, "max": 1})) as crib:
        await until_ready(crib, 1)
        (spare,) = crib.server.registry.pool.spares()
        warm = await create(crib, env={"A": "1"})
        assert warm["sandboxes"] == [{"image": "workspace", "sandbox_id": spare.spec.sandbox_id, "start": "warm"}]
        assert (await crib.call(warm["id"], "echo", {"text": "hello"})).status_code == 200
        await until_ready(crib, 1)
        odd = await create(crib, limits={"disk_mb": 7})
        (told,) = odd["sandboxes"]
        assert (told["start"], told["reason"]) == ("cold", "its limits of disk or /tmp can't be changed later")
        assert odd["limits"]["disk_mb"] == 7
        metrics = (await crib.client.get("/metrics")).text
        assert 'toolserver_pool_claims_total{start="warm"} 1' in metrics
        assert 'toolserver_pool_claims_total{start="cold"} 1' in metrics
        assert "toolserver_pool_ready 1" in metrics


async def test_a_sandbox_that_replaces_one_of_the_pool_says_so(tmp_path: Path) -> None:
    async with running(settings(tmp_path, pool={"enabled": True})) as crib:
        await until_ready(crib, 1)
        session = (await create(crib))["id"]
        await crib.call(session, "die")
        assert (await crib.call(session, "echo", {"text": "again"})).status_code == 200
        (told,) = (await crib.client.get(f"/v1/sessions/{session}")).json()["sandboxes"]
        assert (told["start"], told["reason"]) == ("cold", "the one before it ended")


async def test_fifty_sessions_at_once_share_no_sandbox(tmp_path: Path) -> None:
    wide = {"max_sessions_per_tenant": 64}
    async with running(settings(tmp_path, pool={"enabled": True, "min": 6, "max": 6}, session=wide)) as crib:
        await until_ready(crib, 6)
        made = await asyncio.gather(*(create(crib) for _ in range(50)))
        ids = [one["sandboxes"][0]["sandbox_id"] for one in made]
        assert len(set(ids)) == 50
        assert sum(one["sandboxes"][0]["start"] == "warm" for one in made) >= 6
        counts = await asyncio.gather(*(crib.call(one["id"], "count") for one in made))
        assert {answer.json()["content"][0]["text"] for answer in counts} == {"count 1"}


async def test_spares_are_no_orphans_and_go_with_the_server(tmp_path: Path) -> None:
    async with running(settings(tmp_path, pool={"enabled": True, "min": 2, "max": 2})) as crib:
        await until_ready(crib, 2)
        assert await crib.server.registry.reconcile() == 0
        assert crib.server.registry.pool.ready() == 2
        await create(crib)
    assert crib.runtime.sandboxes == {}
    assert crib.runtime.workspaces == {}
    assert crib.server.registry.holdings.sandboxes == crib.server.registry.holdings.workspaces == set()


async def test_a_session_that_cannot_be_written_down_leaves_nothing_of_its_spare(
    tmp_path: Path, monkeypatch: Any
) -> None:
    async with running(settings(tmp_path, pool={"enabled": True, "min": 1, "max": 1})) as crib:
        await until_ready(crib, 1)
        (spare,) = crib.server.registry.pool.spares()

        async def refuse(_job: Any) -> None:
            raise StoreUnavailable("the disk is full")

        with monkeypatch.context() as patched:
            patched.setattr(crib.server.database, "write", refuse)
            answer = await crib.client.post("/v1/sessions", json={"images": ["workspace"]})
        assert answer.status_code == 503
        assert spare.spec.sandbox_id not in crib.runtime.sandboxes
        assert spare.spec.workspace_id not in crib.runtime.workspaces
