"""The last steps of a call: its files are fetched, its pictures kept, and what the model reads is put into words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agent.tools.catalog import nearest
from agent.tools.delivery import Settled
from agent.tools.outcome import Invocation, Outcome, OutcomeKind
from agent.tools.result_summary import Picture, Report, Summariser, observation, picture_name, pictures_in
from agent.tools.session_keeper import SessionKeeper
from agent.tools.workspace_sync import Note, WorkspaceSync
from agent.toolserver_client.wire import RemoteOutcome

_MAX_NAMES = 60
_MAX_CONTENT_CHARS = 1 << 20  # of one outcome in the journal; pictures beyond are in the workspace alone
# after these a short list of changed files proves nothing: whoever would have looked may have died
_ABRUPT = frozenset(
    {"tool_crashed", "oom_killed", "disk_full", "deadline_exceeded", "still_running", "cancelled", "outcome_unknown"}
)
_KEY_SETTING = "AGENT_TOOLSERVER__API_KEY"
_CUT_OFF = "The run was interrupted while it ran. The files that it had changed by then are kept."
_AFTER_CUT = (
    "If the session ended with the run, Python variables, open shells and background commands are gone. "
    "See how far it came before doing it again."
)


class NotFetched(Exception):  # noqa: N818 - a state of the files
    """Files of a call could not be fetched. The message says why."""


class Settlement:
    def __init__(  # noqa: PLR0917 - made in one place
        self,
        url: str,
        keeper: SessionKeeper,
        sync: WorkspaceSync,
        max_chars: int,
        summarise: Summariser | None,
        note: Note,
        kept: frozenset[str] = frozenset(),
    ) -> None:
        """`kept`: sessions that are gone, but whose files are in the run's store as they were at the end."""
        self._url, self._keeper, self._sync, self._note, self._kept = url, keeper, sync, note, kept
        self._max_chars, self._summarise = max_chars, summarise

    async def outcome(
        self,
        invocation: Invocation,
        call_id: str,
        settled: Settled,
        *,
        names: tuple[str, ...] = (),
        session_id: str = "",
        session_lost: bool = False,
        interrupted: bool = False,
    ) -> Outcome:
        """The outcome, with the run's folder brought up to date. Raises what the summariser raises.

        `session_id` is the session that the call was sent to, `session_lost` says that it is gone. `interrupted`: the run
        ends now, so no model is asked. Raises NotFetched then while the call's files are not all here.
        """
        known, kind = settled.known, settled.meaning.kind
        pictures: list[Picture] = []
        problem, lost = "", session_lost
        if settled.meaning.executed != "none":
            alive = None if session_lost else await self._keeper.existing()
            if alive is not None and session_id in (alive, ""):
                problem, lost = await self._fetch(settled, alive), False
            else:
                lost = session_id not in self._kept
            if interrupted and (lost or problem):
                raise NotFetched(problem or "its session is gone")
            if lost:
                problem = self._tell_loss(invocation, settled)
            if lost:  # what is gone with its session must not pass for a file that was written
                known = known.model_copy(update={"workspace_changed": [], "artifacts": []})
            pictures = await self._keep_pictures(known, call_id, self._keeper.session_id)
            known = _with_pictures(known, pictures)
        notices = (self._keeper.notice(invocation.task_id), f"[{problem}]" if problem else "")
        cut_off = interrupted and kind is OutcomeKind.CANCELLED
        report = Report(
            kind,
            settled.code,
            _CUT_OFF if cut_off else self._message(invocation, settled, names),
            _AFTER_CUT if cut_off else self.advice_for(settled, session_lost=lost),
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
            observation=await observation(report, self._max_chars, None if interrupted else self._summarise),
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

    def _tell_loss(self, invocation: Invocation, settled: Settled) -> str:
        """What the model must know of a call whose files are gone with its session; the report is told as well."""
        changed = ", ".join(settled.known.workspace_changed or [])[:500]
        call = f"the call of {invocation.tool} at {invocation.key}"
        if not changed:
            if settled.meaning.kind is OutcomeKind.UNKNOWN:
                self._note(
                    f"The session of {call} is gone. What that call did to files is lost, and how it ended unknown."
                )
            return ""
        self._note(f"The session of {call} ended before the files that it changed could be fetched: {changed}.")
        return (
            f"The session ended before the files that this call changed could be fetched: {changed}. "
            "They are lost: make them again if they are needed."
        )

    async def _fetch(self, settled: Settled, session_id: str) -> str:
        """Bring the run's folder up to date; what the model must know if that is not possible."""
        known = settled.known
        changed = list(known.workspace_changed or [])
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
