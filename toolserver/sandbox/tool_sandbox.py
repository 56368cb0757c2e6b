"""A sandbox as the rest of the server sees it: opened for use, called, cancelled, peeked into, ended.

Images that announce the extension `toolcrib/worker` (docs/reference/sandbox-protocol.md) enforce deadlines themselves and
tell what happened; any other MCP server of either era works too, with the deadline kept from here.
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
from toolserver.sandbox import handshake
from toolserver.sandbox.background import Background
from toolserver.sandbox.call_place import OutputPart
from toolserver.sandbox.eras import LATEST_LEGACY, is_modern
from toolserver.sandbox.foreign_calls import ForeignCalls
from toolserver.sandbox.questions import ELICIT, Ask
from toolserver.sandbox.stdio_client import RpcError, StdioClient

WORKER_EXTENSION, WORKER_VERSION = "toolcrib/worker", 2
_MAX_PAGES, _MAX_TOOLS = 100, 5_000
_LIST_S = 30.0  # for a list of tools that is asked for again
_LIST_PAUSE_S = 1.0  # between two of them
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
    """`has_worker`: it speaks the extension. `era`: the version of MCP that was agreed on. `listed`: its entries of `tools/list`.

    `on_tools` is told of a list that came after the first, because the server said that it changed. `end`: how it ended, once it
    was closed. `close` or `release` must be called.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self.client = StdioClient(sandbox)
        self.has_worker = False
        self.era = LATEST_LEGACY
        self.listed: list[dict[str, Any]] = []
        self.on_tools: Callable[[list[dict[str, Any]]], None] | None = None
        self.end: SandboxEnd | None = None
        self.runaway = False  # a call was given up in it that may still run
        self._term = Term()
        self._foreign = ForeignCalls(self.client)
        self._background = Background()
        self._relisting: asyncio.Task[None] | None = None
        self._changed_again = False
        self.client.answering[ELICIT] = self._foreign.elicited
        self.client.noticed = self._foreign.noticed
        self.client.noted["notifications/tools/list_changed"] = self._tools_changed

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
        self.era = told["era"]
        self.client.meta = handshake.meta() if is_modern(self.era) else {}
        await self.client.end_line()
        if not self.has_worker:
            self.listed = await self.list_tools(timeout_s)
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

    async def open(self, expected_tools: frozenset[str], timeout_s: float, hint: str | None = LATEST_LEGACY) -> None:
        """Up to its list of tools, still nobody's. `hint`: the version of MCP to begin with, None: nothing is known.

        Raises RuntimeUnavailable: it ended, hung, refused, or lacks a tool of the catalog; StartOver: a fresh one may do better.
        """
        with self._being_made_ready(timeout_s):
            async with asyncio.timeout(timeout_s * 2):  # where both eras have to be tried
                welcome = await handshake.greet(self.client, hint, timeout_s)
                self._welcomed(welcome)
                self.listed = await self.list_tools(timeout_s)
                tools = welcome.capabilities.get("tools")
                if self.client.meta and isinstance(tools, dict) and tools.get("listChanged") is True:
                    await self.client.listen("subscriptions/listen", {"notifications": {"toolsListChanged": True}})
        if missing := sorted(expected_tools - {str(tool.get("name")) for tool in self.listed}):
            lacks = f"The image {self._image} lacks tools of the catalog: {', '.join(missing)}."
            foreign = self.client.sandbox.spec.foreign
            raise RuntimeUnavailable(
                f"{lacks} See what it offers now: toolserver tools check {self._image}."
                if foreign
                else f"{lacks} Build it anew: toolserver images build."
            )

    async def bind(
        self, env: Mapping[str, str], limits: Limits, term: Term, timeout_s: float, door: str | None = None
    ) -> None:
        """Give it to a session, before its first call. Without the extension there is nothing to do. Raises RuntimeUnavailable.

        `door`: its way out, which has answered when this returns.
        """
        if not self.has_worker:
            return
        bound = {"memory_mb": limits.memory_mb, "disk_mb": limits.disk_mb, "cpus": limits.cpus}
        with self._being_made_ready(timeout_s):
            asked = {"env": dict(env), "limits": bound, "epoch": term.epoch, "lease_s": term.lease_s}
            if door is not None:
                asked["egress"] = {"door": door}
            await self.client.request("toolcrib/bind", asked, timeout_s)
        self._term = term

    async def tell_door(self, door: str | None, timeout_s: float) -> None:
        """The way out of what runs in it from now on, which has answered when this returns; None: there is none.

        Without the extension there is nothing to do. Raises RuntimeUnavailable.
        """
        if self.has_worker:
            with self._being_made_ready(timeout_s):
                await self.client.request("toolcrib/egress", {"door": door}, timeout_s)

    @property
    def _image(self) -> str:
        return self.client.sandbox.spec.image

    @contextlib.contextmanager
    def _being_made_ready(self, timeout_s: float) -> Iterator[None]:
        try:
            yield
        except (SandboxGone, TimeoutError, RpcError, handshake.Refused) as problem:
            raise unready(self._image, problem, timeout_s) from problem

    def _welcomed(self, welcome: handshake.Welcome) -> None:
        self.era = welcome.version
        experimental = welcome.capabilities.get("experimental")
        worker = experimental.get(WORKER_EXTENSION) if isinstance(experimental, dict) else None
        self.has_worker = isinstance(worker, dict) and worker.get("version") == WORKER_VERSION

    async def list_tools(self, timeout_s: float) -> list[dict[str, Any]]:
        """All pages. Raises as StdioClient.request."""
        tools: list[dict[str, Any]] = []
        cursor: str | None = None
        seen: set[str] = set()
        for _ in range(_MAX_PAGES):
            page = await self.client.request("tools/list", {"cursor": cursor} if cursor else {}, timeout_s)
            listed = page.get("tools")
            tools += [tool for tool in listed if isinstance(tool, dict)] if isinstance(listed, list) else []
            if len(tools) > _MAX_TOOLS:
                raise RpcError(0, f"the tool list has more than {_MAX_TOOLS} tools")
            following = page.get("nextCursor")
            if not isinstance(following, str) or not following:
                return tools
            if following in seen:
                raise RpcError(0, "the tool list never ends: a page names an earlier one as the next")
            seen.add(following)
            cursor = following
        raise RpcError(0, f"the tool list has more than {_MAX_PAGES} pages")

    def _tools_changed(self) -> None:
        """However often it is said, one list after the other is asked for."""
        if self.has_worker or self.on_tools is None:
            return
        if self._relisting is None or self._relisting.done():
            self._relisting = self._background.spawn(self._list_again(), f"list the tools of {self.sandbox_id}")
        else:
            self._changed_again = True

    async def _list_again(self) -> None:
        while True:
            self._changed_again = False
            with contextlib.suppress(RpcError, SandboxGone, TimeoutError):  # it is as the first list said, then
                self.listed = await self.list_tools(_LIST_S)
                if self.on_tools is not None:
                    self.on_tools(self.listed)
            await asyncio.sleep(_LIST_PAUSE_S)
            if not self._changed_again:
                return

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
        on_log: Callable[[dict[str, Any]], None] | None = None,
        owner: str = "",
        ask: Ask | None = None,
    ) -> dict[str, Any]:
        """The MCP result. Raises RpcError, SandboxGone, and TimeoutError when it did not end by deadline_s + grace_s.

        Of images without the extension `on_progress` and `on_log` get the params of each such notification, and `ask` what the tool
        asks its user; `owner` is who would see that.
        """
        meta: dict[str, Any] = {} if traceparent is None else {"traceparent": traceparent}
        params: dict[str, Any] = {"name": tool, "arguments": arguments, "_meta": meta}
        if self.has_worker:
            bounds = {"deadline_s": deadline_s, "max_text_bytes": max_text_bytes}
            meta["toolcrib/call"] = {"call_id": call_id, "epoch": self._term.epoch, **bounds}
            return await self.client.request("tools/call", params, deadline_s + grace_s)
        return await self._foreign.run(
            call_id, params, deadline_s, grace_s, owner=owner, ask=ask, on_progress=on_progress, on_log=on_log
        )

    @property
    def foreign_calls(self) -> int:
        """How many calls run in it, without the extension."""
        return len(self._foreign)

    async def cancel(self, call_id: str, reason: str) -> bool:
        """Ask for the end of a call; whether it was known. Its answer still comes by `call`. Raises SandboxGone."""
        if self.has_worker:
            try:
                found = await self.client.request("toolcrib/cancel", {"call_id": call_id}, _SHORT_S)
            except (RpcError, TimeoutError):
                return False
            return found.get("found") is True
        return await self._foreign.cancel(call_id, reason)

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
            await self.client.request("ping", {}, _SHORT_S)  # the modern era has none, and says so
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
            await self._background.close()
        return self.end

    async def release(self) -> None:
        """Let go of it and leave it running."""
        await self.client.release()
        await self._background.close()


def unready(image: str, problem: BaseException, timeout_s: float) -> RuntimeUnavailable:
    """Why a sandbox of `image` could not be used: it ended, hung, or said no."""
    if isinstance(problem, SandboxGone):
        return RuntimeUnavailable(f"The sandbox of the image {image} ended before it was ready: {problem}.")
    if isinstance(problem, TimeoutError):
        return RuntimeUnavailable(f"The sandbox of the image {image} was not ready within {timeout_s:g} s.")
    return RuntimeUnavailable(f"The tool server in the image {image} refused to start: {str(problem).rstrip('.')}.")


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
