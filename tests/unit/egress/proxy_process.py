"""A real egress proxy as a process, its control channel, and clients of its doors."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "sandbox_images" / "egress" / "proxy.py"


class Proxy:
    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self.process, self.folder = process, folder
        self.notices: list[dict[str, Any]] = []
        self._number = 0

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        assert self.process.stdin
        assert self.process.stdout
        self._number += 1
        self.process.stdin.write(
            json.dumps({"jsonrpc": "2.0", "id": self._number, "method": method, "params": params}).encode() + b"\n"
        )
        while True:
            message = json.loads(await asyncio.wait_for(self.process.stdout.readline(), 60))
            if message.get("id") == self._number:
                return dict(message)
            self.notices.append(message)

    async def open(self, policy: dict[str, Any], **more: Any) -> Path:
        name = secrets.token_hex(16)
        answer = await self.ask("egress/open", door=name, policy=policy, **more)
        assert "result" in answer, answer
        return self.folder / name

    async def denials(self) -> list[dict[str, Any]]:
        await self.ask("ping")
        return [notice["params"] for notice in self.notices if notice["method"] == "egress/denied"]


@asynccontextmanager
async def running_proxy(folder: Path, **configuration: Any) -> AsyncIterator[Proxy]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", str(PROGRAM), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    proxy = Proxy(process, folder)
    try:
        answer = await proxy.ask("egress/configure", folder=str(folder), **configuration)
        assert answer.get("result") == {}, answer
        yield proxy
    finally:
        if process.returncode is None:
            assert process.stdin
            process.stdin.close()
            try:
                await asyncio.wait_for(process.wait(), 10)
            except TimeoutError:
                process.kill()
                await process.wait()
        process._transport.close()  # type: ignore[attr-defined] # else it warns when collected


async def ask(door: Path, request: bytes) -> bytes:
    """All that a door answers to `request` on a connection of its own."""
    reader, writer = await asyncio.open_unix_connection(str(door))
    try:
        writer.write(request)
        return await asyncio.wait_for(reader.read(), 60)
    finally:
        writer.close()


def get(url: str, host: str | None = None) -> bytes:
    host = url.split("/")[2] if host is None else host
    return f"GET {url} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()


def connect(authority: str) -> bytes:
    return f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n".encode()
