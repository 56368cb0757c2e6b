"""What a run leaves in its folder: answer, result, manifest and report, each written whole or not at all.

    answer.md        the answer as the model wrote it
    result.json      the outcome for programs; its fields are in docs/reference/agent-cli.md
    artifacts.json   the files of the workspace with their hashes, and which task and call made each
    report.html      the same for people

All are made from the journal and the workspace alone, so they can be made again at any time, with the same bytes.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agent.budget import Cost
from agent.events import Event
from agent.report.artifacts import Manifest, manifest
from agent.report.html import render
from agent.report.story import Story, tell

WORKSPACE = "workspace"  # the run's files, kept there by the workspace store
REPORT, RESULT, ARTIFACTS, ANSWER = "report.html", "result.json", "artifacts.json", "answer.md"


def write(folder: Path, events: Iterable[Event]) -> dict[str, Any]:
    """Write all four files of a run and return what is in result.json. Raises OSError."""
    story, workspace = tell(events), folder / WORKSPACE
    files = manifest(story, workspace)
    result = result_of(story, files)
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / ANSWER, story.run.answer.rstrip("\n") + "\n" if story.run.answer else "")
    _replace(folder / ARTIFACTS, _json([asdict(entry) for entry in files.artifacts]))
    _replace(folder / REPORT, render(story, files, workspace))
    _replace(folder / RESULT, _json(result))  # last: who sees it finds the others
    return result


def write_report(folder: Path, events: Iterable[Event], target: Path) -> None:
    """Make the report again, at `target`."""
    story, workspace = tell(events), folder / WORKSPACE
    target.parent.mkdir(parents=True, exist_ok=True)
    _replace(target, render(story, manifest(story, workspace), workspace))


def result_of(story: Story, files: Manifest) -> dict[str, Any]:
    """The run for programs. Times are ISO 8601 in UTC, `seconds` those in which a process worked on the run."""
    run = story.run
    return {
        "schema": 1,
        "run_id": run.run_id,
        "state": run.state,
        "exit_code": run.exit_code,
        "goal": run.goal,
        "answer": run.answer,
        "reason": run.reason,
        "started_at": _time(run.started_at),
        "ended_at": None if run.ended_at is None else _time(run.ended_at),
        "seconds": round(run.seconds, 3),
        "resumes": run.resumes,
        "tasks": [_task(story, task_id) for task_id in (node.id for node in run.plan.walk())],
        "costs": {
            "total": _cost(run.cost),
            "usd_known": story.usd_known,
            "by_role": {role: _cost(story.cost_of_role(role)) for role in sorted(story.spending)},
        },
        "bound": asdict(run.bound),
        "budget": run.settings.get("budget") or {},
        "artifacts": [asdict(entry) for entry in files.artifacts],
        "artifacts_left_out": files.left_out,
        "notes": list(run.notes),
        "events": run.seq,
        "journal_hash": story.last_hash,
        "toolcrib": run.version,
    }


def _task(story: Story, task_id: str) -> dict[str, Any]:
    node = story.run.plan[task_id]
    return {
        "id": node.id,
        "parent": node.parent,
        "goal": node.goal,
        "depends_on": list(node.depends_on),
        "state": str(node.state),
        "reason": node.reason,
        "attempts": node.attempt,
        "result": node.result,
        "outputs": node.output_values,
        "criticism": node.criticism,
        "cost": _cost(story.run.cost_of(task_id)),
    }


def _cost(cost: Cost) -> dict[str, Any]:
    return {**asdict(cost), "usd": round(cost.usd, 6)}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2) + "\n"


def _replace(target: Path, text: str) -> None:
    """Write beside the target and move into place, so that a reader never sees half a file."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
