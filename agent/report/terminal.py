"""Runs and checks as text for a terminal. Nothing here is markup of a model's: texts are shown as they are, made visible."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.markdown import Markdown
from rich.padding import Padding
from rich.text import Text

from agent.budget import Cost
from agent.report import folder
from agent.report.artifacts import Manifest
from agent.report.figures import count, money, size
from agent.report.live import task_line
from agent.report.plain_text import one_line, visible
from agent.report.story import Story

STYLES = {"done": "green", "failed": "red", "stopped": "yellow", "interrupted": "yellow", "running": "cyan"}
_MAX_FILES = 12


class Check(Protocol):
    """One line of `agent doctor`."""

    @property
    def name(self) -> str: ...
    @property
    def ok(self) -> bool: ...
    @property
    def text(self) -> str: ...


# what the reason of a stop says of the allowance that ran out → its option
_RAN_OUT = {
    "model calls are used": "--max-llm-calls N", "tool calls are used": "--max-tool-calls N",
    "tokens are used": "--max-tokens N", "are spent": "--max-usd X", "seconds are used up": "--max-seconds S",
}  # fmt: skip


def print_end(out: Console, progress: Console, run_folder: Path, result: dict[str, Any], again: str) -> None:
    """The answer on `out`; state, costs and where things are on `progress`. `again` is the command that goes on."""
    state, reason = str(result["state"]), str(result["reason"])
    _print_answer(out, str(result["answer"]))
    headline = Text.assemble(
        (state, f"bold {STYLES.get(state, '')}"),
        f"  {_costs(Cost(**result['costs']['total']), known=result['costs']['usd_known'])}, {result['seconds']:.0f} s",
    )
    progress.print(headline, soft_wrap=True)
    if reason and state != "done" and reason not in str(result["answer"]):
        progress.print(Text(visible(reason)), soft_wrap=True)
    made = [entry for entry in result["artifacts"] if entry["step"]]
    for entry in made[:_MAX_FILES]:
        _print_place(
            progress,
            "file",
            run_folder / folder.WORKSPACE / entry["path"],
            f" ({size(entry['bytes'])}, {entry['made_by']})",
        )
    if len(made) > _MAX_FILES:
        _print_place(progress, "files", run_folder / folder.WORKSPACE, f" ({len(made) - _MAX_FILES} more)")
    _print_place(progress, "report", run_folder / folder.REPORT)
    if state in {"stopped", "interrupted"}:
        option = option_that_ran_out(reason) if result["exit_code"] == 3 else ""
        raised = " with a higher budget" if option else ""
        progress.print(Text(f"To go on{raised}: {again} {option}".rstrip()), soft_wrap=True)


def option_that_ran_out(reason: str) -> str:
    """The option that raises the allowance which `reason` says is used up; empty when it names none."""
    return next((option for text, option in _RAN_OUT.items() if text in reason), "")


def print_run(console: Console, story: Story, files: Manifest) -> None:
    """What `agent show` prints."""
    run = story.run
    state = Text(run.state, style=STYLES.get(run.state, ""))
    console.print(Text.assemble((run.run_id, "bold"), "  ", state, f"  {moment(run.started_at)}"))
    console.print(Text(visible(run.goal)))
    if run.reason and run.state != "done":
        console.print(Text(visible(run.reason), style=STYLES.get(run.state, "")))
    for node in run.plan.walk():
        attempts = run.attempts_of(node.id)
        indent = 2 * run.plan.depth(node.id)
        console.print(Padding(task_line(node, attempts), (0, 0, 0, indent)))
        for attempt in attempts:
            for step in attempt.steps.values():
                calls = ", ".join(f"{call.tool} {(call.outcome or {}).get('kind', '')}".strip() for call in step.calls)
                line = f"a{attempt.n} s{step.n}  {calls}" + (f"  {one_line(step.thought, 100)}" if step.thought else "")
                console.print(Padding(Text(line, style="dim"), (0, 0, 0, indent + 4)))
    console.print(Text(f"{_costs(run.cost, known=story.usd_known)}, {run.seconds:.0f} s"))
    for entry in files.artifacts[:_MAX_FILES]:
        console.print(
            Text(f"  {visible(entry.path)} ({size(entry.bytes)}{', ' + entry.made_by if entry.made_by else ''})")
        )
    for note in run.notes:
        console.print(Text(f"note: {visible(note)}", style="yellow"))
    _print_answer(console, run.answer)


def print_checks(console: Console, checks: Iterable[Check]) -> None:
    for check in checks:
        sign, style = ("✔", "green") if check.ok else ("✘", "red")
        console.print(
            Text.assemble((f"{sign} ", style), (f"{check.name}: ", "bold"), visible(check.text)), soft_wrap=True
        )


def _print_answer(console: Console, answer: str) -> None:
    if not answer.strip():
        return
    text = visible(answer).strip("\n")
    if console.is_terminal:
        console.print()
        console.print(Padding(Markdown(text, hyperlinks=False), (0, 2, 1, 2)))
    else:
        console.print(Text(text), soft_wrap=True)


def _print_place(console: Console, what: str, place: Path, more: str = "") -> None:
    console.print(Text.assemble((f"{what:>6}  ", "dim"), visible(str(place)), (visible(more), "dim")), soft_wrap=True)


def _costs(cost: Cost, *, known: bool) -> str:
    calls = f"{count(cost.llm_calls, 'model call')}, {count(cost.tool_calls, 'tool call')}"
    return f"{calls}, {count(cost.tokens, 'token')}, {money(cost.usd, known=known)}"


def moment(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M")
