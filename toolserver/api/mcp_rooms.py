"""The ToolServer sessions that MCP clients work in: made at the first call, found again by their labels, also after a restart.

A session of this kind is named by its key and a name of the client's: the id of its MCP session, or in the stateless
revision what it sent as `Toolcrib-Session`. Its key alone uses it here; its tenant sees it among its sessions as any other.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from toolserver.api import sessions, wire
from toolserver.api.services import Services
from toolserver.sessions.session import Session
from toolserver.store.keys import Key

LABEL_NAME, LABEL_KEY = "mcp.session", "mcp.key"
NAME_FORM = "1 to 64 of letters, digits, - and _, or the id of a session"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_REMEMBERED = 4096
_SESSION_ID = re.compile(r"ses_[0-9a-f]{24}")


@dataclass(frozen=True)
class Room:
    """`began_anew`: the client had a session by that name, and it ended."""

    session: Session
    began_anew: bool = False


class Rooms:
    def __init__(self) -> None:
        self._making: dict[tuple[str, str], asyncio.Task[Session]] = {}
        self._had: OrderedDict[tuple[str, str], str] = OrderedDict()  # the last session of each name

    def find(self, crib: Services, key: Key, name: str) -> Session | None:
        """The live session of that name, or of the tenant with that id."""
        for session in crib.registry.listing(key.tenant):
            labels = session.grant.labels
            if labels.get(LABEL_NAME) == name and labels.get(LABEL_KEY) == key.key_id:
                return session
            if session.session_id == name:
                return session
        return None

    async def enter(self, crib: Services, key: Key, name: str, labels: Mapping[str, str]) -> Room:
        """The session of that name, made if there is none: once, however many ask at a time.

        A name that is the id of a session means that one, of any origin. Raises session_not_found, session_gone,
        quota_exceeded, no_capacity, RuntimeUnavailable, StoreUnavailable.
        """
        if _SESSION_ID.fullmatch(name):
            return Room(await crib.registry.find(key.tenant, name))
        place = (key.key_id, name)
        if (session := self.find(crib, key, name)) is not None:
            self._remember(place, session)
            return Room(session)
        task = self._making.get(place)
        if task is None:
            task = crib.registry.background.spawn(self._make(crib, key, name, labels), f"session of MCP {name[:16]}")
            self._making[place] = task
            task.add_done_callback(lambda _: self._making.pop(place, None))
        session = await asyncio.shield(task)
        anew = self._had.get(place, session.session_id) != session.session_id
        self._remember(place, session)
        return Room(session, began_anew=anew)

    async def _make(self, crib: Services, key: Key, name: str, labels: Mapping[str, str]) -> Session:
        crib.readiness.check_phase()
        body = wire.SessionBody(
            ttl_s=crib.settings.session.max_ttl_s,
            egress=wire.EgressBody(mode=crib.settings.mcp.egress, allow=list(crib.settings.mcp.egress_allow)),
            labels={LABEL_NAME: name, LABEL_KEY: key.key_id, **labels},
        )
        return await crib.registry.create(
            key.tenant, sessions.grant_of(body, crib), key_id=key.key_id, wait_s=crib.settings.queue.wait_s
        )

    def _remember(self, place: tuple[str, str], session: Session) -> None:
        self._had[place] = session.session_id
        self._had.move_to_end(place)
        if len(self._had) > _REMEMBERED:
            self._had.popitem(last=False)


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None
