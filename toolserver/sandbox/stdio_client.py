"""An MCP client over the byte stream of a sandbox: requests by id, each with a deadline, and a clear end.

    RpcError        the other side answered with a JSON-RPC error
    SandboxGone     the stream ended, or can't be trusted any more, before the answer came
    TimeoutError    no answer within the request's deadline; a late answer is dropped

What a sandbox writes is foreign text: lines that are no message are skipped and counted, and too many of them end it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import Callable
from typing import Any

from toolserver.errors import SandboxGone
from toolserver.runtime.base import Sandbox, SandboxEnd
from toolserver.sandbox.background import Background
from toolserver.sandbox.framing import LineBuffer, Oversized

METHOD_NOT_FOUND, INVALID_PARAMS, RESPONSE_TOO_LARGE = -32601, -32602, -32099
_SEND_S = 15.0
_FIRST_IDS = 10**14
_MAX_GARBAGE_LINES, _MAX_GARBAGE_BYTES = 10_000, 64 << 20
_MAX_REPLIES = 32  # open answers to requests of the sandbox
_MAX_GIVEN_UP = 4096  # answers that nobody waits for any more and that are no garbage when they come
_ID_IN_HEAD = re.compile(rb'"id"\s*:\s*(\d{1,15})\s*[,}]')
_log = logging.getLogger(__name__)


class RpcError(Exception):
    """`kind` is the extension's `data.kind`, where there is one."""

    def __init__(self, code: int, message: str, kind: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.kind = code, message, kind


def encode(message: dict[str, Any]) -> bytes:
    text = json.dumps({"jsonrpc": "2.0", **message}, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "replace") + b"\n"


class StdioClient:
    """Owns the sandbox: `close` must be called once. Any number of requests at a time."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.garbage_lines = 0
        self.meta: dict[str, Any] = {}  # put into the `_meta` of every request (the era without `initialize` wants it)
        self._garbage_bytes = 0
        self.progressed: dict[str, Callable[[dict[str, Any]], None]] = {}  # by progress token: who is told
        self.noticed: Callable[[str, dict[str, Any]], None] | None = None  # is told of every other notification
        self.ended = asyncio.Event()  # set once it is not alive any more
        self._open: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._given_up: dict[int, None] = {}  # requests whose answer may still come, oldest first
        self._last_id = secrets.randbelow(
            _FIRST_IDS
        )  # an answer to an earlier client of the same sandbox is for nobody
        self._gone: str | None = None
        self.cut = False  # true: the stream was lost, and what is behind it may go on
        self.last_sent = time.monotonic()
        self._sending = asyncio.Lock()
        self._replies = Background()
        self._reader = asyncio.get_running_loop().create_task(self._read(), name=f"read {sandbox.spec.sandbox_id}")

    @property
    def alive(self) -> bool:
        return self._gone is None

    async def request(
        self, method: str, params: dict[str, Any], timeout_s: float, numbered: Callable[[int], None] | None = None
    ) -> dict[str, Any]:
        """The result. `numbered` is told the id before it is sent. Raises RpcError, SandboxGone, TimeoutError."""
        if self._gone is not None:
            raise SandboxGone(self._gone)
        self._last_id += 1
        number = self._last_id
        if numbered is not None:
            numbered(number)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._open[number] = answer
        if self.meta:
            params = {**params, "_meta": {**self.meta, **params.get("_meta", {})}}
        try:
            await self._send({"id": number, "method": method, "params": params})
            async with asyncio.timeout(timeout_s):
                return await answer
        finally:
            del self._open[number]
            if answer.done() and not answer.cancelled():
                answer.exception()  # looked at, also when sending failed first
            else:
                self._give_up(number)

    def _give_up(self, number: int) -> None:
        self._given_up[number] = None
        if len(self._given_up) > _MAX_GIVEN_UP:
            del self._given_up[next(iter(self._given_up))]

    async def notify(self, method: str, params: dict[str, Any]) -> None:
        """Raises SandboxGone."""
        await self._send({"method": method, "params": params})

    async def end_line(self) -> None:
        """End the line that an earlier client may have been cut off in. Raises SandboxGone."""
        async with self._sending, asyncio.timeout(_SEND_S):
            await self.sandbox.send(b"\n")

    async def close(self) -> SandboxEnd:
        """Remove the sandbox; how it ended. All open requests get SandboxGone."""
        end = await self.sandbox.remove()
        await self._stop(f"the sandbox ended ({end.cause})")
        return end

    async def release(self) -> None:
        """Let go of the sandbox and leave it running. All open requests get SandboxGone. `close` may still follow."""
        await self.sandbox.release()
        await self._stop("its stream was let go")

    async def _stop(self, reason: str) -> None:
        self._lose(reason)
        self._reader.cancel()
        await asyncio.wait([self._reader])
        await self._replies.close()

    async def _send(self, message: dict[str, Any]) -> None:
        line = encode(message)
        if self._gone is not None:
            raise SandboxGone(self._gone)
        async with self._sending:
            whole = False
            try:
                async with asyncio.timeout(_SEND_S):
                    await self.sandbox.send(line)
                whole, self.last_sent = True, time.monotonic()
            except TimeoutError as problem:
                raise SandboxGone("the sandbox does not read its input") from problem
            finally:
                if not whole:  # half a line may be out: nothing after it could be understood
                    self._lose("a message could not be written whole", cut=True)

    async def _read(self) -> None:
        lines = LineBuffer()
        reason, cut = "the sandbox's output ended", True
        try:
            while data := await self.sandbox.receive():
                for line in lines.feed(data):
                    self._take(line)
                if self.garbage_lines > _MAX_GARBAGE_LINES or self._garbage_bytes > _MAX_GARBAGE_BYTES:
                    reason, cut = "the sandbox wrote too much that is no message", False
                    break
        except SandboxGone as problem:
            reason = str(problem)
        finally:
            self._lose(reason, cut=cut)

    def _take(self, line: bytes | Oversized) -> None:
        if isinstance(line, Oversized):
            self._too_large(line)
            return
        if not line.strip():
            return
        try:
            message = json.loads(line, parse_constant=_no_number)
        except (ValueError, RecursionError):
            self._garbage(len(line))
            return
        if not isinstance(message, dict) or message.get("jsonrpc") != "2.0":
            self._garbage(len(line))
        elif "method" in message:
            if "id" in message:
                self._asked(message)
            elif message["method"] == "notifications/progress":
                self._progress(message.get("params"))
            elif self.noticed is not None and isinstance(message["method"], str):
                params = message.get("params")
                self.noticed(message["method"], params if isinstance(params, dict) else {})
        else:
            self._answered(message, len(line))

    def _answered(self, message: dict[str, Any], size: int) -> None:
        number = message.get("id")
        answer = self._open.get(number) if type(number) is int else None
        if answer is None or answer.done():
            if type(number) is not int or self._given_up.pop(number, self) is self:
                self._garbage(size)  # never asked for, or answered before
        elif isinstance(error := message.get("error"), dict):
            data = error.get("data")
            kind = data.get("kind") if isinstance(data, dict) else None
            code = error.get("code")
            text = str(error.get("message", ""))[:2000]
            answer.set_exception(
                RpcError(code if isinstance(code, int) else 0, text, kind if isinstance(kind, str) else None)
            )
        elif isinstance(result := message.get("result"), dict):
            answer.set_result(result)
        else:
            self._garbage(size)

    def _progress(self, params: Any) -> None:
        token = params.get("progressToken") if isinstance(params, dict) else None
        tell = self.progressed.get(token) if isinstance(token, str) else None
        if tell is not None:
            tell(params)

    def _too_large(self, line: Oversized) -> None:
        self._garbage(len(line.head))
        found = _ID_IN_HEAD.search(line.head)
        answer = self._open.get(int(found[1])) if found is not None and b'"method"' not in line.head else None
        if answer is not None and not answer.done():
            answer.set_exception(RpcError(RESPONSE_TOO_LARGE, "the answer was longer than a message may be"))

    def _garbage(self, size: int) -> None:
        self.garbage_lines += 1
        self._garbage_bytes += size

    def _asked(self, message: dict[str, Any]) -> None:
        """Requests of the sandbox (sampling, roots, elicitation) are refused; only `ping` is answered."""
        if len(self._replies) >= _MAX_REPLIES:
            self._garbage(0)
            return
        reply: dict[str, Any] = {"id": message["id"]}
        if message["method"] == "ping":
            reply["result"] = {}
        else:
            reply["error"] = {
                "code": METHOD_NOT_FOUND,
                "message": "This client offers no methods: it only calls tools.",
            }
        self._replies.spawn(self._reply(reply), "reply to a sandbox")

    async def _reply(self, message: dict[str, Any]) -> None:
        try:
            await self._send(message)
        except SandboxGone:
            _log.debug("reply_unheard")

    def _lose(self, reason: str, *, cut: bool = False) -> None:
        if self._gone is None:
            self._gone, self.cut = reason, cut
            self.ended.set()
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(SandboxGone(self._gone))


def _no_number(_constant: str) -> None:
    """NaN and the infinities are no JSON: what a tool writes as such is null."""
