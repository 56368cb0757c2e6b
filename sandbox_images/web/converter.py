"""Keeps the converting process: started when first needed, one job at a time, killed when a job is given up."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any

from sandbox_images.base.outcome import failed
from sandbox_images.web.fetch import Page

CONVERT_TIMEOUT_S = 60.0
_SCRIPT = Path(__file__).with_name("convert.py")


class Converter:
    """Owns at most one process. Call `close` at the end."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._process: Process | None = None

    async def convert(self, page: Page, style: str) -> dict[str, Any]:
        """What `convert.py` answers for the page. Raises Ended `failed` when the page can't be converted in time and memory."""
        async with self._lock:
            try:
                async with asyncio.timeout(CONVERT_TIMEOUT_S):
                    answer = await self._ask(page, style)
            except TimeoutError as problem:
                raise failed(
                    f"{page.url} took longer than {CONVERT_TIMEOUT_S:.0f} s to convert. Try format raw."
                ) from problem
            except (asyncio.IncompleteReadError, ConnectionError) as problem:
                await self.close()
                raise failed(f"{page.url} is too large or too complex to be converted. Try format raw.") from problem
        if "error" in answer:
            raise failed(f"{page.url} could not be read: {answer['error']}.")
        return answer

    async def close(self) -> None:
        """Ends the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _ask(self, page: Page, style: str) -> dict[str, Any]:
        whole = False
        try:
            process = await self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            job = {
                "bytes": len(page.body),
                "content_type": page.content_type,
                "charset": page.charset,
                "url": page.url,
                "format": style,
            }
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.write(page.body)
            await process.stdin.drain()
            length = int(await process.stdout.readuntil(b"\n"))
            answer: dict[str, Any] = json.loads(await process.stdout.readexactly(length))
            whole = not answer.get("fatal")
            return answer
        finally:
            if not whole:  # also when cancelled: its answer would be taken for the next job's
                await asyncio.shield(self.close())

    async def _running(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            flags = ["-I", "-S"] if sys.flags.no_site else ["-I"]
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, *flags, str(_SCRIPT), stdin=PIPE, stdout=PIPE
            )
        return self._process
