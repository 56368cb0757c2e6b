"""One command in a sandbox of its own: its input given, its output drained without limit and kept within one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Literal

from sandbox_images.base.byte_text import readable
from sandbox_images.base.live_output import LiveOutput
from sandbox_images.workspace.output import Stream
from toolserver.errors import RuntimeUnavailable, SandboxGone
from toolserver.runtime.base import CommandSandbox
from toolserver.sandbox.call_place import OutputPart
from toolserver.telemetry.logs import HIDDEN, forms_of

STDOUT, STDERR = 0, 1
_PIECE = 1 << 16
Stop = Literal["deadline", "cancelled"]


class Redaction:
    """Takes secrets out of a stream of bytes, also where one is cut between two pieces."""

    def __init__(self, secrets: Collection[str]) -> None:
        self._secrets = sorted((one.encode() for one in forms_of(secrets)), key=len, reverse=True)
        self._longest = len(self._secrets[0]) if self._secrets else 1
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """What can be passed on now."""
        if not self._secrets:
            return data
        data = self._without(self._held + data)
        # only what may be the beginning of a secret waits
        start = next(
            (
                at
                for at in range(max(0, len(data) - self._longest + 1), len(data))
                if any(secret.startswith(data[at:]) for secret in self._secrets)
            ),
            len(data),
        )
        self._held = data[start:]
        return data[:start]

    def rest(self) -> bytes:
        """At the end of the stream."""
        held, self._held = self._held, b""
        return held

    def _without(self, data: bytes) -> bytes:
        for secret in self._secrets:
            data = data.replace(secret, HIDDEN.encode())
        return data


class CommandRun:
    """`whole` gets all of stdout as it comes. Serves followers as any place of a call does."""

    def __init__(
        self,
        sandbox: CommandSandbox,
        call_id: str,
        *,
        max_bytes: int,
        secrets: Collection[str] = (),
        whole: Callable[[bytes], Awaitable[None]],
    ) -> None:
        self.stdout, self.stderr = Stream(max_bytes), Stream(max_bytes)
        self.stopped: Stop | None = None
        self._sandbox, self._call_id, self._whole = sandbox, call_id, whole
        self._redactions = (Redaction(secrets), Redaction(secrets))
        self._live = LiveOutput()
        self._ended = False
        self._news = asyncio.Event()

    async def finish(self, stdin: bytes, deadline_s: float) -> None:
        """Until its output has ended, or it was stopped. Raises RuntimeUnavailable when it could not be stopped."""
        feeding = asyncio.create_task(self._feed(stdin))
        try:
            async with asyncio.timeout(deadline_s):
                await self._drain()
        except TimeoutError:
            await self._stop("deadline")
        finally:
            feeding.cancel()
            await asyncio.wait([feeding])
            self._ended = True
            self._live.flush()
            self._news.set()

    async def _feed(self, stdin: bytes) -> None:
        with contextlib.suppress(SandboxGone):  # it ended, or closed its input, before it read all
            for start in range(0, len(stdin), _PIECE):
                await self._sandbox.send(stdin[start : start + _PIECE])
            await self._sandbox.end_input()

    async def _drain(self) -> None:
        while True:
            data, to_stderr = await self._sandbox.receive_both()
            if not data:
                break
            stream = STDERR if to_stderr else STDOUT
            await self._take(stream, self._redactions[stream].feed(data))
        for stream in (STDOUT, STDERR):
            await self._take(stream, self._redactions[stream].rest())

    async def _take(self, stream: int, data: bytes) -> None:
        if not data:
            return
        (self.stderr if stream == STDERR else self.stdout).feed(data)
        if self._live.feed(stream, data):
            self._news.set()
        if stream == STDOUT:
            await self._whole(data)

    async def _stop(self, why: Stop) -> None:
        if self.stopped is None and not self._ended:
            self.stopped = why
            await self._sandbox.kill()

    # -- for those who follow it

    async def cancel(self, call_id: str, reason: str) -> bool:
        """A command is not asked: it is killed with all that it started."""
        del reason
        if call_id != self._call_id:
            return False
        try:
            await self._stop("cancelled")
        except RuntimeUnavailable as away:
            raise SandboxGone(str(away)) from away
        return True

    async def peek(self, call_id: str) -> list[dict[str, Any]]:
        if call_id != self._call_id:
            return []
        texts = [shown(stream, stream.limit)[0] for stream in (self.stdout, self.stderr)]
        return [{"type": "text", "text": text} for text in texts if text]

    async def output(self, call_id: str, offset: int, wait_s: float, max_bytes: int) -> OutputPart | None:
        if call_id != self._call_id:
            return None
        if offset >= self._live.end and not self._ended:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._news.wait()
        chunks, following, lost = self._live.read(offset, max_bytes)
        listed = [(chunk["stream"], chunk["text"], chunk["end"]) for chunk in chunks]
        return OutputPart(listed, following, lost, ended=self._ended and following >= self._live.end)


def shown(stream: Stream, room: int) -> tuple[str, int]:
    """What it wrote within `room` bytes, head and tail around a marker, and how many bytes of it that is."""
    head, left_out, tail = stream.cut(room)
    text = readable(head)[0]
    if left_out:
        text = f"{text}\n[… {left_out} bytes left out …]\n{readable(tail)[0]}"
    return text, len(head) + len(tail)
