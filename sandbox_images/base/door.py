"""The way out of an asyncio worker: a forwarder process that makes the session's door an ordinary proxy on loopback."""

from __future__ import annotations

import asyncio
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path
from typing import Any

from sandbox_images.base.mcp_stdio import INVALID_PARAMS, ProtocolError, refused

PROXY = "http://127.0.0.1:3128"
READY_TIMEOUT_S = 15.0
_FORWARDER = Path(__file__).with_name("forwarder.py")
_DOOR = re.compile(r"[0-9a-f]{32}")


class Door:
    """Owns at most one forwarder. Call `close` at the end."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._process: Process | None = None

    @staticmethod
    def named(params: dict[str, Any]) -> str | None:
        """The door that a message names; None: there is none any more. Raises ProtocolError."""
        door = params.get("door")
        if door is None:
            return None
        if not isinstance(door, str) or not _DOOR.fullmatch(door):
            raise ProtocolError(INVALID_PARAMS, "door must be 32 hex digits")
        return door

    async def open(self, door: str | None) -> None:
        """Returns once the proxy behind `door` has answered. Raises ProtocolError of kind `egress_unready`."""
        async with self._lock:
            await self._end()
            if door is None:
                return
            command = (sys.executable, "-I", "-S", str(_FORWARDER), door)
            self._process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE)
            try:
                async with asyncio.timeout(READY_TIMEOUT_S):
                    assert self._process.stdout is not None
                    said = await self._process.stdout.readline()
                    problem = "" if said.strip() == b"ready" else await self._complaint()
            except TimeoutError:
                said, problem = b"", f"the egress proxy did not answer within {READY_TIMEOUT_S:.0f} s"
            if said.strip() != b"ready":
                await self._end()
                raise refused("egress_unready", problem or "the egress proxy can't be reached")

    async def close(self) -> None:
        async with self._lock:
            await self._end()

    async def _complaint(self) -> str:
        assert self._process is not None
        assert self._process.stderr is not None
        return (await self._process.stderr.read(2_000)).decode("utf-8", "replace").strip()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()
