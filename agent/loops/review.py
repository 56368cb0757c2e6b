"""Judging a submitted attempt: what code can tell comes first, and only what passes goes to the critic."""

from __future__ import annotations

import posixpath

from agent.planning.task import TaskNode
from agent.roles import critic
from agent.roles.desk import Desk, NoValidAnswer
from agent.store.fold import RunState
from agent.trajectory.attempt import Attempt
from agent.trajectory.step import Judgement, Submission

_WORKSPACE = "/workspace/"
_NOTHING = Submission(success=False, result="", reason="nothing was handed in")


def relative(path: str) -> str:
    """A workspace path in one form, however a tool or a model wrote it."""
    return posixpath.normpath(path.removeprefix(_WORKSPACE) or ".").lstrip("/")


def written_paths(state: RunState) -> list[str]:
    """All files that calls of this run wrote, as the outcomes name them, and those that were there at the start."""
    written = {relative(path) for attempt in state.attempts.values() for path in attempt.touched_paths}
    return sorted(written | {relative(str(f.get("path", ""))) for f in state.files} - {"."})


def problems(node: TaskNode, submission: Submission, written: list[str]) -> list[str]:
    """What is wrong without asking anyone, as sentences."""
    if not submission.success:
        return [submission.reason or "it was handed in without success and without a reason"]
    found = [
        f"The declared output {name} was not handed over." for name in node.outputs if name not in submission.outputs
    ]
    return found + [
        f"The file {path} must exist, but no tool call reported writing it."
        for path in node.artifacts
        if relative(path) not in written
    ]


async def review(desk: Desk, state: RunState, node: TaskNode, attempt: Attempt) -> Judgement:
    """A task whose critic gives no valid verdict has failed: success is never silent."""
    written = written_paths(state)
    found = problems(node, attempt.submission or _NOTHING, written)
    if found:
        return Judgement(passed=False, criticism=" ".join(found), by="checks")
    try:
        return await critic.judge(desk, state, node, attempt, written)
    except NoValidAnswer as problem:
        return Judgement(passed=False, criticism=f"It could not be judged: {problem}", by="checks")
