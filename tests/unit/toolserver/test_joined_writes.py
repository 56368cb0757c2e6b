from __future__ import annotations

import asyncio
from typing import Any, cast

from toolserver.api.joined_writes import JoinedWrites


class Recorded:
    def __init__(self) -> None:
        self.done: list[Any] = []

    def write(self, data: bytes) -> None:
        self.done.append(data)

    def close(self) -> None:
        self.done.append("close")

    def abort(self) -> None:
        self.done.append("abort")

    def get_extra_info(self, name: str) -> str:
        return name


def joined() -> tuple[JoinedWrites, list[Any]]:
    recorded = Recorded()
    return JoinedWrites(cast(asyncio.Transport, recorded), asyncio.get_running_loop()), recorded.done


async def test_two_writes_of_one_turn_leave_together() -> None:
    transport, done = joined()
    transport.write(b"head")
    transport.write(b"body")
    assert done == [b"headbody"]
    await asyncio.sleep(0)
    assert done == [b"headbody"]


async def test_a_write_alone_leaves_in_the_next_turn_and_in_order() -> None:
    transport, done = joined()
    transport.write(b"head")
    assert done == []
    await asyncio.sleep(0)
    transport.write(b"event")
    await asyncio.sleep(0)
    assert done == [b"head", b"event"]


async def test_closing_sends_what_waits_and_aborting_drops_it() -> None:
    transport, done = joined()
    transport.write(b"goodbye")
    transport.close()
    transport.write(b"late")
    transport.abort()
    await asyncio.sleep(0)
    assert done == [b"goodbye", "close", "abort"]
    assert transport.get_extra_info("peername") == "peername"
