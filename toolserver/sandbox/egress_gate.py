"""Owns the egress proxy: starts it with the first door, tells it of every door, and starts it again when it died.

While it is away no door answers, so sandboxes reach nothing. What is open is kept here and told anew to each proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolserver.egress.policy import EgressPolicy
from toolserver.errors import RuntimeUnavailable, SandboxGone
from toolserver.runtime.base import Sandbox
from toolserver.sandbox.background import Background
from toolserver.sandbox.stdio_client import RpcError, StdioClient

_ASK_S = 15.0
_PAUSES_S = (0.2, 1.0, 3.0, 10.0, 30.0)  # before each start after a death, longer while it does not stay
_log = logging.getLogger(__name__)
Told = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class InjectedHeader:
    """A header with a secret that the proxy puts into requests to `host` (or `host:port`; else ports 80 and 443)."""

    host: str
    header: str
    secret: str = field(repr=False)
    prefix: str = ""


@dataclass(frozen=True)
class _Door:
    policy: EgressPolicy
    headers: tuple[InjectedHeader, ...]
    folder: str | None

    def as_params(self, name: str) -> dict[str, Any]:
        headers = [
            {"host": one.host, "header": one.header, "prefix": one.prefix, "secret": one.secret} for one in self.headers
        ]
        told: dict[str, Any] = {"door": name, "policy": self.policy.as_json(), "headers": headers}
        return told if self.folder is None else {**told, "folder": self.folder}


class EgressGate:
    """`start` gives a new proxy's byte stream. `configuration` is what each is told first (docs/reference/egress.md).

    `denied` and `used` are told what the proxy refused and carried, as it tells it. `close` must be called once.
    """

    def __init__(
        self,
        start: Callable[[], Awaitable[Sandbox]],
        configuration: Mapping[str, Any],
        denied: Told = lambda _: None,
        used: Told = lambda _: None,
    ) -> None:
        self._start, self._configuration = start, dict(configuration)
        self._listeners = {"egress/denied": denied, "egress/used": used}
        self._doors: dict[str, _Door] = {}
        self._client: StdioClient | None = None
        self._lock = asyncio.Lock()
        self._background = Background()
        self._watcher: asyncio.Task[None] | None = None

    async def open(
        self, door: str, policy: EgressPolicy, headers: Sequence[InjectedHeader] = (), folder: str | None = None
    ) -> None:
        """Open a door, or give an open one another policy, which holds for its connections once this returns.

        `folder`: as the proxy sees it; None: its own. Raises RuntimeUnavailable when the proxy can't be had: the door is
        kept and opened once it can, unless `close` comes first. Raises ValueError for what the proxy can't take.
        """
        async with self._lock:
            wanted = _Door(policy, tuple(headers), folder)
            before = self._doors.get(door)
            self._doors[door] = wanted
            try:
                await self._tell("egress/open", wanted.as_params(door))
            except ValueError:
                if before is None:
                    del self._doors[door]
                else:
                    self._doors[door] = before
                raise
            except RuntimeUnavailable:
                self._watch()
                raise

    async def close_door(self, door: str) -> None:
        """Close it and cut its connections; no error when it is not open, nor when the proxy is away."""
        async with self._lock:
            if self._doors.pop(door, None) is None or self._client is None or not self._client.alive:
                return
            try:
                await self._ask(self._client, "egress/close", {"door": door})
            except (RuntimeUnavailable, ValueError):
                await self._end()  # it may still be open: a new proxy has only the doors that are kept here

    async def settle(self) -> None:
        """All that the proxy told before now was heard once this returns. No error when it is away."""
        client = self._client
        if client is not None and client.alive:
            with contextlib.suppress(RuntimeUnavailable, ValueError):
                await self._ask(client, "ping", {})

    async def close(self) -> None:
        """End the proxy."""
        await self._background.close()
        async with self._lock:
            await self._end()

    async def _tell(self, method: str, params: dict[str, Any]) -> None:
        if self._client is None or not self._client.alive:
            await self._begin()  # tells of every door, this one too
        elif self._client is not None:
            await self._ask(self._client, method, params)

    async def _begin(self) -> None:
        """A new proxy with all doors. Raises RuntimeUnavailable, ValueError."""
        await self._end()
        client = StdioClient(await self._start())
        client.noticed = self._noticed
        try:
            await self._ask(client, "egress/configure", self._configuration)
            for name, door in list(self._doors.items()):
                await self._ask(client, "egress/open", door.as_params(name))
        except BaseException:
            await client.close()
            raise
        self._client = client
        self._watch()

    async def _end(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def _watch(self) -> None:
        if self._watcher is None or self._watcher.done():
            self._watcher = self._background.spawn(self._keep(), "egress proxy")

    async def _keep(self) -> None:
        """A proxy as long as there are doors, for ever."""
        tries = 0
        while True:
            client = self._client
            if client is not None and client.alive:
                began = asyncio.get_running_loop().time()
                await client.ended.wait()
                if asyncio.get_running_loop().time() - began > _PAUSES_S[-1]:
                    tries = 0
                _log.warning("egress_proxy_lost")
            await asyncio.sleep(_PAUSES_S[min(tries, len(_PAUSES_S) - 1)])
            tries += 1
            async with self._lock:
                if self._client is not None and self._client.alive:
                    continue
                if not self._doors:
                    await self._end()
                    return
                try:
                    await self._begin()
                except (RuntimeUnavailable, ValueError) as problem:
                    _log.warning("egress_proxy_away", extra={"fields": {"why": str(problem)[:300]}})

    async def _ask(self, client: StdioClient, method: str, params: dict[str, Any]) -> None:
        try:
            await client.request(method, params, _ASK_S)
        except RpcError as problem:
            if problem.kind is None:
                raise ValueError(problem.message) from problem
            raise RuntimeUnavailable(f"The egress proxy refused: {problem.message}") from problem
        except (SandboxGone, TimeoutError) as problem:
            raise RuntimeUnavailable(
                "The egress proxy does not answer; nothing can be reached until it does."
            ) from problem

    def _noticed(self, method: str, params: dict[str, Any]) -> None:
        listener = self._listeners.get(method)
        if listener is not None:
            listener(params)
