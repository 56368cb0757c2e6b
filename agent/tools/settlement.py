"""The last steps of a call: its files are fetched, its pictures kept, and what the model reads is put into words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agent.tools.catalog import nearest
from agent.tools.delivery import Settled
from agent.tools.outcome import Invocation, Outcome, OutcomeKind
from agent.tools.result_summary import Picture, Report, Summariser, observation, picture_name, pictures_in
from agent.tools.session_keeper import SessionKeeper
from agent.tools.workspace_sync import WorkspaceSync
from agent.toolserver_client.wire import RemoteOutcome

_MAX_NAMES = 60
_MAX_CONTENT_CHARS = 1 << 20  # of one outcome in the journal; pictures beyond are in the workspace alone
# after these a short list of changed files proves nothing: whoever would have looked may have died
_ABRUPT = frozenset(
    {"tool_crashed", "oom_killed", "disk_full", "deadline_exceeded", "still_running", "cancelled", "outcome_unknown"}
)
_KEY_SETTING = "AGENT_TOOLSERVER__API_KEY"


class Settlement:
    def __init__(
        self, url: str, keeper: SessionKeeper, sync: WorkspaceSync, max_chars: int, summarise: Summariser | None
    ) -> None:
        self._url, self._keeper, self._sync = url, keeper, sync
        self._max_chars, self._summarise = max_chars, summarise

    async def outcome(
        self,
        invocation: Invocation,
        call_id: str,
        settled: Settled,
        *,
        names: tuple[str, ...] = (),
        session_lost: bool = False,
    ) -> Outcome:
        """The outcome, with the run's folder brought up to date. Raises what the summariser raises."""
        known, kind = settled.known, settled.meaning.kind
        pictures: list[Picture] = []
        problem = ""
        if settled.meaning.executed != "none":
            session_id = None if session_lost else await self._keeper.existing()
            problem = await self._fetch(settled, session_id)
            if session_id is None:  # what is gone with its session must not pass for a file that was written
                known = known.model_copy(update={"workspace_changed": [], "artifacts": []})
            pictures = await self._keep_pictures(known, call_id, session_id)
            known = _with_pictures(known, pictures)
        notices = (self._keeper.notice(invocation.task_id), f"[{problem}]" if problem else "")
        report = Report(
            kind,
            settled.code,
            self._message(invocation, settled, names),
            self.advice_for(settled, session_lost=session_lost),
            known,
            settled.detail,
            tuple(notice for notice in notices if notice),
            tuple(pictures),
        )
        return Outcome(
            kind=kind,
            tool=invocation.tool,
            call_id=call_id,
            code=settled.code,
            observation=await observation(report, self._max_chars, self._summarise),
            executed=settled.meaning.executed,
            content=_bounded(known.content),
            structured=known.structured,
            artifacts=known.artifacts,
            workspace_changed=known.workspace_changed or [],
            usage=known.usage,
            trace_id=known.trace_id,
        )

    def advice_for(self, settled: Settled, *, session_lost: bool = False) -> str:
        """What to do, where it depends on more than the kind; empty when it does not."""
        kind, code, seconds = settled.meaning.kind, settled.code, settled.retry_in_s
        if kind is OutcomeKind.UNKNOWN and session_lost:
            return (
                "The session that it ran in is gone. The workspace is restored to the state before this call, so its files "
                "may be missing; effects outside the workspace may have happened. Check before doing it again."
            )
        if kind not in (OutcomeKind.UNAVAILABLE, OutcomeKind.DENIED):
            return ""
        if code == "breaker_open":
            return f"It failed too often in a row and is left alone for now. Try again in {max(seconds or 1, 1):.0f} s, or go on without it."
        if code in ("unauthorized", "forbidden"):
            return f"The ToolServer at {self._url} does not accept the key. Set {_KEY_SETTING} to a key that it knows, then resume the run."
        if kind is OutcomeKind.UNAVAILABLE and seconds is not None:
            return f"The ToolServer asks to be tried again in {seconds:.0f} s. Go on without it meanwhile."
        return ""

    def _message(self, invocation: Invocation, settled: Settled, names: tuple[str, ...]) -> str:
        if settled.meaning.kind is not OutcomeKind.UNKNOWN_TOOL:
            return settled.message
        meant = nearest(invocation.tool, list(names)) or [
            str(name) for name in settled.detail.get("suggestions") or [] if isinstance(name, str)
        ]
        guess = f" Did you mean {' or '.join(meant)}?" if meant else ""
        shown = ", ".join(sorted(names)[:_MAX_NAMES]) or "none"
        return f"{invocation.tool[:80]!r} is not the name of a tool.{guess} The tools are: {shown}."

    async def _fetch(self, settled: Settled, session_id: str | None) -> str:
        """Bring the run's folder up to date; what the model must know if that is not possible."""
        known = settled.known
        changed = list(known.workspace_changed or [])
        if session_id is None:
            return (
                f"The session ended before the files that this call changed could be fetched: {', '.join(changed)[:500]}. "
                "They are lost: make them again if they are needed."
                if changed
                else ""
            )
        abrupt = settled.meaning.kind is OutcomeKind.UNKNOWN or (settled.code in _ABRUPT and not changed)
        paths = changed + [
            str(artifact["path"]) for artifact in known.artifacts if isinstance(artifact.get("path"), str)
        ]
        return await self._sync.pull(session_id, paths, everything=abrupt or known.workspace_changed_more)

    async def _keep_pictures(self, known: RemoteOutcome, call_id: str, session_id: str | None) -> list[Picture]:
        """Pictures that are no artifact of the call yet are put into the workspace, where report and model find them."""
        saved = iter([a for a in known.artifacts if str(a.get("media_type")).startswith("image/")])
        kept = []
        for number, picture in enumerate(pictures_in(known.content), 1):
            artifact = next((a for a in saved if a.get("bytes") == len(picture.data)), None)
            if artifact is not None:
                kept.append(replace(picture, path=str(artifact["path"])))
                continue
            name = picture_name(picture, call_id, number)
            kept.append(replace(picture, path=name if await self._sync.add(session_id, name, picture.data) else None))
        return kept


def _with_pictures(known: RemoteOutcome, pictures: list[Picture]) -> RemoteOutcome:
    named = {artifact.get("path") for artifact in known.artifacts}
    more = [
        {"path": picture.path, "bytes": len(picture.data), "media_type": picture.media_type}
        for picture in pictures
        if picture.path is not None and picture.path not in named
    ]
    return known.model_copy(update={"artifacts": known.artifacts + more}) if more else known


def _bounded(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What goes into the journal: large data of pictures and the like is left out, it lies in the workspace."""
    room, kept = _MAX_CONTENT_CHARS, []
    for block in content:
        data = block.get("data")
        if isinstance(data, str):
            if len(data) > room:
                block = {name: item for name, item in block.items() if name != "data"} | {"data_left_out": len(data)}  # noqa: PLW2901
            else:
                room -= len(data)
        kept.append(block)
    return kept
