"""The workspace that the run's own ToolServer kept when the agent before this one was killed, taken into the run's store.

The server ends with its agent: it lets running calls finish, then leaves the workspace of each session as
`<session id>.tar`. Without it the files of a call that ran on would be gone with their session.
"""

from __future__ import annotations

import asyncio
import logging
import tarfile
from pathlib import Path

from agent.events import EventKind
from agent.store.base import Journal
from agent.tools.workspace_archive import unpack
from agent.tools.workspace_store import WorkspaceStore

_log = logging.getLogger(__name__)
_MAX_TOLD = 10


async def take_over(folder: Path, store: WorkspaceStore, journal: Journal) -> frozenset[str]:
    """The ids of the sessions whose workspace, as it was at their end, is in the store now. `folder` is empty afterwards.

    Only the session that the run opened last counts: what was before it went into it. To be called before the run goes
    on; killed on the way it does the same again. Raises JournalBroken.
    """
    last, taken = _last_session(journal), _taken_before(journal)
    archive = folder / f"{last}.tar"
    if last is not None and archive.is_file():
        notes: list[str] = []
        if await asyncio.to_thread(_merge, archive, store, notes):
            _journal_it(journal, last)
            taken |= {last}
        for text in notes[:_MAX_TOLD]:
            journal.append(EventKind.NOTE, {"text": text})
        if len(notes) > _MAX_TOLD:
            text = f"{len(notes) - _MAX_TOLD} more files are left out for reasons like these."
            journal.append(EventKind.NOTE, {"text": text})
    _clear(folder)
    return taken


def _merge(archive: Path, store: WorkspaceStore, notes: list[str]) -> bool:
    def left_out(path: str, why: str) -> None:
        notes.append(f"{path} is left out of the run's folder: {why}.")

    try:
        with archive.open("rb") as stream:
            unpack(stream, store, left_out)
    except (tarfile.TarError, EOFError, OSError) as problem:
        notes.append(f"The workspace that the ToolServer kept can't be read ({problem}); files may be missing.")
        return False
    return True


def _journal_it(journal: Journal, session_id: str) -> None:
    """A call of it that is still open may settle in a later process only, which must know as well."""
    open_calls = [call for call in _open_calls(journal) if call.get("session_id") == session_id]
    if open_calls:
        tools = ", ".join(sorted({str(call["tool"]) for call in open_calls}))
        text = (
            f"The agent ended while {tools} ran. The ToolServer kept the workspace, so the files of that call are here."
        )
        journal.append(EventKind.NOTE, {"text": text, "workspace_of": session_id})


def _open_calls(journal: Journal) -> list[dict[str, object]]:
    intended = {event.data["key"]: event.data for event in journal.events() if event.kind is EventKind.TOOL_INTENDED}
    for event in journal.events():
        if event.kind is EventKind.TOOL_SETTLED:
            intended.pop(event.data["key"], None)
    return list(intended.values())


def _last_session(journal: Journal) -> str | None:
    last = None
    for event in journal.events():
        if event.kind is EventKind.SESSION_OPENED:
            last = str(event.data["session_id"])
    return last


def _taken_before(journal: Journal) -> frozenset[str]:
    notes = (event.data for event in journal.events() if event.kind is EventKind.NOTE)
    return frozenset(str(data["workspace_of"]) for data in notes if "workspace_of" in data)


def _clear(folder: Path) -> None:
    for left in list(folder.glob("*.tar")) + list(folder.glob(".*.part")):
        try:
            left.unlink(missing_ok=True)
        except OSError as problem:
            _log.warning("the kept workspace %s could not be deleted: %s", left, problem)
