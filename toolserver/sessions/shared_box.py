"""A sandbox that serves all sessions of a tenant, of images whose scope is `shared`: begun at its first call, ended with its last session."""

from __future__ import annotations

from collections.abc import Callable

from toolserver.egress.policy import EgressPolicy
from toolserver.sandbox.tool_sandbox import ToolSandbox
from toolserver.sessions.box import Box, BoxPlan, BoxServices


class SharedBox(Box):
    """The box of many sessions. A later server starts a fresh one: what ran in it then is unknown, as `first_candidate` says."""

    def __init__(self, plan: BoxPlan, services: BoxServices, emptied: Callable[[], None]) -> None:
        """`emptied` is told when no session has it any more, before it is ended."""
        super().__init__(plan, services)
        self._emptied = emptied
        self._users: set[str] = set()

    def join(self, session_id: str) -> None:
        self._users.add(session_id)

    @property
    def first_candidate(self) -> int | None:
        return None

    async def close(self, session_id: str) -> None:
        self._users.discard(session_id)
        if not self._users:
            self._emptied()
            await super().close(session_id)

    async def set_egress(self, policy: EgressPolicy) -> None:
        """It has what its image was granted, whatever one of its sessions has: see Admission."""

    async def release(self) -> None:
        """No later server would find it again."""
        self._emptied()
        await super().close("")

    async def _record(self, started: ToolSandbox) -> None:
        del started
        self._generation += 1


class SharedBoxes:
    """Those that there are, by tenant and image."""

    def __init__(self) -> None:
        self._boxes: dict[tuple[str, str], SharedBox] = {}

    def join(self, tenant: str, session_id: str, plan: BoxPlan, services: BoxServices) -> SharedBox:
        """The tenant's box of the image of `plan`, made when there is none; the session has to close it."""
        key = (tenant, plan.image.name)
        box = self._boxes.get(key)
        if box is None or box.plan.image != plan.image:  # the image was changed: sessions that are there keep theirs
            box = self._boxes[key] = SharedBox(plan, services, lambda: self._forget(key, box))
        box.join(session_id)
        return box

    def _forget(self, key: tuple[str, str], box: SharedBox | None) -> None:
        if self._boxes.get(key) is box:
            del self._boxes[key]
