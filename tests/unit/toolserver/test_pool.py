"""The warm pool over the fake runtime: how large it is, whom it serves, what it does when something fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.unit.toolserver.crib import FOREIGN_TOOLS, TOOLS, WEB_TOOLS, image, new_runtime, settings
from toolserver.egress.policy import EgressPolicy
from toolserver.errors import RuntimeUnavailable
from toolserver.runtime.base import Limits
from toolserver.runtime.fake_runtime import FakeRuntime
from toolserver.runtime.fake_server import FakeToolServer
from toolserver.sandbox.eras import Eras
from toolserver.sandbox.tool_sandbox import Term
from toolserver.sessions.claim import Claim, Wanted, claim
from toolserver.sessions.holdings import Holdings
from toolserver.sessions.pool import CHECK_S, FALL_S, PATIENCE_S, RISE_S, Pool
from toolserver.sessions.spare import SpareMaker
from toolserver.sessions.starting import Starts
from toolserver.settings import PoolSettings

LIMITS = Limits(1024, 1.0, 256, 1024)
IMAGES = {
    one.name: one
    for one in (
        image("workspace", TOOLS, workspace="rw", start="eager"),
        image("web", WEB_TOOLS, egress=EgressPolicy("open")),
        image("foreign", FOREIGN_TOOLS, workspace="rw"),
        image("reader", FOREIGN_TOOLS, workspace="ro"),
    )
}


@dataclass
class Bench:
    pool: Pool
    runtime: FakeRuntime
    holdings: Holdings
    state: dict[str, Any] = field(default_factory=lambda: {"now": 0.0, "hot": False, "may_start": True})

    def later(self, seconds: float) -> None:
        self.state["now"] += seconds

    async def claim(self, name: str = "workspace", limits: Limits = LIMITS, **over: Any) -> Claim:
        wanted = {"image": name, "limits": limits, "way_out": None, "env": {}, **over}
        return await claim(self.pool, self.runtime, Wanted(**wanted), Term())

    def left(self) -> tuple[int, int, int, int]:
        held = self.holdings
        return len(self.runtime.sandboxes), len(self.runtime.workspaces), len(held.sandboxes), len(held.workspaces)


Make = Callable[..., Bench]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[Bench] = []

    def _make(**sizes: Any) -> Bench:
        runtime, holdings = new_runtime(settings(tmp_path)), Holdings()
        maker = SpareMaker(
            runtime,
            IMAGES,
            lambda _image: LIMITS,
            starts=Starts(4),
            holdings=holdings,
            start_timeout_s=5.0,
            eras=Eras(),
        )
        state = {"now": 0.0, "hot": False, "may_start": True}
        pool = Pool(
            PoolSettings(**sizes),
            maker,
            ["workspace"],
            may_start=lambda: bool(state["may_start"]),
            hot=lambda: bool(state["hot"]),
            clock=lambda: float(state["now"]),
        )
        made.append(Bench(pool, runtime, holdings, state))
        return made[-1]

    yield _make
    for bench in made:
        await bench.pool.close(5)
        assert bench.pool.ready() == 0
        claimed = [spare for spare in bench.runtime.sandboxes.values() if spare.spec.env == {"claimed": "1"}]
        assert not claimed


async def test_an_idle_pool_holds_the_least_number_of_the_eager_image_alone(make: Make) -> None:
    bench = make(min=2, max=5)
    await bench.pool.tend()
    assert [spare.image for spare in bench.pool.spares()] == ["workspace", "workspace"]
    assert bench.pool.ready() == bench.pool.wanted() == 2


async def test_a_claim_binds_environment_and_limits_and_reads_them_back(make: Make) -> None:
    bench = make()
    await bench.pool.tend()
    other = Limits(2048, 0.5, 64, 1024)
    found = await bench.claim(limits=other, env={"TOKEN": "t"})
    assert found.spare is not None
    assert found.spare.limits == other
    server = bench.runtime.sandboxes[found.spare.spec.sandbox_id].server
    assert isinstance(server, FakeToolServer)
    assert server.bound is not None
    assert server.bound["env"]["TOKEN"] == "t"
    assert server.bound["env"]["OMP_NUM_THREADS"] == "1"
    assert server.bound["limits"] == {"memory_mb": 2048, "disk_mb": 1024, "cpus": 0.5}
    bench.pool.end(found.spare)


@pytest.mark.parametrize(
    ("over", "reason"),
    [
        ({"name": "web"}, "its image has no workspace of its own"),
        ({"name": "reader"}, "its image has no workspace of its own"),
        ({"limits": Limits(1024, 1.0, 256, 512)}, "its limits of disk or /tmp can't be changed later"),
        ({"limits": Limits(128, 1.0, 256, 1024)}, "its limits of disk or /tmp can't be changed later"),
    ],
    ids=["image", "workspace", "disk", "tmp"],
)
async def test_what_cannot_be_bound_late_starts_cold_and_says_why(
    make: Make, over: dict[str, Any], reason: str
) -> None:
    bench = make()
    await bench.pool.tend()
    assert await bench.claim(**over) == Claim(None, reason)
    assert bench.pool.ready() == 1


async def test_a_switched_off_pool_starts_nothing_and_says_so(make: Make) -> None:
    bench = make(enabled=False)
    await asyncio.wait_for(bench.pool.run(), 5)
    assert await bench.claim() == Claim(None, "the pool is off")
    assert bench.left() == (0, 0, 0, 0)


async def test_an_image_without_the_extension_is_tried_once_and_not_kept(make: Make) -> None:
    bench = make(min=0)
    assert (await bench.claim("foreign")).reason == "none was ready"
    await bench.pool.tend()
    await asyncio.sleep(0.05)
    assert (await bench.claim("foreign")).reason == "its image can't be bound to a session after its start"
    await bench.pool.tend()
    assert bench.left() == (0, 0, 0, 0)


async def test_size_follows_claims_and_falls_when_they_stop(make: Make) -> None:
    bench = make(min=1, max=4)
    for _ in range(3):
        await bench.claim()
    await bench.pool.tend()
    assert bench.pool.ready() == 4
    for _ in range(6):
        await bench.claim()
    await bench.pool.tend()
    assert bench.pool.ready() == bench.pool.settings.max
    bench.later(RISE_S + 1)
    await bench.pool.tend()
    assert bench.pool.ready() == 4, "it does not shrink as soon as it would no more grow"
    bench.later(FALL_S)
    await bench.pool.tend()
    assert bench.pool.ready() == 1


async def test_memory_bounds_it(make: Make) -> None:
    bench = make(min=4, max=8, memory_mb=16)
    await bench.pool.tend()
    assert bench.pool.ready() == 0, "one may use more than the bound until it is known better"
    roomy = make(min=8, max=8, memory_mb=100)
    await roomy.pool.tend()
    used = sum(spare.memory_mb for spare in roomy.pool.spares())
    assert roomy.pool.ready() > 0
    assert used <= 100


async def test_a_refill_waits_for_starts_of_sessions_and_for_hot_calls_but_not_for_ever(make: Make) -> None:
    bench = make()
    bench.state["may_start"] = False
    await bench.pool.tend()
    assert bench.pool.ready() == 0
    bench.state.update(may_start=True, hot=True)
    await bench.pool.tend()
    assert bench.pool.ready() == 0
    bench.later(PATIENCE_S)
    await bench.pool.tend()
    assert bench.pool.ready() == 1


async def test_failures_put_it_off_longer_each_time_and_leave_nothing(make: Make) -> None:
    bench = make()
    bench.runtime.unavailable = "the engine is away"
    tried: list[int] = []
    for second in range(20):
        await bench.pool.tend()
        if bench.pool.failures > len(tried):
            tried.append(second)
        bench.later(1)
    assert tried == [0, 1, 3, 7, 15]
    bench.runtime.unavailable = None
    assert bench.left() == (0, 0, 0, 0)
    bench.later(60)
    await bench.pool.tend()
    assert bench.pool.ready() == 1


async def test_one_that_died_is_not_given_out_and_is_replaced(make: Make) -> None:
    bench = make(min=2)
    await bench.pool.tend()
    dead = bench.pool.spares()[0]
    await bench.runtime.sandboxes[dead.spec.sandbox_id].kill()
    await asyncio.sleep(0.05)
    found = await bench.claim()
    assert found.spare is not None
    assert found.spare is not dead
    await bench.pool.tend()
    await asyncio.sleep(0.05)
    assert dead.spec.sandbox_id not in bench.runtime.sandboxes
    assert dead.spec.workspace_id not in bench.runtime.workspaces
    bench.pool.end(found.spare)


async def test_one_that_hangs_is_found_by_the_check_and_replaced(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolserver.sandbox.tool_sandbox._SHORT_S", 0.1)
    bench = make()
    await bench.pool.tend()
    hung = bench.pool.spares()[0]
    server = bench.runtime.sandboxes[hung.spec.sandbox_id].server
    assert isinstance(server, FakeToolServer)
    monkeypatch.setattr(server, "answer", _never)
    bench.later(CHECK_S)
    await bench.pool.check()
    assert bench.pool.ready() == 0
    await bench.pool.tend()
    assert [spare is hung for spare in bench.pool.spares()] == [False]


async def _never(*_: Any, **__: Any) -> None:
    await asyncio.Event().wait()


async def test_no_spare_is_given_out_twice_under_many_claims_at_once(make: Make) -> None:
    bench = make(min=8, max=8)
    await bench.pool.tend()
    found = await asyncio.gather(*(bench.claim() for _ in range(50)))
    spares = [one.spare for one in found if one.spare is not None]
    assert len(spares) == len({id(spare) for spare in spares}) == 8
    assert {one.reason for one in found if one.spare is None} == {"none was ready"}
    for spare in spares:
        bench.pool.end(spare)


async def test_limits_that_the_runtime_cannot_change_leave_the_spare_in_the_pool(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    await bench.pool.tend()

    async def refuse(*_: Any) -> Limits:
        raise RuntimeUnavailable("not here")

    monkeypatch.setattr(bench.runtime, "resize", refuse)
    found = await bench.claim(limits=Limits(1024, 0.5, 256, 1024))
    assert found == Claim(None, "its limits can't be changed later: not here")
    assert bench.pool.ready() == 1
    assert (await bench.claim()).spare is not None


async def test_closing_waits_for_a_start_under_way_and_leaves_nothing(make: Make) -> None:
    bench = make()
    bench.runtime.start_delay_s = 0.2
    tending = asyncio.create_task(bench.pool.tend())
    await asyncio.sleep(0.05)
    assert bench.pool.starting is not None
    tending.cancel()
    await asyncio.wait([tending])
    await bench.pool.close(5)
    assert bench.left() == (0, 0, 0, 0)
