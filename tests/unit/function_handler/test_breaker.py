"""The breaker: opened by infrastructure alone, one probe, monotonic time, cancellation without a mark."""

from __future__ import annotations

import asyncio
import datetime as dt
import time
from pathlib import Path

import pybreaker
import pytest

from agent.events import EventKind
from agent.tools.breaker import Breaker, BreakerOpen, Breakers
from agent.tools.outcome import OutcomeKind
from tests.unit.function_handler.conftest import QUICK, Agent, until
from tests.unit.function_handler.fake_toolserver import FakeToolServer, done, refusal

POST = ("POST", "/tools/")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Trace:
    def __init__(self, **settings: float) -> None:
        self.clock, self.changes = Clock(), list[tuple[str, str, int]]()
        self.breaker = Breaker(
            "x",
            failures=3,
            reset_s=settings.get("reset_s", 10.0),
            on_change=lambda *change: self.changes.append(change),
            clock=self.clock,
        )

    def fail(self, times: int = 1) -> None:
        for _ in range(times):
            permit = self.breaker.admit()
            permit.failed()
            permit.release()

    def opened(self) -> Breaker:
        self.fail(3)
        return self.breaker


def test_it_opens_after_the_failures_in_a_row_and_says_when_to_come_back() -> None:
    trace = Trace()
    trace.fail(2)
    trace.breaker.admit().worked()
    trace.fail(3)
    with pytest.raises(BreakerOpen) as refused:
        trace.breaker.admit()
    assert refused.value.retry_in_s == 10
    assert trace.changes == [("x", "open", 3)]


def test_of_twenty_waiting_callers_one_is_the_probe() -> None:
    trace = Trace()
    breaker = trace.opened()
    trace.clock.now += 10
    permits, refused = [], []
    for _ in range(20):
        try:
            permits.append(breaker.admit())
        except BreakerOpen as problem:
            refused.append(problem.retry_in_s)
    assert (len(permits), len(refused)) == (1, 19)
    assert min(refused) > 0
    permits[0].worked()
    permits[0].release()
    assert breaker.state == "closed"
    assert [change[1] for change in trace.changes] == ["open", "half-open", "closed"]


def test_a_failed_probe_opens_at_once_and_for_longer_each_time_up_to_a_limit() -> None:
    trace = Trace()
    breaker = trace.opened()
    waits = []
    for _ in range(6):
        with pytest.raises(BreakerOpen) as refused:
            breaker.admit()
        waits.append(refused.value.retry_in_s)
        trace.clock.now += refused.value.retry_in_s
        trace.fail()
    assert waits == [10, 20, 40, 80, 80, 80]


def test_after_an_outage_is_over_the_next_starts_with_the_short_wait() -> None:
    trace = Trace()
    breaker = trace.opened()
    trace.clock.now += 10
    trace.fail()
    trace.clock.now += 20
    breaker.admit().worked()
    trace.fail(3)
    with pytest.raises(BreakerOpen) as refused:
        breaker.admit()
    assert refused.value.retry_in_s == 10


def test_a_probe_that_learned_nothing_leaves_its_place_to_the_next() -> None:
    trace = Trace()
    breaker = trace.opened()
    trace.clock.now += 10
    breaker.admit().release()
    assert breaker.state == "half-open"
    probe = breaker.admit()
    with pytest.raises(BreakerOpen):
        breaker.admit()
    probe.worked()
    assert breaker.state == "closed"


def test_a_late_answer_from_before_the_outage_changes_nothing() -> None:
    trace = Trace()
    early_good, early_bad = trace.breaker.admit(), trace.breaker.admit()
    breaker = trace.opened()
    early_good.worked()
    early_bad.failed()
    assert breaker.state == "open"
    trace.clock.now += 10
    probe = breaker.admit()
    early_good.worked()
    early_bad.failed()
    early_good.release()
    assert breaker.state == "half-open"
    assert breaker.still_admits(probe)
    assert not breaker.still_admits(early_good)


@pytest.mark.parametrize("hours", [1, -1])
def test_a_jump_of_the_wall_clock_neither_opens_nor_shuts_it(monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    trace = Trace()
    breaker = trace.opened()

    class Jumped(dt.datetime):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> Jumped:
            real = dt.datetime.fromtimestamp(time.time() + hours * 3600, tz)
            return cls.fromtimestamp(real.timestamp(), tz)

    monkeypatch.setattr(pybreaker, "datetime", Jumped)
    with pytest.raises(BreakerOpen):
        breaker.admit()
    trace.clock.now += 10
    breaker.admit().worked()
    assert breaker.state == "closed"


def test_one_tools_breaker_leaves_the_others_alone_and_the_servers_stops_all() -> None:
    breakers = Breakers(failures=1, reset_s=10, on_change=lambda *_: None, clock=Clock())
    breakers.admit("a").tool.failed()
    with pytest.raises(BreakerOpen, match="toolserver/a"):
        breakers.admit("a")
    assert (breakers.withheld("a"), breakers.withheld("b")) == (True, False)
    breakers.admit("b").server.failed()
    with pytest.raises(BreakerOpen, match="toolserver is"):
        breakers.admit("b")


def test_a_refused_tool_gives_the_servers_probe_back() -> None:
    clock = Clock()
    breakers = Breakers(failures=1, reset_s=10, on_change=lambda *_: None, clock=clock)
    first = breakers.admit("a")
    first.server.failed()
    clock.now += 5
    first.tool.failed()
    clock.now += 6  # the server may be probed, the tool not yet
    with pytest.raises(BreakerOpen, match="toolserver/a"):
        breakers.admit("a")
    breakers.admit("b").worked()
    assert breakers.server.state == "closed"


@pytest.fixture
def impatient() -> dict[str, object]:
    return {"settings": QUICK.model_copy(update={"breaker_failures": 3, "max_attempts": 2, "breaker_reset_s": 0.2})}


async def test_a_burst_of_503_opens_it_and_calls_then_fail_fast_without_a_request(
    server: FakeToolServer, tmp_path: Path, impatient: dict[str, object]
) -> None:
    agent = Agent(server, tmp_path, **impatient)  # type: ignore[arg-type]
    server.answer_with(*POST, *[refusal(503, "runtime_unavailable")] * 3)
    await agent.call(key="t1/a1/actor/s1/c0")
    assert (await agent.call(key="t1/a1/actor/s2/c0")).code in ("runtime_unavailable", "breaker_open")
    assert len(server.sent(*POST)) == 3, "the burst stops at the threshold"
    assert agent.of(EventKind.BREAKER_CHANGED) == [{"name": "toolserver/note", "state": "open", "failures": 3}]
    server.requests.clear()
    started = time.perf_counter()
    outcome = await agent.call(key="t1/a1/actor/s3/c0")
    assert time.perf_counter() - started < 0.05
    assert server.requests == []
    assert (outcome.kind, outcome.code, outcome.executed) == (OutcomeKind.UNAVAILABLE, "breaker_open", "none")
    assert "Try again in 1 s" in outcome.observation
    assert agent.allowance.reserved == 2, "a refused call costs nothing"
    assert [tool.name for tool in await agent.handler.catalog()] == ["peek", "put"]


async def test_an_outage_is_over_after_one_good_probe(
    server: FakeToolServer, tmp_path: Path, impatient: dict[str, object]
) -> None:
    agent = Agent(server, tmp_path, **impatient)  # type: ignore[arg-type]
    server.answer_with(*POST, *[refusal(503, "no_capacity")] * 3)
    for n in range(3):
        await agent.call(key=f"t1/a1/actor/s{n}/c0")
    await asyncio.sleep(0.25)

    async def slow(_session: str, _arguments: object) -> tuple[int, dict[str, object]]:
        await asyncio.sleep(0.1)
        return 200, done()

    server.behaviours["note"] = slow
    server.requests.clear()
    outcomes = await asyncio.gather(*(agent.call(key=f"t1/a1/actor/s{n}/c0") for n in range(10, 30)))
    assert sum(outcome.ok for outcome in outcomes) == 1
    assert sum(outcome.code == "breaker_open" for outcome in outcomes) == 19
    assert len(server.sent(*POST)) == 1
    assert (await agent.call(key="t1/a1/actor/s40/c0")).ok
    assert [data["state"] for data in agent.of(EventKind.BREAKER_CHANGED)] == ["open", "half-open", "closed"]
    assert [tool.name for tool in await agent.handler.catalog()] == ["note", "peek", "put"]


@pytest.mark.parametrize(
    "status_code",
    [
        (422, "invalid_arguments"),
        (404, "tool_not_found"),
        (450, "deadline_exceeded"),
        (500, "tool_failed"),
        (500, "cancelled"),
        (413, "too_large"),
    ],
)
async def test_storms_of_what_a_tool_or_a_caller_did_leave_it_closed(
    server: FakeToolServer, tmp_path: Path, impatient: dict[str, object], status_code: tuple[int, str]
) -> None:
    agent = Agent(server, tmp_path, **impatient)  # type: ignore[arg-type]
    server.answer_with(*POST, *[refusal(*status_code)] * 12)
    for n in range(12):
        await agent.call(key=f"t1/a1/actor/s{n}/c0")
    assert agent.of(EventKind.BREAKER_CHANGED) == []
    assert (await agent.call(key="t1/a1/actor/s99/c0")).ok


async def test_a_cancelled_call_leaves_no_mark(
    server: FakeToolServer, tmp_path: Path, impatient: dict[str, object]
) -> None:
    agent = Agent(server, tmp_path, **impatient)  # type: ignore[arg-type]
    for n in range(5):
        task = asyncio.create_task(agent.call(arguments={"seconds": 10}, key=f"t1/a1/actor/s{n}/c0"))
        await until(lambda: len(server.calls) == n + 1)  # noqa: B023 - awaited within the round
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert agent.of(EventKind.BREAKER_CHANGED) == []


async def test_a_server_that_is_down_costs_a_bounded_number_of_connections(
    server: FakeToolServer, tmp_path: Path, impatient: dict[str, object]
) -> None:
    agent = Agent(server, tmp_path, **impatient)  # type: ignore[arg-type]
    assert (await agent.call("peek")).ok
    await server.stop()
    outcomes = [await agent.call(key=f"t1/a1/actor/s{n}/c0") for n in range(10, 15)]
    assert [outcome.kind for outcome in outcomes] == [OutcomeKind.UNAVAILABLE] * 5
    assert outcomes[0].code == "connection_refused"
    assert outcomes[-1].code == "breaker_open"
    assert agent.of(EventKind.BREAKER_CHANGED)[0] == {"name": "toolserver", "state": "open", "failures": 3}
    assert [tool.name for tool in await agent.handler.catalog()] == ["note", "peek", "put"], "the list stays known"
