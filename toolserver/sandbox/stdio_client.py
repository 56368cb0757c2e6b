"""An MCP client over the byte stream of a sandbox: requests by id, each with a deadline, and a clear end.

    RpcError        the other side answered with a JSON-RPC error
    SandboxGone     the stream ended, or can't be trusted any more, before the answer came
    TimeoutError    no answer within the request's deadline; a late answer is dropped

What a sandbox writes is foreign text: lines that are no message are skipped and counted, and too many of them at a time end
it. Requests of the sandbox are answered by whoever is named in `answering`, and refused where nobody is.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from toolserver.errors import SandboxGone
from toolserver.runtime.base import Sandbox, SandboxEnd
from toolserver.sandbox.background import Background
from toolserver.sandbox.framing import LineBuffer, Oversized
from toolserver.telemetry.logs import HIDDEN, blotted, forms_of

METHOD_NOT_FOUND, INVALID_PARAMS, INTERNAL_ERROR, RESPONSE_TOO_LARGE = -32601, -32602, -32603, -32099
URL_ELICITATION = -32042  # of the version 2025-11-25
_SEND_S = 15.0
_FIRST_IDS = 10**14
_MAX_GARBAGE_LINES, _MAX_GARBAGE_BYTES = 10_000, 64 << 20
_FORGIVEN_S = 300.0  # in which so much of it is forgotten again
_SAMPLES, _SAMPLE_BYTES = 5, 200
_MAX_REPLIES = 32  # open answers to requests of the sandbox
_MAX_GIVEN_UP = 4096  # answers that nobody waits for any more and that are no garbage when they come
_ID_IN_HEAD = re.compile(rb'(?<!\\)"id"\s*:\s*(\d{1,15})\s*[,}]')
_ID_IN_TAIL = re.compile(rb'(?<!\\)"id"\s*:\s*(\d{1,15})\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*$')
_REFUSALS = {
    "sampling/createMessage": "This client has no model to sample from: tools here only work, they do not ask a model.",
    "roots/list": "This client has no roots: a tool's files are those of its own file system.",
}
Answering = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
_log = logging.getLogger(__name__)


class RpcError(Exception):
    """`kind` is the extension's `data.kind`, where there is one; `data` all of it."""

    def __init__(self, code: int, message: str, kind: str | None = None, data: Any = None) -> None:
        super().__init__(message)
        self.code, self.message, self.kind, self.data = code, message, kind, data


def encode(message: dict[str, Any]) -> bytes:
    text = json.dumps({"jsonrpc": "2.0", **message}, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "replace") + b"\n"


class StdioClient:
    """Owns the sandbox: `close` must be called once. Any number of requests at a time."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.garbage_lines = 0
        self.noise: list[bytes] = []  # the first of the lines that were no message, cut
        self._hidden: list[str] = []
        self.meta: dict[str, Any] = {}  # put into the `_meta` of every request (the era without `initialize` wants it)
        self._garbage_level = 0.0  # share of what is borne at a time
        self._garbage_at = time.monotonic()
        self.answering: dict[
            str, Answering
        ] = {}  # by method: requests of the sandbox. What RpcError says is the refusal
        self.noted: dict[str, Callable[[], None]] = {}  # by method: notifications, but for progress
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
        self._asked_by_id: dict[str | int, asyncio.Task[None]] = {}
        self._reader = asyncio.get_running_loop().create_task(self._read(), name=f"read {sandbox.spec.sandbox_id}")

    @property
    def alive(self) -> bool:
        return self._gone is None

    def hide(self, secrets: Iterable[str]) -> None:
        """From here on nothing that the sandbox says holds these values, in any of their usual forms."""
        self._hidden = forms_of(secrets)

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

    async def listen(self, method: str, params: dict[str, Any]) -> None:
        """Send a request whose answer is only the end of something. Raises SandboxGone."""
        self._last_id += 1
        self._give_up(self._last_id)
        await self._send({"id": self._last_id, "method": method, "params": {**params, "_meta": self.meta}})

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
                if self._garbage_level > 1 or lines.dropped > _MAX_GARBAGE_BYTES:
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
            self._garbage(line)
            return
        if self._hidden:
            try:
                message = blotted(self._hidden, message)
            except RecursionError:
                self._garbage(line)
                return
        for part in message if isinstance(message, list) else (message,):  # a version of the protocol has batches
            self._take_message(part, line)

    def _take_message(self, message: Any, line: bytes) -> None:
        if not isinstance(message, dict) or message.get("jsonrpc") != "2.0":
            self._garbage(line)
        elif "method" not in message:
            self._answered(message, line)
        elif not isinstance(method := message["method"], str):
            self._garbage(line)
        elif "id" in message:
            self._asked(message)
        elif method == "notifications/progress":
            self._progress(message.get("params"))
        elif method == "notifications/cancelled":
            self._withdrawn(message.get("params"))
        elif (note := self.noted.get(method)) is not None:
            note()
        elif self.noticed is not None:
            params = message.get("params")
            self.noticed(method, params if isinstance(params, dict) else {})

    def _answered(self, message: dict[str, Any], line: bytes) -> None:
        number = message.get("id")
        answer = self._open.get(number) if type(number) is int else None
        if answer is None or answer.done():
            if type(number) is not int or self._given_up.pop(number, self) is self:
                self._garbage(line)  # never asked for, or answered before
        elif isinstance(error := message.get("error"), dict):
            data = error.get("data")
            kind = data.get("kind") if isinstance(data, dict) else None
            code = error.get("code")
            text = str(error.get("message", ""))[:2000]
            answer.set_exception(
                RpcError(code if isinstance(code, int) else 0, text, kind if isinstance(kind, str) else None, data)
            )
        elif isinstance(result := message.get("result"), dict):
            answer.set_result(result)
        else:  # it was meant as the answer, and another will not come
            self._garbage(line)
            answer.set_exception(RpcError(0, "the answer has neither a result that is an object nor an error"))

    def _progress(self, params: Any) -> None:
        token = params.get("progressToken") if isinstance(params, dict) else None
        tell = self.progressed.get(token) if isinstance(token, str) else None
        if tell is not None:
            tell(params)

    def _too_large(self, line: Oversized) -> None:
        self._garbage(line.head)
        if b'"method"' in line.head:
            return
        found = _ID_IN_HEAD.search(line.head) or _ID_IN_TAIL.search(line.tail)
        if found is not None:
            answer = self._open.get(int(found[1]))
        else:  # hidden in the midst of it: only where one is open it is clear which
            answer = next(iter(self._open.values())) if len(self._open) == 1 else None
        if answer is not None and not answer.done():
            answer.set_exception(RpcError(RESPONSE_TOO_LARGE, "the answer was longer than a message may be"))

    def _garbage(self, line: bytes) -> None:
        self.garbage_lines += 1
        if len(self.noise) < _SAMPLES:
            self.noise.append(self._without_hidden(line)[:_SAMPLE_BYTES])
        now = time.monotonic()
        borne = self._garbage_level - (now - self._garbage_at) / _FORGIVEN_S
        share = max(1 / _MAX_GARBAGE_LINES, len(line) / _MAX_GARBAGE_BYTES)
        self._garbage_level, self._garbage_at = max(0.0, borne) + share, now

    def _without_hidden(self, line: bytes) -> bytes:
        for form in self._hidden:
            line = line.replace(form.encode(), HIDDEN.encode())
        return line

    def _asked(self, message: dict[str, Any]) -> None:
        number = message["id"]
        if len(self._replies) >= _MAX_REPLIES or not isinstance(number, str | int) or number in self._asked_by_id:
            self._garbage(b"(a request too many)")
            return
        task = self._replies.spawn(self._reply(number, message), "reply to a sandbox")
        self._asked_by_id[number] = task
        task.add_done_callback(lambda _task: self._asked_by_id.pop(number, None))

    def _withdrawn(self, params: Any) -> None:
        number = params.get("requestId") if isinstance(params, dict) else None
        task = self._asked_by_id.get(number) if isinstance(number, str | int) else None
        if task is not None:
            task.cancel()

    async def _reply(self, number: str | int, message: dict[str, Any]) -> None:
        reply: dict[str, Any] = {"id": number}
        try:
            reply["result"] = await self._answer(message["method"], message.get("params"))
        except RpcError as no:
            reply["error"] = {"code": no.code, "message": no.message}
        try:
            await self._send(reply)
        except SandboxGone:
            _log.debug("reply_unheard")

    async def _answer(self, method: str, params: Any) -> dict[str, Any]:
        """Raises RpcError: the refusal."""
        if method == "ping":
            return {}
        answering = self.answering.get(method)
        if answering is None:
            usual = "This client offers no such method: it calls tools, and answers what they ask their user."
            raise RpcError(METHOD_NOT_FOUND, _REFUSALS.get(method, usual))
        return await answering(params if isinstance(params, dict) else {})

    def _lose(self, reason: str, *, cut: bool = False) -> None:
        if self._gone is None:
            self._gone, self.cut = reason, cut
            self.ended.set()
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(SandboxGone(self._gone))


def _no_number(_constant: str) -> None:
    """NaN and the infinities are no JSON: what a tool writes as such is null."""
