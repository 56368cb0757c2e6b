"""A call as it runs: its output, progress, log and outcome as events, for any number of followers.

Nothing is kept here for those who are slow. Each follower pulls a chunk at a time from the sandbox, which keeps the last
of a call's output: one that falls behind further than that, or comes back late, is told what it missed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Literal

from toolserver.calls.answer import Answer, encode_body
from toolserver.calls.questions import as_asked
from toolserver.calls.running import Asked, RunningCall
from toolserver.sandbox.call_place import CallPlace, OutputPart

CHUNK_BYTES = 64 << 10
QUIET_S = 10.0  # after so long without an event a follower is told that there is none
Name = Literal["started", "stdout", "stderr", "lost", "progress", "log", "input_required", "outcome"]


@dataclass(frozen=True)
class Event:
    """`data` is JSON. `offset`, of output: the byte of both streams together where a follower who has this one goes on."""

    name: Name
    data: bytes
    offset: int | None = None

    @classmethod
    def of(cls, name: Name, data: dict[str, Any], offset: int | None = None) -> Event:
        return cls(name, encode_body(data), offset)


def started(call: RunningCall) -> Event:
    told = {"call_id": call.call_id, "session_id": call.session.session_id, "tool": call.tool.name}
    return Event.of("started", {**told, "trace_id": call.trace_id})


def outcome(answer: Answer) -> Event:
    """The last event: the status and the body that the call has without events."""
    return Event("outcome", b'{"status":%d,"body":%b}' % (answer.status, answer.body))


async def follow(call: RunningCall, offset: int, until: float) -> AsyncIterator[Event | None]:
    """What the call says from byte `offset` of its output on, up to its end or to `until` (the loop's time).

    None: nothing new for QUIET_S. The caller adds the outcome.
    """
    followed: CallPlace | None = None
    shown: dict[str, Any] | None = None
    asked: Asked | None = None
    heard = 0
    while True:
        news: set[asyncio.Future[Any]] = {call.answer, call.news.changed}
        if call.placed.done() and call.placed.result() is not followed:
            followed = call.placed.result()
            async for event in output(followed, call.call_id, offset, until):
                if event is not None and event.offset is not None:
                    offset = event.offset
                yield event
        elif call.news.logged > heard:
            unheard, heard = call.news.log_after(heard), call.news.logged
            for told in unheard:
                yield Event.of("log", told)
        elif call.answer.done() or (left_s := _left_s(until)) <= 0:
            return
        elif call.news.progress is not shown:
            shown = call.news.progress
            yield Event.of("progress", shown or {})
        elif call.asked is not None and call.asked is not asked:
            asked = call.asked
            yield Event.of("input_required", as_asked(call, asked))
        elif not (await asyncio.wait(news, timeout=left_s, return_when=asyncio.FIRST_COMPLETED))[0]:
            yield None


async def output(sandbox: CallPlace, call_id: str, offset: int, until: float) -> AsyncIterator[Event | None]:
    """The output that the sandbox still has of the call, from byte `offset` on, up to its end; none if it can't tell."""
    while (left_s := _left_s(until)) > 0:
        part = await sandbox.output(call_id, offset, left_s, CHUNK_BYTES)
        if part is None:
            return
        for event in _events(part, offset):
            yield event
        offset = part.next
        if not part.chunks:
            if part.ended:
                return
            yield None


def _events(part: OutputPart, offset: int) -> list[Event]:
    events = [Event.of("lost", {"bytes": part.lost}, offset + part.lost)] if part.lost else []
    last = len(part.chunks) - 1
    for place, (stream, text, end) in enumerate(part.chunks):
        name: Name = "stdout" if stream == "stdout" else "stderr"
        events.append(Event.of(name, {"text": text}, part.next if place == last else end))
    return events


def _left_s(until: float) -> float:
    return min(QUIET_S, until - asyncio.get_running_loop().time())
