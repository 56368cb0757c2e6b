"""Doors in the test's own process, before a network that is made up: what is dialled is seen, and nothing leaves the process."""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sandbox_images.egress.authority import Authority
from sandbox_images.egress.conversation import Conversation
from sandbox_images.egress.door import Connection, Door, Grant
from sandbox_images.egress.vetting import Outside, Streams, Vetting

PUBLIC = "93.184.216.34"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Network(Outside):
    """`names`: their addresses. `serve` is behind every address; `received` holds what each connection sent it, where it says so."""

    def __init__(self, names: Mapping[str, list[str]], serve: Serve) -> None:
        self.names, self.serve = dict(names), serve
        self.dialled: list[tuple[str, int]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def resolve(self, name: str, port: int) -> list[str]:  # noqa: ARG002
        if name not in self.names:
            raise OSError("no such name")
        return self.names[name]

    async def connect(self, address: str, port: int, tls: ssl.SSLContext | None, name: str | None) -> Streams:  # noqa: ARG002
        self.dialled.append((address, port))
        ours, theirs = socket.socketpair()
        task = asyncio.create_task(self._serve(theirs))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.open_connection(sock=ours)

    async def _serve(self, theirs: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=theirs)
        try:
            await self.serve(reader, writer)
        except OSError:
            pass
        finally:
            writer.close()

    async def done(self) -> None:
        """Every connection was served to its end."""
        while self._tasks:
            await asyncio.wait(set(self._tasks), timeout=10)


class OpenDoor:
    def __init__(self, door: Door, faults: list[dict[str, Any]], notices: list[tuple[str, dict[str, Any]]]) -> None:
        self.door, self.faults, self.notices = door, faults, notices

    def denials(self) -> list[str]:
        return [told["rule"] for method, told in self.notices if method == "egress/denied"]

    async def say(self, *pieces: bytes) -> bytes:
        """All that comes back on a connection of its own, whose client has said all it will when these are sent."""
        reader, writer = await asyncio.open_unix_connection(str(self.door.path))
        try:
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0)
            writer.write_eof()
            return await asyncio.wait_for(reader.read(), 60)
        except OSError:
            return b""
        finally:
            writer.close()


@asynccontextmanager
async def open_door(folder: Path, network: Outside, grant: Grant) -> AsyncIterator[OpenDoor]:
    """`faults` of what it yields: exceptions that nobody caught, which would be faults of the proxy."""
    vetting, authority = Vetting(network), Authority()
    notices: list[tuple[str, dict[str, Any]]] = []
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: faults.append(told))

    async def serve(connection: Connection) -> None:
        await Conversation(connection, vetting, lambda: authority, ssl.create_default_context).hold()

    door = Door(secrets.token_hex(16), folder, grant, lambda method, told: notices.append((method, told)), serve)
    door.make_folder()
    await door.open()
    try:
        yield OpenDoor(door, faults, notices)
    finally:
        await door.close()
