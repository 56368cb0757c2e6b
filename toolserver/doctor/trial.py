"""An added image on trial: started once as sessions would start it, with all of its hardening, and nothing left of it afterwards."""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolserver.app import server_id
from toolserver.catalog.secret import SecretSource
from toolserver.images.engine import ImageEngine, ImageFacts, Progress
from toolserver.runtime.base import Limits, SandboxSpec
from toolserver.runtime.docker_runtime import DockerRuntime
from toolserver.sandbox.eras import Eras
from toolserver.sandbox.tool_sandbox import ToolSandbox
from toolserver.sessions.starting import Starts, start_sandbox
from toolserver.settings import Settings
from toolserver.tool_entry import ToolEntry


class ImageMissing(Exception):  # noqa: N818 - reads as the state it names
    """The engine does not have the image and can't get it. The message says what to do."""


@dataclass(frozen=True)
class Introspection:
    """What an image offers. start_s: seconds from nothing to its list of tools. era: the version of MCP that it speaks."""

    listed: list[dict[str, Any]]
    era: str | None
    start_s: float


def describe(settings: Settings, reference: str, progress: Progress) -> ImageFacts:
    """Pulled where the engine does not have it. Raises ImageMissing, ImageBuildError. Blocks."""
    refuse_other_runtimes(settings)
    with ImageEngine(settings.runtime.docker_host) as engine:
        facts = engine.describe(reference)
        if facts is None:
            progress(f"the engine does not have {reference}; pulling it")
            engine.pull(reference, progress)
            facts = engine.describe(reference)
    if facts is None:
        raise ImageMissing(
            f"there is no image {reference}: the engine does not have it and can't pull it. Check its name, log the engine in, or "
            "load it with docker load"
        )
    return facts


def refuse_other_runtimes(settings: Settings) -> None:
    """Raises ImageMissing."""
    if settings.runtime.name in ("bubblewrap", "fake"):
        raise ImageMissing(
            f"added images run on a Docker engine alone, and TOOLSERVER_RUNTIME__NAME is {settings.runtime.name}: set it to docker"
        )


def read_secrets(entry: ToolEntry) -> dict[str, str]:
    """The values for the sandbox; those for headers are only tried. Raises SecretMissing."""
    for header in entry.header_secrets:
        SecretSource.parse(header.source).read()
    return {name: SecretSource.parse(source).read() for name, source in entry.secrets.items()}


def introspect(settings: Settings, name: str, entry: ToolEntry, digest: str) -> Introspection:
    """Raises RuntimeUnavailable, SecretMissing. Blocks."""

    async def look() -> Introspection:
        async with trial(settings) as runtime:
            begun = time.monotonic()
            async with started(runtime, settings, name, entry, digest) as sandbox:
                return Introspection(sandbox.listed, sandbox.era, time.monotonic() - begun)

    with alone(settings.state_dir):
        return asyncio.run(look())


@contextmanager
def alone(state_dir: Path) -> Iterator[None]:
    """One trial at a time in a state folder: each removes what an earlier one may have left."""
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(state_dir / "trial.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@asynccontextmanager
async def trial(settings: Settings) -> AsyncIterator[DockerRuntime]:
    """A runtime of its own beside a running server, whose sandboxes are not that server's. Within `alone`."""
    own = f"{server_id(settings.state_dir)}-trial"
    runtime = DockerRuntime(own, settings.state_dir / "trial", settings.runtime, settings.egress.docker_network)
    try:
        await runtime.open()
        await runtime.sweep()
        try:
            yield runtime
        finally:
            await runtime.sweep()
    finally:
        await runtime.close()


def trial_spec(runtime: DockerRuntime, settings: Settings, name: str, entry: ToolEntry, digest: str) -> SandboxSpec:
    usual, own = settings.limits, entry.limits
    limits = Limits(
        memory_mb=min(usual.memory_mb, own.memory_mb or usual.memory_mb),
        cpus=min(usual.cpus, own.cpus or usual.cpus),
        pids=min(usual.pids, own.pids or usual.pids),
        disk_mb=min(usual.disk_mb, own.disk_mb or usual.disk_mb),
    )
    return SandboxSpec(
        sandbox_id=f"sbx_{secrets.token_hex(8)}",
        workspace_id="" if entry.workspace == "none" else f"wsp_{secrets.token_hex(12)}",
        image=name,
        reference=digest,
        command=tuple(entry.command),
        limits=runtime.effective_limits(limits),
        workspace=entry.workspace,
        env=entry.env,
        foreign=True,
        working_dir=entry.working_dir,
    )


@asynccontextmanager
async def started(
    runtime: DockerRuntime, settings: Settings, name: str, entry: ToolEntry, digest: str
) -> AsyncIterator[ToolSandbox]:
    """Up to its list of tools. It has no way out, whatever its entry grants. Raises RuntimeUnavailable, SecretMissing."""
    spec = trial_spec(runtime, settings, name, entry, digest)
    async with workspace_of(runtime, spec):
        timeout_s = settings.runtime.start_timeout_s
        hidden = await asyncio.to_thread(read_secrets, entry)
        sandbox = await start_sandbox(runtime, Starts(1), spec, frozenset(), timeout_s, eras=Eras(), hidden=hidden)
        try:
            yield sandbox
        finally:
            await sandbox.close()


@asynccontextmanager
async def workspace_of(runtime: DockerRuntime, spec: SandboxSpec) -> AsyncIterator[None]:
    if spec.workspace == "none":
        yield
        return
    await runtime.create_workspace(spec.workspace_id, spec.limits.disk_mb)
    try:
        yield
    finally:
        await runtime.delete_workspace(spec.workspace_id)
