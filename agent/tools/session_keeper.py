"""The run's one session on the ToolServer: opened when first needed, opened again with its workspace when it is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from agent.events import EventKind
from agent.store.base import Journal
from agent.tools.workspace_sync import WorkspaceSync
from agent.toolserver_client.client import ToolServerClient
from agent.toolserver_client.errors import ClientProblem, ToolServerAnswer

_log = logging.getLogger(__name__)
_CLOSE_S = 10.0


class SessionKeeper:
    """Not opened before `ensure`. A run that is resumed goes on in the session that its journal names, if that still lives."""

    def __init__(
        self, client: ToolServerClient, journal: Journal, sync: WorkspaceSync, asked: Mapping[str, Any]
    ) -> None:
        self._client, self._journal, self._sync, self._asked = client, journal, sync, asked
        self._session_id: str | None = None
        self._earlier = _last_session(journal)
        self._turn = asyncio.Lock()
        self._openings = 0  # in this run so far, earlier processes included as one
        self._told: dict[str, int] = {}  # task -> the opening it knows of
        self._why, self._notice = "", ""

    @property
    def session_id(self) -> str | None:
        """The open session, None before the first call and after one was lost."""
        return self._session_id

    async def ensure(self) -> str:
        """The id of a session that was alive when last seen. Raises ToolServerAnswer, NoAnswer."""
        async with self._turn:
            if self._session_id is None and self._earlier is not None:
                await self._adopt(self._earlier)
            if self._session_id is None:
                await self._open()
            assert self._session_id is not None  # noqa: S101 - for the type checker
            return self._session_id

    async def existing(self) -> str | None:
        """The open session, or the one of an earlier process if that still lives. Opens none and never raises."""
        async with self._turn:
            if self._session_id is None and self._earlier is not None:
                try:
                    await self._adopt(self._earlier)
                except ClientProblem as problem:
                    _log.warning("the session %s could not be looked at: %s", self._earlier, problem)
            return self._session_id

    def lost(self, session_id: str, why: str) -> None:
        """The ToolServer says that the session is gone. The next `ensure` opens another."""
        if session_id == self._session_id:
            self._session_id, self._why = None, why

    def notice(self, task_id: str) -> str:
        """What a task must know about its session, once; empty when nothing happened to it."""
        known, self._told[task_id] = self._told.get(task_id, 1), max(self._openings, 1)
        return self._notice if known < self._openings else ""

    def leave(self) -> None:
        """Let go of the session without ending it: a call of it is open, and the next process looks for its files there."""
        self._session_id = None

    async def close(self) -> None:
        """End the session. One warning when that can't be done; the ToolServer then ends it by itself when it is idle."""
        session_id, self._session_id = self._session_id, None
        if session_id is None:
            return
        try:
            await self._client.delete_session(session_id, within_s=_CLOSE_S)
        except ClientProblem as problem:
            _log.warning("the session %s could not be ended: %s It ends by itself when idle.", session_id, problem)

    async def _adopt(self, earlier: str) -> None:
        try:
            await self._client.session(earlier)
        except ToolServerAnswer as refused:
            if refused.code not in ("session_gone", "session_not_found"):
                raise
            self._why = cause_of(refused)
        else:
            self._session_id = earlier
        self._earlier = None
        self._openings = 1

    async def _open(self) -> None:
        first = self._openings == 0
        session = await self._client.create_session(**{"labels": {"run": self._journal.run_id[:64]}, **self._asked})
        try:
            files = await self._sync.fill(session.id)
        except BaseException:
            await self._give_up(session.id)
            raise
        data = {"session_id": session.id, "reason": "first" if first else "gone", "restored_files": files}
        self._journal.append(EventKind.SESSION_OPENED, data)
        self._openings += 1
        self._session_id = session.id
        if not first:
            self._notice = (
                f"[The session was gone ({self._why or 'unknown cause'}), so a new one was opened. Python variables, "
                f"open shells and background commands are lost. {files} files of the workspace were restored.]"
            )

    async def _give_up(self, session_id: str) -> None:
        """A session without its files must not be used, nor be left open."""
        try:
            await self._client.delete_session(session_id, within_s=2.0)
        except ClientProblem as problem:
            _log.warning("the session %s could not be ended: %s", session_id, problem)


def _last_session(journal: Journal) -> str | None:
    last = None
    for event in journal.events():
        if event.kind is EventKind.SESSION_OPENED:
            last = str(event.data["session_id"])
    return last


def cause_of(refused: ToolServerAnswer) -> str:
    """Why a session is gone, as the ToolServer names it: idle, expired, deleted, oom, node_lost, ..."""
    return str(refused.detail.get("cause") or refused.code)
