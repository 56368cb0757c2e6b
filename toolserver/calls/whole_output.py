"""The whole output of a command that writes more than an answer holds, as a file of the workspace."""

from __future__ import annotations

import contextlib
from typing import Any

from toolserver.errors import RuntimeUnavailable, SandboxGone, ToolServerError
from toolserver.sandbox import worker_files
from toolserver.sandbox.stdio_client import RpcError
from toolserver.sandbox.worker_files import Handle
from toolserver.sessions import files
from toolserver.sessions.session import Session

FOLDER = ".toolcrib/output"
MAX_BYTES = 256 << 20
_PROBLEMS = (ToolServerError, RuntimeUnavailable, RpcError, SandboxGone, TimeoutError)


class WholeOutput:
    """Begun once more than `limit` bytes have come. A full disk or a lost sandbox costs the file alone, never the call."""

    def __init__(self, session: Session, call_id: str, limit: int, *, kept: bool) -> None:
        """`kept`: whether there is to be a file at all."""
        self._session, self._path, self._limit = session, f"{FOLDER}/{call_id}.txt", limit
        self._early: bytearray | None = bytearray() if kept else None
        self._handle: Handle | None = None
        self._bytes = 0

    async def feed(self, data: bytes) -> None:
        """Never raises."""
        self._bytes += len(data)
        try:
            if self._handle is not None:
                if self._bytes > MAX_BYTES:
                    await self.give_up()
                    return
                await self._handle.write(data)
            elif self._early is not None:
                self._early += data
                if len(self._early) > self._limit:
                    early, self._early = bytes(self._early), None
                    client = await files.client_of(self._session)
                    self._handle = await worker_files.open_file(client, self._path, "w")
                    await self._handle.write(early)
        except _PROBLEMS:
            await self.give_up()

    async def close(self) -> dict[str, Any] | None:
        """The file as an outcome's artifact; None when there is none. Never raises."""
        if self._handle is None:
            return None
        try:
            await self._handle.arrived()
            handle, self._handle = self._handle, None
            await handle.close(commit=True)
        except _PROBLEMS:
            await self.give_up()
            return None
        return {"path": self._path, "bytes": self._bytes, "media_type": "text/plain"}

    async def give_up(self) -> None:
        """Nothing of it stays, unless it was closed. Never raises."""
        self._early = None
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(*_PROBLEMS):
                await handle.close()
