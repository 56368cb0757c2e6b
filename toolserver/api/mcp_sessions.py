"""The revisions of MCP that have sessions: what is known of each client between `initialize` and its end."""

from __future__ import annotations

import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from toolserver.api.mcp_elicitation import modes
from toolserver.api.mcp_messages import RpcFault, RpcId
from toolserver.api.mcp_revisions import NEWEST_WITH_SESSIONS, REVISIONS, Revision
from toolserver.api.mcp_rooms import LABEL_NAME, Rooms
from toolserver.api.mcp_told import Flight
from toolserver.api.services import Services
from toolserver.sessions.session import Session
from toolserver.store.keys import Key

LABEL_REVISION, LABEL_CLIENT, LABEL_ELICITS = "mcp.revision", "mcp.client", "mcp.elicits"
_FORM = re.compile(r"mcp_[0-9a-f]{32}")
_MOST, _MOST_OF_KEY = 4096, 512  # beyond it the one that was unused longest gives way


@dataclass
class McpSession:
    """`room`: the id of its ToolServer session, once there is one.

    `listener` numbers its streams for changes: the last one holds; `listeners` are those that are open.
    """

    session_id: str
    key_id: str
    revision: Revision
    client: str
    elicits: frozenset[str]
    used: float
    room: str | None = None
    log_level: int | None = None
    flights: dict[RpcId, Flight] = field(default_factory=dict)
    listener: int = 0
    listeners: int = 0
    ended: bool = False

    @property
    def busy(self) -> bool:
        return bool(self.flights or self.listeners)

    @property
    def labels(self) -> dict[str, str]:
        told = {LABEL_REVISION: self.revision.name, LABEL_CLIENT: self.client}
        return told | ({LABEL_ELICITS: " ".join(sorted(self.elicits))} if self.elicits else {})


class McpSessions:
    """Found by the key that began them only. With its ToolServer session a session outlives a restart; without, it is in memory alone."""

    def __init__(self, rooms: Rooms, clock: Callable[[], float] = time.monotonic) -> None:
        self._rooms, self._clock = rooms, clock
        self._live: OrderedDict[str, McpSession] = OrderedDict()

    def begin(self, key: Key, requested: str, params: dict[str, Any]) -> McpSession:
        """Of the revision that is asked for when it is spoken here, else of the newest."""
        revision = REVISIONS.get(requested, NEWEST_WITH_SESSIONS)
        if revision.stateless:
            revision = NEWEST_WITH_SESSIONS
        elicits = modes(params.get("capabilities"))
        session = McpSession(
            f"mcp_{secrets.token_hex(16)}", key.key_id, revision, _client(params), elicits, self._clock()
        )
        mine = [known for known in self._live.values() if known.key_id == key.key_id]
        if len(mine) >= _MOST_OF_KEY:
            self._give_way(mine)
        elif len(self._live) >= _MOST:
            self._give_way(list(self._live.values()))
        self._live[session.session_id] = session
        return session

    def _give_way(self, known: list[McpSession]) -> None:
        """One that has a ToolServer session is found again by that."""
        self._drop(next((session for session in known if not session.busy), known[0]))

    def find(self, crib: Services, key: Key, session_id: str) -> McpSession:
        """Raises RpcFault 404: there is none, or it was not used for long, or its ToolServer session has ended."""
        now = self._clock()
        session = self._live.get(session_id)
        if session is None:
            session = self._again(crib, key, session_id)
        room = None if session is None else self._rooms.find(crib, key, session.session_id)
        if session is None or session.key_id != key.key_id:
            raise _not_found()
        if room is not None:
            session.room = room.session_id
        elif session.room is not None or (not session.busy and now - session.used >= crib.settings.session.idle_s):
            self._drop(session)
            raise _not_found()
        session.used = now
        self._live.move_to_end(session_id)
        return session

    def _again(self, crib: Services, key: Key, session_id: str) -> McpSession | None:
        """One that an earlier process of the server began."""
        if _FORM.fullmatch(session_id) is None:
            return None
        room = self._rooms.find(crib, key, session_id)
        if room is None:
            return None
        labels = room.grant.labels
        revision = REVISIONS.get(labels.get(LABEL_REVISION, ""), NEWEST_WITH_SESSIONS)
        name, client = labels[LABEL_NAME], labels.get(LABEL_CLIENT, "")
        elicits = frozenset(labels.get(LABEL_ELICITS, "").split())
        session = McpSession(name, key.key_id, revision, client, elicits, self._clock(), room.session_id)
        self._live[name] = session
        return session

    def room_of(self, crib: Services, key: Key, session: McpSession) -> Session | None:
        return self._rooms.find(crib, key, session.session_id)

    async def end(self, crib: Services, key: Key, session: McpSession, wait_s: float) -> None:
        self._drop(session)
        room = self._rooms.find(crib, key, session.session_id)
        if room is not None:
            await crib.registry.delete(room, wait_s, key_id=key.key_id)

    def _drop(self, session: McpSession) -> None:
        session.ended = True
        self._live.pop(session.session_id, None)


def _not_found() -> RpcFault:
    told = (
        "There is no such MCP session: it ended, or it is another key's. Send initialize again, without Mcp-Session-Id."
    )
    return RpcFault(404, told, status=404)


def _client(params: dict[str, Any]) -> str:
    """What a client calls itself, as a label."""
    info = params.get("clientInfo")
    name = info.get("name") if isinstance(info, dict) else None
    return name[:128] if isinstance(name, str) else ""
