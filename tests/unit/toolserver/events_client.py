"""Event streams over a real socket: a client that reads them, and a server for it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from tests.unit.toolserver.crib import KEY, Crib
from toolserver.api.protocol import protocol_class

EVENTS = {"Accept": "text/event-stream"}


@dataclass(frozen=True)
class Heard:
    name: str
    data: Any
    id: str | None


@asynccontextmanager
async def serving(crib: Crib) -> AsyncIterator[httpx.AsyncClient]:
    """A client that speaks to the crib over loopback, since the in-process transport gives answers only when they are whole."""
    config = uvicorn.Config(
        crib.server.asgi, http=protocol_class(10, 64), ws="none", lifespan="off", log_config=None, access_log=False
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32768)  # so that a slow reader is felt soon
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{listener.getsockname()[1]}",
            headers={"Authorization": f"Bearer {KEY}"},
            timeout=20,
            trust_env=False,
        ) as client:
            task = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                yield client
            finally:
                server.should_exit = True
                await task


async def heard(answer: httpx.Response) -> AsyncIterator[Heard]:
    """The events as they come; comments are events named `:`."""
    assert answer.headers["content-type"].startswith("text/event-stream"), await answer.aread()
    name, data, mark = "message", "", None
    async for line in answer.aiter_lines():
        if line.startswith(":"):
            yield Heard(":", None, None)
        elif line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            data = line[6:]
        elif line.startswith("id: "):
            mark = line[4:]
        elif not line and data:
            yield Heard(name, json.loads(data), mark)
            name, data, mark = "message", "", None


def parsed(text: str) -> list[Heard]:
    """The events of a whole stream."""
    events = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            events.append(Heard(fields["event"], json.loads(fields["data"]), fields.get("id")))
    return events
