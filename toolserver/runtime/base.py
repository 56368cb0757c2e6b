"""SandboxRuntime: the driver that starts, attaches to and ends sandboxes. Every driver passes tests/conformance."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from toolserver.errors import RequirementMissing, RuntimeUnavailable, SandboxGone

WorkspaceAccess = Literal["none", "ro", "rw"]
EGRESS_FOLDER = "/.toolcrib/egress"  # in sandboxes
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


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

    `workspace_id` names the workspace, which a sandbox of the pool has before it has a session. `env` is fixed at start
    and holds no secret; the session's env is bound later over the protocol. `egress`: the folder of doors to the egress proxy
    is mounted read-only at EGRESS_FOLDER; which door is told later, over the protocol. `door`: its name, for images that know
    no such protocol. `foreign`: an image of others, run as it is: an empty `command` means its own entrypoint and command, and
    `working_dir` replaces its own, `arguments` follow its entrypoint in place of its own; secrets reach it by `start` and never stand here. `draws_pages`: a browser, which reserves far more
    address space than it uses and needs fonts.
    """

    sandbox_id: str
    workspace_id: str
    image: str
    reference: str
    command: tuple[str, ...]
    limits: Limits
    workspace: WorkspaceAccess = "rw"
    env: Mapping[str, str] = field(default_factory=dict)
    egress: bool = False
    door: str | None = None
    foreign: bool = False
    working_dir: str | None = None
    arguments: tuple[str, ...] = ()
    draws_pages: bool = False

    def dump(self) -> str:
        """As JSON, for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> SandboxSpec:
        told = json.loads(text)
        known = {one.name for one in fields(cls)}  # those of an earlier version are left out
        kept = {name: value for name, value in told.items() if name in known}
        lists = {name: tuple(kept[name]) for name in ("command", "arguments") if name in kept}
        return cls(**{**kept, **lists, "limits": Limits(**told["limits"])})


@dataclass(frozen=True)
class SandboxEnd:
    """How a sandbox ended. `cause` is never guessed: `unknown` when the runtime can't tell."""

    cause: Literal["exited", "killed", "oom", "removed", "runtime_lost", "unknown"]
    exit_code: int | None = None
    log_tail: str = ""  # the last bytes of stderr, for the operator's log, never for a client


class SandboxEnded(SandboxGone):
    """The sandbox runs no more; `end` is how it ended, as far as the runtime can tell."""

    def __init__(self, end: SandboxEnd) -> None:
        super().__init__(f"the sandbox ended ({end.cause})")
        self.end = end


@dataclass(frozen=True)
class Inventory:
    """What of this server is on the engine, by id. `running` are those of `sandboxes` that run, paused ones too."""

    sandboxes: frozenset[str] = frozenset()
    running: frozenset[str] = frozenset()
    workspaces: frozenset[str] = frozenset()


class Sandbox(ABC):
    """One running sandbox: a byte stream in, a byte stream out, and an end.

    The caller owns it: `remove` or `release` must be called once, whatever happened. Not safe for several readers.
    `handle` is what `attach` needs to find it again, in this process or a later one.
    """

    spec: SandboxSpec
    handle: str

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

    @abstractmethod
    async def release(self) -> None:
        """Let go of its stream and leave it running, for `attach`. The runtime forgets it. `remove` may still follow."""


class CommandSandbox(Sandbox):
    """A sandbox that runs one command: it is given its input once, and its end is what matters. It can't be attached again."""

    @abstractmethod
    async def end_input(self) -> None:
        """Close the command's stdin. Raises SandboxGone."""

    @abstractmethod
    async def receive_both(self) -> tuple[bytes, bool]:
        """The next bytes of stdout or stderr (at most 256 KiB), and whether they are of stderr; b"" at the end of both."""


def refuse_foreign(spec: SandboxSpec, runtime: str) -> None:
    """For runtimes without an engine of images. Raises RequirementMissing."""
    if spec.foreign:
        raise RequirementMissing(
            f"The image {spec.image} was added, and added images run on a Docker engine alone: the runtime {runtime} runs "
            "none. Set TOOLSERVER_RUNTIME__NAME=docker."
        )


class SandboxRuntime(ABC):
    """A driver. Methods may raise RuntimeUnavailable; each has a deadline of its own and never hangs."""

    name: str

    @abstractmethod
    async def open(self) -> None:
        """Make ready. Does not raise when an engine is away: `check` tells. Raises RequirementMissing."""

    @abstractmethod
    async def check(self) -> None:
        """Raises RuntimeUnavailable when sandboxes can't be started now, RequirementMissing when not as the settings want."""

    @abstractmethod
    async def start(self, spec: SandboxSpec, secrets: Mapping[str, str] | None = None) -> Sandbox:
        """Start a sandbox, attached. Transactional: a failed start leaves nothing. Raises RuntimeUnavailable.

        `secrets`: further environment of the program in a `foreign` one, which nobody sees who inspects it.
        Raises RequirementMissing for a `foreign` one where only images of the project run.
        """

    async def run(self, spec: SandboxSpec, secrets: Mapping[str, str] | None = None) -> CommandSandbox:
        """As `start`, for the one command of a `foreign` image."""
        del secrets
        refuse_foreign(spec, self.name)
        raise RequirementMissing(f"The runtime {self.name} runs no commands.")

    @abstractmethod
    async def attach(self, spec: SandboxSpec, handle: str) -> Sandbox:
        """A sandbox that runs already, by its `handle`: after the death of the server that started it, or of its stream.

        Raises SandboxEnded when it does not run any more (what is left of it stays for `discard`), RuntimeUnavailable when
        that can't be told now.
        """

    @abstractmethod
    async def start_egress(self) -> Sandbox:
        """The egress proxy (docs/reference/egress.md), the only process of this server that may reach the network for sandboxes.

        There is at most one: what an earlier server left of it is ended. It ends with this process. The caller owns it as any
        sandbox. Raises RuntimeUnavailable.
        """

    async def egress_problem(self) -> str | None:
        """Why the egress proxy can't be started here, and what to do; None: nothing is known. Raises RuntimeUnavailable."""
        return None

    def door_folder(self, sandbox_id: str) -> str | None:
        """Where the proxy has to make the doors of a sandbox whose spec has `egress` or `door`; None: its usual place."""
        del sandbox_id
        return None

    async def image_ids(self, references: Collection[str]) -> dict[str, str]:
        """Of these names (or ids) of images those that can be started here, with the id of each. Raises RuntimeUnavailable."""
        del references
        raise RuntimeUnavailable(f"The runtime {self.name} tells of no images.")

    async def lacks(self, image: str, reference: str, host_programs: tuple[str, ...]) -> str | None:
        """What keeps sandboxes of an optional image from starting here, and what to do; None: nothing does.

        `host_programs` are what it needs where sandboxes have the host's programs. Raises RuntimeUnavailable.
        """
        del image, reference, host_programs
        return None

    def added_problem(self) -> str | None:
        """Why images that were added don't run here, and what to do; None: they do."""
        return None

    @abstractmethod
    async def resize(self, sandbox: Sandbox, limits: Limits) -> Limits:
        """Give a running sandbox other limits of memory, cpus and pids; what is in effect, read back.

        Raises RuntimeUnavailable when this runtime or host can't, or when `disk_mb` differs: then nothing counts as changed.
        """

    @abstractmethod
    async def create_workspace(self, workspace_id: str, disk_mb: int) -> None:
        """Make a workspace of at most `disk_mb` MiB, for good, which outlives its sandboxes, owned by the sandbox user."""

    @abstractmethod
    async def delete_workspace(self, workspace_id: str) -> None:
        """Delete it; no error when it is gone. All its sandboxes were removed before."""

    @abstractmethod
    async def has_workspace(self, workspace_id: str) -> bool:
        """Whether it is there. Raises RuntimeUnavailable when that can't be told now."""

    @abstractmethod
    async def inventory(self) -> Inventory:
        """All that carries this server's label. Raises RuntimeUnavailable."""

    @abstractmethod
    async def discard(self, sandbox_ids: frozenset[str], workspace_ids: frozenset[str]) -> None:
        """End and remove these sandboxes, then delete these workspaces, whoever started them.

        Raises RuntimeUnavailable, when all but what will not go is gone.
        """

    async def sweep(
        self, keep_sandboxes: frozenset[str] = frozenset(), keep_workspaces: frozenset[str] = frozenset()
    ) -> int:
        """Remove every sandbox and workspace of this server that is in neither; how many.

        Only what carries this server's label: foreign containers are never touched.
        """
        found = await self.inventory()
        sandboxes, workspaces = found.sandboxes - keep_sandboxes, found.workspaces - keep_workspaces
        await self.discard(sandboxes, workspaces)
        return len(sandboxes) + len(workspaces)

    @abstractmethod
    def effective_limits(self, asked: Limits) -> Limits:
        """What will hold for `asked` on this host: lowered to what it has, never raised above what was asked."""

    @abstractmethod
    def isolation(self) -> dict[str, Any]:
        """What this host enforces, for the session's answer: {"runtime", "kernel": "shared"/"gvisor", "memory": "enforced"/
        "not enforced: why", "cpus": ..., "pids": ..., "disk": "enforced"/"accounted by the worker", "seccomp": ...,
        "network": ...}.
        """

    def facts(self) -> dict[str, Any]:
        """What the engine behind it tells of itself, for the operator; nothing where there is no engine."""
        return {}

    @abstractmethod
    async def close(self) -> None:
        """Let go of the engine. Sandboxes that were started or attached, and not released, are removed."""


def checked_id(identifier: str) -> str:
    """An id that can stand in the name of a container, volume or folder. Raises ValueError: ids are made by this server."""
    if not is_id(identifier):
        raise ValueError(f"not an identifier: {identifier!r}")
    return identifier


def is_id(identifier: str) -> bool:
    """Whether `checked_id` takes it: what is found on the host may be called anything."""
    return _ID.fullmatch(identifier) is not None
