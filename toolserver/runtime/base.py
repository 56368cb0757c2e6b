"""SandboxRuntime: the driver that starts, attaches to and ends sandboxes. Every driver passes tests/conformance."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

WorkspaceAccess = Literal["none", "ro", "rw"]
Network = Literal["none", "open"]


@dataclass(frozen=True)
class Limits:
    """Bounds of one sandbox. memory_mb: MiB, swap included; cpus: cores; pids: processes and threads; disk_mb: MiB of workspace."""

    memory_mb: int
    cpus: float
    pids: int
    disk_mb: int


@dataclass(frozen=True)
class SandboxSpec:
    """What to start. `image` is a key of the catalog; `reference` the engine's name for it; `command` replaces the image's own.

    `env` is fixed at start and holds no secret; the session's env is bound later over the protocol.
    """

    sandbox_id: str
    session_id: str
    image: str
    reference: str
    command: tuple[str, ...]
    limits: Limits
    workspace: WorkspaceAccess = "rw"
    network: Network = "none"
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SandboxEnd:
    """How a sandbox ended. `cause` is never guessed: `unknown` when the runtime can't tell."""

    cause: Literal["exited", "killed", "oom", "removed", "runtime_lost", "unknown"]
    exit_code: int | None = None
    log_tail: str = ""  # the last bytes of stderr, for the operator's log, never for a client


class Sandbox(ABC):
    """One running sandbox: a byte stream in, a byte stream out, and an end.

    The caller owns it: `remove` must be called once, whatever happened. Not safe for several readers.
    """

    spec: SandboxSpec

    @abstractmethod
    async def send(self, data: bytes) -> None:
        """Write to the sandbox's stdin. Raises SandboxGone when the stream is closed."""

    @abstractmethod
    async def receive(self) -> bytes:
        """The next bytes of its stdout (at most 256 KiB), b"" at the end. Stderr is drained and kept as a bounded log."""

    @abstractmethod
    async def kill(self) -> None:
        """End every process in it now. Returns when they are gone; no error when they were already."""

    @abstractmethod
    async def remove(self) -> SandboxEnd:
        """Kill if need be, and leave nothing behind (the workspace stays). Safe to call twice."""


class SandboxRuntime(ABC):
    """A driver. Methods may raise RuntimeUnavailable; each has a deadline of its own and never hangs."""

    name: str

    @abstractmethod
    async def open(self) -> None:
        """Make ready. Does not raise when an engine is away: `check` tells."""

    @abstractmethod
    async def check(self) -> None:
        """Raises RuntimeUnavailable when sandboxes can't be started now."""

    @abstractmethod
    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox, attached. Transactional: a failed start leaves nothing. Raises RuntimeUnavailable."""

    @abstractmethod
    async def create_workspace(self, session_id: str) -> None:
        """Make the session's workspace, which outlives its sandboxes, owned by the sandbox user."""

    @abstractmethod
    async def delete_workspace(self, session_id: str) -> None:
        """Delete it; no error when it is gone. All sandboxes of the session were removed before."""

    @abstractmethod
    async def sweep(self, keep_sessions: frozenset[str] = frozenset()) -> int:
        """Remove every sandbox and workspace of this server that belongs to no session in `keep_sessions`; how many.

        Only what carries this server's label: foreign containers are never touched.
        """

    @abstractmethod
    def effective_limits(self, asked: Limits) -> Limits:
        """What will hold for `asked` on this host: lowered to what it has, never raised above what was asked."""

    @abstractmethod
    def isolation(self) -> dict[str, Any]:
        """What this host enforces, for the session's answer: {"runtime", "kernel": "shared"/"gvisor", "memory": "enforced"/
        "not enforced: why", "cpus": ..., "pids": ..., "disk": ..., "seccomp": ..., "network": ...}.
        """

    @abstractmethod
    async def close(self) -> None:
        """Let go of the engine. Sandboxes that still run are removed."""
