"""An egress proxy that carries nothing: it keeps the doors it is told of, and tells what a test has it tell."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from toolserver.runtime.fake_pipe import FakePipe
from toolserver.runtime.fake_server import Died


class FakeEgress:
    """`doors`: policies by name, as JSON. `deaf`: refuses every door."""

    def __init__(self) -> None:
        self.doors: dict[str, dict[str, Any]] = {}
        self.folders: dict[str, str | None] = {}
        self.configuration: dict[str, Any] = {}
        self.deaf = False
        self._stdout: FakePipe | None = None
        self._dead = asyncio.Event()

    async def serve(self, stdin: FakePipe, stdout: FakePipe) -> None:
        self._stdout = stdout
        dying = asyncio.create_task(self._dead.wait())
        reading = asyncio.create_task(self._read(stdin))
        try:
            await asyncio.wait([dying, reading], return_when=asyncio.FIRST_COMPLETED)
            if self._dead.is_set():
                raise Died("killed")
        finally:
            for task in (dying, reading):
                task.cancel()
            await asyncio.gather(dying, reading, return_exceptions=True)

    def die(self) -> None:
        self._dead.set()

    async def deny(self, door: str, host: str, port: int, rule: str = "not_allowed") -> None:
        told = {"door": door, "host": host, "port": port, "rule": rule, "reason": f"{host} is not allowed."}
        await self._write({"method": "egress/denied", "params": told})

    async def use(self, door: str, host: str, port: int, *, up: int, down: int) -> None:
        told = {"door": door, "host": host, "port": port, "up": up, "down": down, "ms": 1, "status": 200}
        await self._write({"method": "egress/used", "params": told})

    async def _read(self, stdin: FakePipe) -> None:
        rest = b""
        while data := await stdin.read():
            *lines, rest = (rest + data).split(b"\n")
            for line in filter(None, lines):
                await self._answer(json.loads(line))

    async def _answer(self, asked: dict[str, Any]) -> None:
        params = asked["params"]
        answer: dict[str, Any] = {"id": asked["id"], "result": {}}
        match asked["method"]:
            case "egress/configure":
                self.configuration = params
            case "egress/open" if self.deaf:
                answer = {"id": asked["id"], "error": {"code": -32000, "message": "no", "data": {"kind": "no_door"}}}
            case "egress/open":
                self.doors[params["door"]] = params["policy"]
                self.folders[params["door"]] = params.get("folder")
            case "egress/close":
                self.doors.pop(params["door"], None)
        await self._write(answer)

    async def _write(self, message: dict[str, Any]) -> None:
        if self._stdout is not None:
            await self._stdout.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
