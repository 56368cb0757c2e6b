"""A sandbox as the rest of the server sees it: opened for use, called, cancelled, peeked into, ended.

Images that announce the extension `toolcrib/worker` (docs/reference/sandbox-protocol.md) enforce deadlines themselves and
tell what happened; any other MCP server works too, with the deadline kept from here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from toolserver.errors import RuntimeUnavailable, SandboxGone
from toolserver.runtime.base import Limits, Sandbox, SandboxEnd
from toolserver.sandbox.call_place import OutputPart
from toolserver.sandbox.stdio_client import RpcError, StdioClient

WORKER_EXTENSION, WORKER_VERSION = "toolcrib/worker", 2
PROTOCOL_VERSION = "2025-11-25"
STATELESS_VERSION = "2026-07-28"  # the era without `initialize`
_CLIENT = {"name": "toolcrib-toolserver", "version": "1"}
_MAX_PAGES = 100
_SHORT_S = 5.0  # for what a worker answers at once


@dataclass(frozen=True)
class Recalled:
    """`forgotten`: it was received, and how it ended is not known any more. `never`: it was not, and will not be."""

    state: Literal["running", "ended", "forgotten", "never"]
    result: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Term:
    """Under which a server uses a sandbox: its epoch, and for how long the sandbox waits to hear from it again."""

    epoch: int = 0
    lease_s: float = 900.0


class ToolSandbox:
    """`has_worker`: it speaks the extension. `end`: how it ended, once it was closed. `close` or `release` must be called."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.client = StdioClient(sandbox)
        self.has_worker = False
        self.era = PROTOCOL_VERSION
        self.end: SandboxEnd | None = None
        self._term = Term()
        self._foreign_calls: dict[str, int] = {}  # call id to request id, without the extension

    @property
    def sandbox_id(self) -> str:
        return self.client.sandbox.spec.sandbox_id

    def protocol(self) -> str:
        """What it speaks, as JSON, for `attach`."""
        return json.dumps({"worker": self.has_worker, "era": self.era})

    async def attach(self, protocol: str, term: Term, timeout_s: float) -> bool:
        """Take over one that an earlier server, or an earlier stream, left; whether it had been given to a session.

        What was sent before and has not arrived is refused from here on. Raises SandboxGone, TimeoutError, RpcError.
        """
        told = json.loads(protocol)
        self.has_worker = told["worker"]
        self._set_era(told["era"])
        await self.client.end_line()
        if not self.has_worker:
            await self.list_tools(timeout_s)
            return True
        asked = {"epoch": term.epoch, "lease_s": term.lease_s}
        answer = await self.client.request("toolcrib/attach", asked, timeout_s)
        self._term = term
        return answer.get("bound") is True

    async def recall(self, call_id: str, wait_s: float) -> Recalled:
        """What the worker knows of a call, waiting for its end up to `wait_s`. Raises RpcError, SandboxGone, TimeoutError."""
        told = await self.client.request("toolcrib/recall", {"call_id": call_id, "wait_s": wait_s}, wait_s + _SHORT_S)
        result = told.get("result")
        if told.get("state") == "ended" and isinstance(result, dict):
            return Recalled("ended", result)
        if told.get("state") == "running":
            return Recalled("running")
        return Recalled("forgotten" if told.get("seen") is not False else "never")

    async def renew(self) -> None:
        """Tell a worker that its server lives, when it has heard nothing for a third of its lease. Never raises."""
        if self.has_worker and time.monotonic() - self.client.last_sent >= self._term.lease_s / 3:
            with contextlib.suppress(RpcError, SandboxGone, TimeoutError):
                await self.client.request("ping", {}, _SHORT_S)

    @property
    def alive(self) -> bool:
        return self.client.alive

    async def open(self, expected_tools: frozenset[str], timeout_s: float) -> None:
        """Up to its list of tools, still nobody's. Raises RuntimeUnavailable: it ended, hung, refused, or lacks a tool of the catalog."""
        with self._being_made_ready(timeout_s):
            async with asyncio.timeout(timeout_s):
                await self._introduce(timeout_s)
                offered = {str(tool.get("name")) for tool in await self.list_tools(timeout_s)}
        if missing := sorted(expected_tools - offered):
            raise RuntimeUnavailable(
                f"The image {self._image} lacks tools of the catalog: {', '.join(missing)}. Build it anew: toolserver images build."
            )

    async def bind(self, env: Mapping[str, str], limits: Limits, term: Term, timeout_s: float) -> None:
        """Give it to a session, before its first call. Without the extension there is nothing to do. Raises RuntimeUnavailable."""
        if not self.has_worker:
            return
        bound = {"memory_mb": limits.memory_mb, "disk_mb": limits.disk_mb, "cpus": limits.cpus}
        with self._being_made_ready(timeout_s):
            asked = {"env": dict(env), "limits": bound, "epoch": term.epoch, "lease_s": term.lease_s}
            await self.client.request("toolcrib/bind", asked, timeout_s)
        self._term = term

    @property
    def _image(self) -> str:
        return self.client.sandbox.spec.image

    @contextlib.contextmanager
    def _being_made_ready(self, timeout_s: float) -> Iterator[None]:
        try:
            yield
        except SandboxGone as problem:
            raise RuntimeUnavailable(
                f"The sandbox of the image {self._image} ended before it was ready: {problem}."
            ) from problem
        except TimeoutError as problem:
            raise RuntimeUnavailable(
                f"The sandbox of the image {self._image} was not ready within {timeout_s:g} s."
            ) from problem
        except RpcError as problem:
            raise RuntimeUnavailable(
                f"The tool server in the image {self._image} refused to start: {problem.message}."
            ) from problem

    async def _introduce(self, timeout_s: float) -> None:
        hello = {"protocolVersion": PROTOCOL_VERSION, "capabilities": {}, "clientInfo": _CLIENT}
        try:
            welcome = await self.client.request("initialize", hello, timeout_s)
        except RpcError:
            # the first message decides the era: one that refuses `initialize` may know only the later one
            self._set_era(STATELESS_VERSION)
            welcome = await self.client.request("server/discover", {}, timeout_s)
        else:
            await self.client.notify("notifications/initialized", {})
        capabilities = welcome.get("capabilities")
        experimental = capabilities.get("experimental") if isinstance(capabilities, dict) else None
        worker = experimental.get(WORKER_EXTENSION) if isinstance(experimental, dict) else None
        self.has_worker = isinstance(worker, dict) and worker.get("version") == WORKER_VERSION

    def _set_era(self, era: str) -> None:
        self.era = era
        if era == STATELESS_VERSION:
            prefix = "io.modelcontextprotocol/"
            self.client.meta = {
                f"{prefix}protocolVersion": STATELESS_VERSION,
                f"{prefix}clientInfo": _CLIENT,
                f"{prefix}clientCapabilities": {},
            }

    async def list_tools(self, timeout_s: float) -> list[dict[str, Any]]:
        """All pages. Raises as StdioClient.request."""
        tools: list[dict[str, Any]] = []
        cursor: str | None = None
        for _ in range(_MAX_PAGES):
            page = await self.client.request("tools/list", {"cursor": cursor} if cursor else {}, timeout_s)
            listed = page.get("tools")
            tools += [tool for tool in listed if isinstance(tool, dict)] if isinstance(listed, list) else []
            following = page.get("nextCursor")
            if not isinstance(following, str) or not following:
                return tools
            cursor = following
        raise RpcError(0, f"the tool list has more than {_MAX_PAGES} pages")

    async def call(
        self,
        tool: str,
        arguments: dict[str, Any],
        *,
        call_id: str,
        deadline_s: float,
        max_text_bytes: int,
        grace_s: float,
        traceparent: str | None = None,
        on_progress: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        """The MCP result. Raises RpcError, SandboxGone, and TimeoutError when it did not end by deadline_s + grace_s.

        `on_progress` gets the params of each progress notification, of images without the extension.
        """
        meta: dict[str, Any] = {} if traceparent is None else {"traceparent": traceparent}
        params: dict[str, Any] = {"name": tool, "arguments": arguments, "_meta": meta}
        if self.has_worker:
            bounds = {"deadline_s": deadline_s, "max_text_bytes": max_text_bytes}
            meta["toolcrib/call"] = {"call_id": call_id, "epoch": self._term.epoch, **bounds}
            return await self.client.request("tools/call", params, deadline_s + grace_s)
        numbers = self._foreign_calls
        if on_progress is not None:
            meta["progressToken"] = call_id
            self.client.progressed[call_id] = on_progress

        def numbered(number: int) -> None:
            numbers[call_id] = number

        work = asyncio.ensure_future(self.client.request("tools/call", params, deadline_s + grace_s, numbered))
        try:
            done, _ = await asyncio.wait([work], timeout=deadline_s)
            if not done:
                await self.cancel(call_id, "the call outlived its deadline")
                await asyncio.wait([work], timeout=grace_s)
                raise TimeoutError
            return work.result()
        finally:
            numbers.pop(call_id, None)
            self.client.progressed.pop(call_id, None)
            work.cancel()
            await asyncio.wait([work])

    async def cancel(self, call_id: str, reason: str) -> bool:
        """Ask for the end of a call; whether it was known. Its answer still comes by `call`. Raises SandboxGone."""
        if self.has_worker:
            try:
                found = await self.client.request("toolcrib/cancel", {"call_id": call_id}, _SHORT_S)
            except (RpcError, TimeoutError):
                return False
            return found.get("found") is True
        number = self._foreign_calls.get(call_id)
        if number is None:
            return False
        await self.client.notify("notifications/cancelled", {"requestId": number, "reason": reason})
        return True

    async def peek(self, call_id: str) -> list[dict[str, Any]]:
        """The call's output so far; none when it can't be told. Never raises."""
        if self.has_worker:
            with contextlib.suppress(RpcError, SandboxGone, TimeoutError):
                seen = (await self.client.request("toolcrib/peek", {"call_id": call_id}, _SHORT_S)).get("content")
                if isinstance(seen, list):
                    return [block for block in seen if isinstance(block, dict)]
        return []

    async def output(self, call_id: str, offset: int, wait_s: float, max_bytes: int) -> OutputPart | None:
        """The call's output from byte `offset` on, as soon as there is some, or an empty part after `wait_s`.

        None when it can't be told: the sandbox is gone, keeps nothing of that call, or lacks the extension. Never raises.
        """
        if not self.has_worker:
            return None
        params = {"call_id": call_id, "offset": offset, "wait_s": wait_s, "max_bytes": max_bytes}
        try:
            told = await self.client.request("toolcrib/output", params, wait_s + _SHORT_S)
        except (RpcError, SandboxGone, TimeoutError):
            return None
        return _part(told, offset)

    async def answers(self) -> bool:
        """Whether it gives a sign of life. Never raises."""
        try:
            await self.client.request("ping", {}, _SHORT_S)
        except (SandboxGone, TimeoutError):
            return False
        except RpcError:
            pass  # a no is a sign of life, too
        return True

    async def memory_bytes(self) -> int | None:
        """What it uses now, where it can tell. Never raises."""
        if self.has_worker:
            with contextlib.suppress(RpcError, SandboxGone, TimeoutError):
                used = (await self.client.request("toolcrib/usage", {}, _SHORT_S)).get("memory_bytes")
                return used if type(used) is int else None
        return None

    async def close(self) -> SandboxEnd:
        """Remove it; how it ended. Safe to call again."""
        if self.end is None:
            self.end = await self.client.close()
        return self.end

    async def release(self) -> None:
        """Let go of it and leave it running."""
        await self.client.release()


def _part(told: dict[str, Any], offset: int) -> OutputPart | None:
    """None for what is no part of an output that goes on from `offset`."""
    following, lost, listed = told.get("next"), told.get("lost", 0), told.get("chunks")
    if type(following) is not int or type(lost) is not int or not isinstance(listed, list):
        return None
    if following < offset or lost < 0:
        return None
    chunks = [
        (chunk["stream"], chunk["text"], end if type(end := chunk.get("end")) is int else None)
        for chunk in listed
        if isinstance(chunk, dict)
        and chunk.get("stream") in ("stdout", "stderr")
        and isinstance(chunk.get("text"), str)
    ]
    if not chunks and following > offset + lost:
        return None  # it would be asked for again and again
    return OutputPart(chunks, following, lost, told.get("ended") is True)
