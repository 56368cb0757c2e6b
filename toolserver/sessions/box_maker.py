"""Makes the boxes of sessions: what a grant means for one image, and which sandboxes the pool has for it already."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from toolserver.catalog.catalog import Catalog
from toolserver.catalog.image import ToolImage
from toolserver.runtime.base import Limits, SandboxRuntime
from toolserver.sandbox.background import Background
from toolserver.sandbox.eras import Eras
from toolserver.sessions.box import Box, BoxPlan, BoxServices
from toolserver.sessions.claim import Claim, Wanted, claim
from toolserver.sessions.doors import Doors, Owner, WayOut, new_door
from toolserver.sessions.holdings import Holdings
from toolserver.sessions.pool import Pool
from toolserver.sessions.session import Grant
from toolserver.sessions.shared_box import SharedBoxes
from toolserver.sessions.spare import SpareMaker
from toolserver.sessions.starting import Starts
from toolserver.sessions.terms import Terms
from toolserver.settings import Settings
from toolserver.store.database import Database
from toolserver.store.sandboxes import SandboxRow

_PARALLEL_STARTS, _PARALLEL_ATTACHES = 4, 8


class BoxMaker:
    """Sessions and the pool start their sandboxes through it, a few at a time. The callables are as the registry has them."""

    def __init__(
        self,
        settings: Settings,
        runtime: SandboxRuntime,
        catalog: Catalog,
        database: Database,
        *,
        background: Background,
        holdings: Holdings,
        counted: Callable[[], None],
        claimed: Callable[[str], None],
        hot: Callable[[], bool],
        clock: Callable[[], float],
        eras: Eras,
        tools_seen: Callable[[str, list[dict[str, Any]]], str | None],
        doors: Doors,
    ) -> None:
        self._doors = doors
        self._settings, self._runtime, self._catalog, self._database = settings, runtime, catalog, database
        self._background, self._holdings = background, holdings
        self._counted, self._claimed = counted, claimed
        self._eras, self._tools_seen = eras, tools_seen
        self._starts = Starts(_PARALLEL_STARTS)
        self._shared = SharedBoxes()
        self._services = self._services_under(Terms(0, settings.session.lease_s))
        self.pool = self._make_pool(hot, clock)

    def begin_epoch(self, epoch: int) -> None:
        """Boxes that are made from here on fence off what servers of earlier epochs sent."""
        self._services = self._services_under(Terms(epoch, self._settings.session.lease_s))

    def make(
        self,
        tenant: str,
        session_id: str,
        workspace_id: str,
        image: ToolImage,
        grant: Grant,
        *,
        earlier: SandboxRow | None = None,
    ) -> Box:
        """`earlier`: the sandbox that an earlier server left it."""
        if image.scope == "shared" and image.kind == "mcp":
            return self._shared.join(tenant, session_id, self._shared_plan(tenant, image), self._services)
        return Box(self._plan(tenant, session_id, workspace_id, image, grant), self._services, earlier)

    def with_doors(self, grant: Grant, images: list[ToolImage]) -> Grant:
        """The same, with a door for each image that may reach out, now or when the session's egress is changed."""
        return replace(grant, doors={image.name: new_door() for image in images if self._doors.may_reach_out(image)})

    async def claim(self, tenant: str, session_id: str, images: list[ToolImage], grant: Grant) -> dict[str, Claim]:
        """What the pool has for the images that start with the session. The first that writes brings the workspace."""
        claims: dict[str, Claim] = {}
        for image in [image for image in images if image.pooled]:
            if any(claim.spare is not None for claim in claims.values()):
                claims[image.name] = Claim(None, "the session's workspace came with another sandbox")
            else:
                way_out = self._way_out(tenant, session_id, image, grant)
                wanted = Wanted(image.name, _lower(grant.limits, image), way_out, _env(grant, image))
                claims[image.name] = await claim(self.pool, self._runtime, wanted, self._services.terms.first)
            self._claimed("cold" if claims[image.name].spare is None else "warm")
        return claims

    def _way_out(self, tenant: str, session_id: str, image: ToolImage, grant: Grant) -> WayOut | None:
        door = grant.doors.get(image.name)
        if door is None:
            return None
        return self._doors.way_out(Owner(tenant, session_id, image.name), image, door, grant.egress)

    def _plan(self, tenant: str, session_id: str, workspace_id: str, image: ToolImage, grant: Grant) -> BoxPlan:
        return BoxPlan(
            session_id=session_id,
            workspace_id=workspace_id,
            image=image,
            limits=_lower(grant.limits, image),
            way_out=self._way_out(tenant, session_id, image, grant),
            env=_env(grant, image),
            # what an added image offers is compared with what was approved, as a whole
            expected_tools=frozenset(tool.own_name for tool in image.tools if image.origin == "builtin"),
            start_timeout_s=self._settings.runtime.start_timeout_s,
        )

    def _shared_plan(self, tenant: str, image: ToolImage) -> BoxPlan:
        """Of a sandbox of no session: it has no files, the limits of the settings, and all the egress that its image is granted."""
        limits = self._settings.limits
        usual = Limits(limits.memory_mb, limits.cpus, limits.pids, limits.disk_mb)
        grant = Grant(0, 0, (image.name,), self._runtime.effective_limits(usual), self._doors.most)
        return self._plan(tenant, "shared", "", replace(image, workspace="none"), self.with_doors(grant, [image]))

    def _make_pool(self, hot: Callable[[], bool], clock: Callable[[], float]) -> Pool:
        limits = self._settings.limits
        usual = Limits(limits.memory_mb, limits.cpus, limits.pids, limits.disk_mb)
        maker = SpareMaker(
            self._runtime,
            self._catalog.images,
            lambda image: _lower(self._runtime.effective_limits(usual), image),
            starts=self._starts,
            holdings=self._holdings,
            start_timeout_s=self._settings.runtime.start_timeout_s,
            eras=self._eras,
            may_reach_out=self._doors.may_reach_out,
            counted=self._counted,
        )
        eager = [image.name for image in self._catalog.images.values() if image.pooled]
        return Pool(self._settings.pool, maker, eager, may_start=lambda: self._starts.idle, hot=hot, clock=clock)

    def _services_under(self, terms: Terms) -> BoxServices:
        return BoxServices(
            runtime=self._runtime,
            database=self._database,
            background=self._background,
            holdings=self._holdings,
            terms=terms,
            starts=self._starts,
            attaches=asyncio.Semaphore(_PARALLEL_ATTACHES),
            counted=self._counted,
            eras=self._eras,
            tools_seen=self._tools_seen,
        )


def _env(grant: Grant, image: ToolImage) -> dict[str, str]:
    """What is bound late. Added images get nothing of the client's, which could turn their secrets over to it."""
    if image.origin == "added":
        return {}
    return {**grant.env, **{name: source.read() for name, source in image.secrets.items()}}


def _lower(asked: Limits, image: ToolImage) -> Limits:
    """The session's limits, below them where the image has its own."""
    own = image.limits
    return Limits(
        memory_mb=min(asked.memory_mb, own.memory_mb or asked.memory_mb),
        cpus=min(asked.cpus, own.cpus or asked.cpus),
        pids=min(asked.pids, own.pids or asked.pids),
        disk_mb=min(asked.disk_mb, own.disk_mb or asked.disk_mb),
    )
