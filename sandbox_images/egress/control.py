"""What the server tells the proxy, and hears of it: JSON-RPC lines on stdin and stdout. See docs/reference/egress.md."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import ssl
import sys
from pathlib import Path
from typing import Any

from sandbox_images.base import mcp_stdio
from sandbox_images.base.mcp_stdio import INVALID_PARAMS, METHOD_NOT_FOUND, ProtocolError
from sandbox_images.egress.authority import Authority, system_authorities
from sandbox_images.egress.conversation import Conversation
from sandbox_images.egress.door import Connection, Door, Grant
from sandbox_images.egress.limits import Limits
from sandbox_images.egress.rules import Policy
from sandbox_images.egress.secret_headers import SecretHeader
from sandbox_images.egress.target import read_authority
from sandbox_images.egress.vetting import Outside, Vetting

FOLDER = "/egress"
CA_FILE = "ca.pem"
_DOOR = re.compile(r"[0-9a-f]{32}")
_SWEEP_S = 0.5
_MAX_UNREAD = 4 << 20  # bytes of notices that the server has not read: more are dropped


class Proxy:
    """All doors. `configure` comes first; what it sets holds for every door."""

    def __init__(self, outside: Outside, out: asyncio.StreamWriter) -> None:
        self._vetting = Vetting(outside)
        self._out = out
        self._doors: dict[str, Door] = {}
        self._folder = Path(FOLDER)
        self._limits = Limits()
        self._authorities = ""
        self._authority: Authority | None = None
        self._upstream_tls: ssl.SSLContext | None = None
        self._changing = asyncio.Lock()

    async def handle(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Raises ProtocolError."""
        methods = {"egress/configure": self._configure, "egress/open": self._open, "egress/close": self._close}
        try:
            if method == "ping":
                return {}
            if method == "egress/list":
                return {"doors": [self._shown(door) for door in self._doors.values()]}
            if method not in methods:
                raise ProtocolError(METHOD_NOT_FOUND, f"There is no method {method[:100]!r}.")
            async with self._changing:
                return await methods[method](params)
        except (ValueError, ssl.SSLError) as problem:
            raise ProtocolError(INVALID_PARAMS, str(problem)) from problem
        except OSError as problem:
            raise mcp_stdio.refused("egress_unready", f"The door can't be made: {problem.strerror}.") from problem

    async def _configure(self, params: dict[str, Any]) -> dict[str, Any]:
        """{"folder"?, "allow_private"?, "limits"?, "authorities"?}; what is left out goes back to its default."""
        unknown = set(params) - {"folder", "allow_private", "limits", "authorities", "_meta"}
        if unknown:
            raise ValueError(f"configure: there is no {min(unknown)!r}")
        limits = Limits().changed(params.get("limits") or {})
        private = frozenset(_pair(pair) for pair in params.get("allow_private") or ())
        authorities = params.get("authorities") or ""
        if authorities:
            ssl.create_default_context(cadata=authorities)  # raises what is wrong with them
        self._folder = Path(params.get("folder") or FOLDER)
        self._limits, self._authorities, self._upstream_tls = limits, authorities, None
        self._vetting.allow_private = private
        for door in self._doors.values():
            door.regrant(door.grant, self._vetting)
        return {}

    async def _open(self, params: dict[str, Any]) -> dict[str, Any]:
        """{"door", "folder"?, "policy", "headers"?, "limits"?}: whether it was there, and how many connections were cut."""
        name = self._name(params)
        grant = Grant(
            Policy.load(params.get("policy")),
            tuple(SecretHeader.load(header) for header in params.get("headers") or ()),
            self._limits.changed(params.get("limits") or {}),
        )
        folder = Path(params.get("folder") or self._folder)
        old = self._doors.get(name)
        if old is not None and old.folder == folder:
            if grant.headers:
                self._write_authorities(folder)
            return {"existed": True, "cut": old.regrant(grant, self._vetting)}
        door = Door(name, folder, grant, self._tell, self._serve)
        door.make_folder()
        if grant.headers:
            self._write_authorities(folder)
        await door.open()
        self._doors[name] = door
        if old is not None:  # the sandbox that had it is gone
            door.used = old.used
            await old.close()
        return {"existed": old is not None, "cut": 0}

    async def _close(self, params: dict[str, Any]) -> dict[str, Any]:
        """{"door"}: whether it was there."""
        door = self._doors.pop(self._name(params), None)
        if door is not None:
            await door.close()
        return {"existed": door is not None}

    def _name(self, params: dict[str, Any]) -> str:
        name = params.get("door")
        if not isinstance(name, str) or not _DOOR.fullmatch(name):
            raise ValueError("door: 32 hexadecimal digits")
        return name

    def _shown(self, door: Door) -> dict[str, Any]:
        grant = door.grant
        return {
            "door": door.name,
            "folder": str(door.folder),
            "policy": {"mode": grant.policy.mode, "allow": sorted(grant.policy.rules)},
            "headers": [{"host": header.host, "header": header.name} for header in grant.headers],
            "connections": len(door.connections),
            "bytes": door.used,
        }

    async def _serve(self, connection: Connection) -> None:
        await Conversation(connection, self._vetting, self._own_authority, self._tls_out).hold()

    def _own_authority(self) -> Authority:
        if self._authority is None:
            self._authority = Authority()
        return self._authority

    def _tls_out(self) -> ssl.SSLContext:
        if self._upstream_tls is None:
            context = ssl.create_default_context()
            if self._authorities:
                context.load_verify_locations(cadata=self._authorities)
            context.set_alpn_protocols(["http/1.1"])
            self._upstream_tls = context
        return self._upstream_tls

    def _write_authorities(self, folder: Path) -> None:
        """What sandboxes trust: the system's authorities, the operator's, and ours."""
        text = "\n".join((system_authorities().rstrip(), self._authorities.rstrip(), self._own_authority().pem))
        fresh = folder / f"{CA_FILE}.new"
        fresh.write_text(text, "utf-8")
        fresh.chmod(0o644)
        fresh.replace(folder / CA_FILE)

    def _tell(self, method: str, params: dict[str, Any]) -> None:
        if self._out.transport.get_write_buffer_size() < _MAX_UNREAD:
            self._out.write(mcp_stdio.encode({"method": method, "params": params}))

    async def sweep(self) -> None:
        """End connections whose time is up, for ever."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            for door in self._doors.values():
                door.cut(Connection.overdue)

    async def close(self) -> None:
        for door in self._doors.values():
            await door.close()


async def serve(outside: Outside, stdin: int, stdout: int) -> None:
    """Until stdin ends. Takes both descriptors over."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=mcp_stdio.MAX_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(stdin, "rb", 0))
    transport, protocol = await loop.connect_write_pipe(
        lambda: asyncio.streams.FlowControlMixin(loop=loop), os.fdopen(stdout, "wb", 0)
    )
    out = asyncio.StreamWriter(transport, protocol, None, loop)
    proxy = Proxy(outside, out)
    sweeper = loop.create_task(proxy.sweep())
    try:
        while line := await reader.readline():
            if (reply := await _answer(proxy, line)) is not None:
                out.write(reply)
                await out.drain()
    except (OSError, ValueError) as problem:  # the server is gone, or sent a line without end
        print(f"egress proxy: {type(problem).__name__}", file=sys.stderr)
    finally:
        sweeper.cancel()
        await proxy.close()


async def _answer(proxy: Proxy, line: bytes) -> bytes | None:
    number: Any = None
    try:
        message = mcp_stdio.decode(line)
        number = message.get("id")
        if not isinstance(message.get("method"), str) or number is None:
            return None
        params = message.get("params")
        return mcp_stdio.result(
            number, await proxy.handle(message["method"], params if isinstance(params, dict) else {})
        )
    except ProtocolError as problem:
        return mcp_stdio.error(number, problem)


def _pair(text: Any) -> str:
    if not isinstance(text, str):
        raise ValueError("allow_private: a list of host:port")  # noqa: TRY004 - one kind for all that is told wrongly
    with contextlib.suppress(Exception):
        target = read_authority(text, None)
        return str(target)
    raise ValueError(f"allow_private: {text[:80]!r} is not host:port")
