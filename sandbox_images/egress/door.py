"""A door: one Unix socket with a policy of its own. Whoever can connect to it has what the policy gives, nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox_images.egress.answers import BUSY
from sandbox_images.egress.limits import Limits
from sandbox_images.egress.problems import Refused
from sandbox_images.egress.rules import Policy
from sandbox_images.egress.secret_headers import SecretHeader
from sandbox_images.egress.streams import PlainStream, Stream
from sandbox_images.egress.target import Target
from sandbox_images.egress.vetting import Vetting

Tell = Callable[[str, dict[str, Any]], None]
_NOTICES_A_SECOND, _NOTICES_AT_ONCE = 20.0, 100.0
_NAMES_AT_ONCE = 8  # that are being resolved


@dataclass(frozen=True)
class Grant:
    """What a door's connections may do, as it was last told."""

    policy: Policy = field(default_factory=Policy)
    headers: tuple[SecretHeader, ...] = ()
    limits: Limits = field(default_factory=Limits)

    def secrets_for(self, target: Target) -> list[SecretHeader]:
        return [header for header in self.headers if header.fits(target)]


@dataclass(eq=False)
class Connection:
    """One client connection, and what it is connected to. Times are monotonic seconds."""

    door: Door
    stream: Stream
    up: int = 0
    down: int = 0
    started: float = field(default_factory=time.monotonic)
    touched: float = field(default_factory=time.monotonic)
    target: Target | None = None  # while something is, or is being, connected to it
    address: str | None = None
    upstream: Stream | None = None
    inspected: bool = True  # false: a tunnel whose TLS name nobody looked at
    secret: bool = False  # TLS ends here, for a secret header

    async def read_client(self, stream: Stream) -> bytes:
        """From the client, counted. Raises OSError, Refused."""
        data = await stream.read()
        self.up += len(data)
        self._count(len(data), self.up)
        return data

    async def read_upstream(self, stream: Stream) -> bytes:
        """From the other side, counted. Raises OSError, Refused."""
        data = await stream.read()
        self.down += len(data)
        self._count(len(data), self.down)
        return data

    def _count(self, size: int, total: int) -> None:
        self.touched = time.monotonic()
        self.door.used += size
        if total > self.door.grant.limits.connection_bytes:
            raise self._over("one connection may carry")
        self.check_allowance()

    def check_allowance(self) -> None:
        """Raises Refused once the door has carried all that it may."""
        if self.door.used > self.door.grant.limits.door_bytes:
            raise self._over("this session may carry")

    def _over(self, what: str) -> Refused:
        target = self.target or Target("", 0)
        reason = f"{target.host or 'The connection'} is refused: more bytes than {what}."
        return Refused("bytes", target.host, target.port, reason)

    def overdue(self) -> bool:
        limits, now = self.door.grant.limits, time.monotonic()
        return now - self.touched > limits.idle_s or now - self.started > limits.total_s

    def abort(self) -> None:
        """End it at once, both ways."""
        self.stream.abort()
        if self.upstream is not None:
            self.upstream.abort()


class Door:
    """`serve` carries one connection to its end. The owner calls `open` once and `close` once."""

    def __init__(
        self, name: str, folder: Path, grant: Grant, tell: Tell, serve: Callable[[Connection], Awaitable[None]]
    ) -> None:
        self.name, self.folder, self.grant = name, folder, grant
        self.used = 0  # bytes, both ways, since the door was made
        self.connections: set[Connection] = set()
        self.resolving = asyncio.Semaphore(_NAMES_AT_ONCE)
        self._tell, self._serve = tell, serve
        self._server: asyncio.Server | None = None
        self._notices, self._noticed, self._untold = _NOTICES_AT_ONCE, time.monotonic(), 0

    @property
    def path(self) -> Path:
        return self.folder / self.name

    def make_folder(self) -> None:
        """Raises OSError."""
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True)
            self.folder.chmod(0o711)  # a door is found by its name, never by a listing

    async def open(self) -> None:
        """Raises OSError."""
        self.path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._accept, str(self.path), backlog=256)
        self.path.chmod(0o666)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.path.unlink(missing_ok=True)
        self.cut(lambda _: True)

    def regrant(self, grant: Grant, vetting: Vetting) -> int:
        """From now on this holds, for connections that are open too; how many were cut."""
        self.grant = grant
        return self.cut(lambda connection: not self._still_allowed(connection, vetting))

    def cut(self, which: Callable[[Connection], bool]) -> int:
        chosen = [connection for connection in self.connections if which(connection)]
        for connection in chosen:
            connection.abort()
        return len(chosen)

    def _still_allowed(self, connection: Connection, vetting: Vetting) -> bool:
        target = connection.target
        if target is None:
            return True  # its next request is judged anew
        if not connection.inspected and self.grant.policy.mode == "allow":
            return False
        if connection.secret != bool(self.grant.secrets_for(target)):
            return False
        try:
            self.grant.policy.check(target)
            vetting.check_name(target)
            if connection.address is not None:
                vetting.check_address(target, connection.address)
        except Refused:
            return False
        return True

    def denied(self, refusal: Refused) -> None:
        told = {"host": refusal.host, "port": refusal.port, "rule": refusal.rule, "reason": refusal.reason}
        self._notice("egress/denied", told)

    def note_use(self, target: Target, up: int, down: int, seconds: float, status: int) -> None:
        told = {"host": target.host, "port": target.port, "up": up, "down": down, "ms": round(seconds * 1000)}
        self._notice("egress/used", {**told, "status": status})

    def _notice(self, method: str, told: dict[str, Any]) -> None:
        """At most so many a second: whoever asks for more is told of by number."""
        now = time.monotonic()
        self._notices = min(_NOTICES_AT_ONCE, self._notices + (now - self._noticed) * _NOTICES_A_SECOND)
        self._noticed = now
        if self._notices < 1:
            self._untold += 1
            return
        self._notices -= 1
        more, self._untold = self._untold, 0
        self._tell(method, {"door": self.name, **told, **({"untold": more} if more else {})})

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = PlainStream(reader, writer)
        if len(self.connections) >= self.grant.limits.connections:
            try:
                writer.write(BUSY)
            finally:
                await stream.close()
            return
        connection = Connection(self, stream)
        self.connections.add(connection)
        try:
            await self._serve(connection)
        except asyncio.CancelledError:
            pass  # the proxy ends
        finally:
            self.connections.discard(connection)
            connection.abort()
