"""A spare: a sandbox that no session has yet, open up to its list of tools, with a fresh workspace that was made for it."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from toolserver.catalog.image import ToolImage
from toolserver.errors import RuntimeUnavailable
from toolserver.runtime.base import Limits, SandboxRuntime, SandboxSpec
from toolserver.sandbox.eras import Eras
from toolserver.sandbox.tool_sandbox import ToolSandbox
from toolserver.sessions.holdings import Holdings
from toolserver.sessions.starting import Starts, start_sandbox

ASSUMED_MB = 32.0  # of a spare that can't tell what it uses
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Spare:
    """`sandbox` is None while it is being started. `memory_mb`: MiB in use, as far as it can tell."""

    image: str
    spec: SandboxSpec
    sandbox: ToolSandbox | None = None
    memory_mb: float = ASSUMED_MB

    @property
    def alive(self) -> bool:
        return self.sandbox is not None and self.sandbox.alive

    @property
    def bindable(self) -> bool:
        """Whether a session's environment and limits can be given to it now."""
        return self.sandbox is not None and self.sandbox.has_worker

    @property
    def limits(self) -> Limits:
        """Those in effect."""
        return self.spec.limits if self.sandbox is None else self.sandbox.client.sandbox.spec.limits

    async def answers(self) -> bool:
        """A sign of life, which its worker also takes for one of the server's."""
        return self.sandbox is not None and await self.sandbox.answers()


class SpareMaker:
    """Starts and ends spares: whole, or nothing is left of them. Their ids are in `holdings` meanwhile."""

    def __init__(
        self,
        runtime: SandboxRuntime,
        images: Mapping[str, ToolImage],
        limits: Callable[[ToolImage], Limits],
        *,
        starts: Starts,
        holdings: Holdings,
        start_timeout_s: float,
        eras: Eras,
        may_reach_out: Callable[[ToolImage], bool] = lambda _image: False,
        counted: Callable[[], None] = lambda: None,
    ) -> None:
        """`limits`: what a session that asks for none gets of an image. `may_reach_out`: a session may have a way out of it.
        `counted` is told of each sandbox started.
        """
        self._runtime, self._images, self._limits = runtime, images, limits
        self._starts, self._holdings, self._start_timeout_s = starts, holdings, start_timeout_s
        self._eras, self._counted = eras, counted
        self._may_reach_out = may_reach_out
        self.expected_mb = ASSUMED_MB

    def limits(self, image_name: str) -> Limits:
        return self._limits(self._images[image_name])

    def unfit(self, image_name: str) -> str | None:
        """Why no spare can be made of an image, if none can."""
        image = self._images[image_name]
        if image.workspace != "rw":
            return "its image has no workspace of its own"
        return None

    def new(self, image_name: str) -> Spare:
        image = self._images[image_name]
        spec = SandboxSpec(
            sandbox_id=f"sbx_{secrets.token_hex(8)}",
            workspace_id=f"wsp_{secrets.token_hex(12)}",
            image=image.name,
            reference=image.reference,
            command=image.command,
            limits=self._limits(image),
            workspace=image.workspace,
            env=image.env,
            egress=self._may_reach_out(image),
        )
        return Spare(image_name, spec)

    async def start(self, spare: Spare) -> None:
        """Raises RuntimeUnavailable: then nothing is left of it."""
        spec = spare.spec
        self._holdings.sandboxes.add(spec.sandbox_id)
        self._holdings.workspaces.add(spec.workspace_id)
        tools = frozenset(tool.own_name for tool in self._images[spare.image].tools)
        try:
            await self._runtime.create_workspace(spec.workspace_id, spec.limits.disk_mb)
            spare.sandbox = await start_sandbox(
                self._runtime, self._starts, spec, tools, self._start_timeout_s, eras=self._eras
            )
        except BaseException:
            await self.end(spare)
            raise
        self._counted()
        used = await spare.sandbox.memory_bytes()
        if used is not None:
            spare.memory_mb = self.expected_mb = used / (1 << 20)

    async def end(self, spare: Spare) -> None:
        """Leave nothing of it. What could not be removed is nobody's from now on, and taken by a reconcile."""
        try:
            if spare.sandbox is not None:
                await spare.sandbox.close()
            await self._runtime.delete_workspace(spare.spec.workspace_id)
        except RuntimeUnavailable as problem:
            fields = {"sandbox_id": spare.spec.sandbox_id, "problem": str(problem)}
            _log.warning("spare_not_removed", extra={"fields": fields})
        finally:
            self._holdings.sandboxes.discard(spare.spec.sandbox_id)
            self._holdings.workspaces.discard(spare.spec.workspace_id)
