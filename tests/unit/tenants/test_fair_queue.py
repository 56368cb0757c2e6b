from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolserver.errors import Code, ToolServerError
from toolserver.tenants.fair_queue import FairQueue


@dataclass
class Room:
    """Some places, and a queue for them."""

    size: int
    max_waiting: int = 10_000
    used: int = 0
    now: float = 0.0
    order: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.queue = FairQueue("Full.", self.max_waiting, lambda: self.now)

    def admit(self, amount: int = 1) -> bool:
        if self.used + amount > self.size:
            return False
        self.used += amount
        return True

    def give(self, amount: int = 1) -> None:
        self.used -= amount
        assert self.used >= 0
        self.queue.serve()

    async def wait(self, name: str, wait_s: float = 30, amount: int = 1) -> None:
        await self.queue.wait(name[0], lambda: self.admit(amount), lambda: self.give(amount), wait_s)
        self.order.append(name)


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_one_of_each_tenant_in_turn_and_first_come_first_served_within_one() -> None:
    room = Room(0)
    tasks = [asyncio.create_task(room.wait(name)) for name in ("a1", "a2", "a3", "b1", "c1", "b2")]
    await settled()
    room.size = 1
    room.queue.serve()
    for _ in tasks:
        await settled()
        room.give()
    assert room.order == ["a1", "b1", "c1", "a2", "b2", "a3"]


async def test_a_thousand_waiting_requests_hold_up_another_tenant_by_one_turn() -> None:
    room = Room(0)
    many = [asyncio.create_task(room.wait(f"a{n}")) for n in range(1000)]
    await settled()
    one = asyncio.create_task(room.wait("b1"))
    await settled()
    room.size = 2
    room.queue.serve()
    await settled()
    assert set(room.order) == {"a0", "b1"}
    await one
    for task in many:
        task.cancel()
    await asyncio.gather(*many, return_exceptions=True)
    assert len(room.queue) == 0


async def test_the_refusal_says_where_one_stood_and_when_to_come_back() -> None:
    room = Room(0)
    waiting = [asyncio.create_task(room.wait(name)) for name in ("a1", "a2", "b1")]
    await settled()
    with pytest.raises(ToolServerError) as refused:
        await room.wait("b2", wait_s=0.01)
    assert refused.value.code is Code.NO_CAPACITY
    assert refused.value.extra == {"queue_position": 4, "queue_length": 4}
    with pytest.raises(ToolServerError) as refused:
        await room.wait("c1", wait_s=0)  # does not wait at all
    assert refused.value.extra == {"queue_position": 3, "queue_length": 4}
    room.size = 100
    for _ in range(2):
        room.now += 10
        await room.wait("d1")  # lets all others in, too
    room.size = 0
    with pytest.raises(ToolServerError) as refused:
        await room.wait("e1", wait_s=0)
    assert refused.value.retry_after_s is not None
    assert 1 <= refused.value.retry_after_s <= 10
    await asyncio.gather(*waiting)


async def test_a_tenants_line_is_bounded_and_not_another_ones() -> None:
    room = Room(0, max_waiting=2)
    waiting = [asyncio.create_task(room.wait(name)) for name in ("a1", "a2")]
    await settled()
    with pytest.raises(ToolServerError) as refused:
        await room.wait("a3")
    assert refused.value.extra == {"queue_position": 3, "queue_length": 3}
    other = asyncio.create_task(room.wait("b1"))
    await settled()
    assert not other.done()
    for task in (*waiting, other):
        task.cancel()
    await asyncio.gather(*waiting, other, return_exceptions=True)


async def test_a_large_one_gets_its_room_and_the_next_goes_on_when_it_leaves() -> None:
    room = Room(4)
    room.used = 3
    large = asyncio.create_task(room.wait("a1", amount=4))
    small = asyncio.create_task(room.wait("b1", amount=1))
    await settled()
    assert room.order == []  # what is free is kept for the one whose turn it is
    large.cancel()
    await settled()
    assert room.order == ["b1"]
    await small


async def test_one_who_hangs_up_leaves_the_queue() -> None:
    room = Room(0)
    left = asyncio.Event()

    async def gone() -> None:
        await left.wait()

    task = asyncio.create_task(room.queue.wait("a", room.admit, room.give, 30, gone))
    await settled()
    assert len(room.queue) == 1
    left.set()
    with pytest.raises(ToolServerError) as refused:
        await task
    assert (refused.value.code, refused.value.effects) == (Code.CANCELLED, "none")
    assert len(room.queue) == 0


async def test_all_are_refused_at_a_shutdown() -> None:
    room = Room(0)
    tasks = [asyncio.create_task(room.wait(name)) for name in ("a1", "b1")]
    await settled()
    room.queue.refuse_all(ToolServerError(Code.DRAINING, "The server is shutting down."))
    told = await asyncio.gather(*tasks, return_exceptions=True)
    assert {one.code for one in told if isinstance(one, ToolServerError)} == {Code.DRAINING}
    assert room.used == 0


STEP = st.one_of(
    st.tuples(st.just("enter"), st.sampled_from("abc"), st.integers(1, 3)),
    st.tuples(st.just("give"), st.integers(0, 50), st.none()),
    st.tuples(st.just("cancel"), st.integers(0, 50), st.booleans()),
)


@settings(max_examples=150, deadline=None)
@given(st.integers(3, 5), st.lists(STEP, max_size=60))
def test_nothing_is_lost_whatever_comes_goes_and_is_cancelled(
    size: int, steps: list[tuple[str, str | int, int | bool | None]]
) -> None:
    """After each step: what is used is what is held; nobody waits while the first in turn would fit; lines are in order."""

    async def run() -> None:
        room = Room(size)
        tasks: dict[int, tuple[str, int, asyncio.Task[None]]] = {}
        held: dict[int, int] = {}
        admitted: defaultdict[str, list[int]] = defaultdict(list)

        async def take(number: int, tenant: str, amount: int) -> None:
            def admit() -> bool:
                if not room.admit(amount):
                    return False
                admitted[tenant].append(number)  # here: an admitted one is woken some turns of the loop later
                return True

            if not room.queue.try_now(admit):
                await room.queue.wait(tenant, admit, lambda: room.give(amount), 30)
            held[number] = amount

        for number, (what, which, more) in enumerate(steps):
            if what == "enter":
                tenant, amount = str(which), int(more or 1)
                tasks[number] = (tenant, amount, asyncio.create_task(take(number, tenant, amount)))
            elif what == "give" and held:
                room.give(held.pop(sorted(held)[int(which) % len(held)]))
            elif what == "cancel" and (pending := [n for n in tasks if not tasks[n][2].done()]):
                if more and held:  # cancelled in the very moment in which it was let in
                    room.give(held.pop(min(held)))
                tasks[pending[int(which) % len(pending)]][2].cancel()
            if number % 3:
                await settled()
        await settled()
        assert room.used == sum(held.values())
        while held:
            room.give(held.pop(next(iter(held))))
            await settled()
            assert room.used == sum(held.values()) <= size
        assert len(room.queue) == 0
        for tenant, numbers in admitted.items():
            assert numbers == sorted(numbers), tenant
        told = await asyncio.gather(*(task for _, _, task in tasks.values()), return_exceptions=True)
        assert all(one is None or isinstance(one, asyncio.CancelledError) for one in told)

    asyncio.run(run())
