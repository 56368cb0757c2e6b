"""A run while it goes on, in a terminal: a plan tree that changes in place, or plain lines where there is no terminal.

Texts of models and tools go through `plain_text`, and never through rich's markup: nothing in them can steer the terminal.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text
from rich.tree import Tree

from agent.events import Event, EventKind
from agent.planning.task import TaskNode, TaskState
from agent.report.figures import count, money
from agent.report.plain_text import one_line
from agent.report.story import Moment, Story
from agent.trajectory.attempt import Attempt
from agent.trajectory.step import Step


class Progress(Protocol):
    """Shows a run. `recall` takes the events of an earlier process, `hear` those that happen now."""

    def recall(self, event: Event) -> None: ...
    def hear(self, event: Event) -> None: ...


class Silent:
    """Shows nothing."""

    def recall(self, event: Event) -> None:
        """Nothing to show."""

    def hear(self, event: Event) -> None:
        """Nothing to show."""


_TICK_S = 0.25
_SIGNS = {
    TaskState.PENDING: ("○", "dim"), TaskState.EXECUTING: ("▶", "bold cyan"), TaskState.SUCCESS: ("✔", "green"),
    TaskState.FAILED: ("✘", "red"), TaskState.REVISED: ("↻", "yellow"), TaskState.BLOCKED: ("■", "red"),
    TaskState.SKIPPED: ("–", "dim"), TaskState.CANCELLED: ("–", "dim"), TaskState.WAITING: ("?", "yellow"),
}  # fmt: skip
_LEVELS = {"info": "", "good": "green", "warn": "yellow", "bad": "red"}
# what a log of lines leaves out: a later event says it all
_QUIET_KINDS = {EventKind.LLM_REQUESTED, EventKind.TOOL_INTENDED, EventKind.TASK_REFLECTED}


@asynccontextmanager
async def progress(console: Console) -> AsyncIterator[Progress]:
    """What it shows last stays on the console."""
    if not console.is_terminal:
        yield Lines(console)
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
        picture = Picture(lambda: live.update(picture.render(), refresh=True))

        async def tick() -> None:
            while True:
                await asyncio.sleep(_TICK_S)
                live.update(picture.render(), refresh=True)

        ticking = asyncio.create_task(tick())
        try:
            yield picture
        finally:
            ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ticking
            live.update(picture.render(), refresh=True)


class Lines:
    """One line an event, with the seconds since the run's start."""

    def __init__(self, console: Console) -> None:
        self._console, self._story = console, Story()

    def recall(self, event: Event) -> None:
        self._story.hear(event)

    def hear(self, event: Event) -> None:
        moment = self._story.hear(event)
        if event.kind in _QUIET_KINDS or _says_nothing(event):
            return
        seconds = event.at - self._story.run.started_at
        place = f"{moment.key} " if moment.key else ""
        line = Text(f"[{seconds:7.1f} s] {place}{moment.title}", style=_LEVELS[moment.level])
        self._console.print(line, soft_wrap=True)


def _says_nothing(event: Event) -> bool:
    """A reply without a thought: what it asked for has events of its own, as have the verdicts and edits of other roles."""
    if event.kind is not EventKind.LLM_REPLIED:
        return False
    return event.data.get("role") != "actor" or not (event.data.get("reply") or {}).get("text")


class Picture:
    """The plan with each task's state, what is being done now, and what was used."""

    def __init__(self, show: Callable[[], None]) -> None:
        """`show` is called when there is something new to render."""
        self._show, self._story, self._spinner = show, Story(), Spinner("dots", style="cyan")
        self._moment: Moment | None = None
        self._heard_at = time.monotonic()

    def recall(self, event: Event) -> None:
        self._moment, self._heard_at = self._story.hear(event), time.monotonic()

    def hear(self, event: Event) -> None:
        self.recall(event)
        self._show()

    def render(self) -> Group:
        run = self._story.run
        tree = Tree(Text(one_line(run.goal or "starting …", 200), style="bold"), guide_style="dim")
        branches: dict[str | None, Tree] = {None: tree}
        for node in run.plan.walk():
            branch = branches.get(node.parent, tree)
            branches[node.id] = branch.add(task_line(node, run.attempts_of(node.id)))
        parts: list[Text | Tree | Spinner] = [tree]
        if run.state == "running":
            self._spinner.update(text=self._now())
            parts.append(self._spinner)
            if step := self._current_step():
                parts.append(Text(f"  {one_line(step.thought, 300)}", style="italic dim"))
        parts.append(self._costs())
        return Group(*parts)

    def _now(self) -> Text:
        if self._moment is None:
            return Text("starting …")
        waited = time.monotonic() - self._heard_at
        place = f"{self._moment.key} · " if self._moment.key else ""
        return Text(f"{place}{one_line(self._moment.title, 160)} ({waited:.0f} s)", style=_LEVELS[self._moment.level])

    def _current_step(self) -> Step | None:
        """The last step with a thought, of the task that is being worked on."""
        run = self._story.run
        node = next((task for task in run.plan if task.state is TaskState.EXECUTING), None)
        attempts = run.attempts_of(node.id) if node else []
        steps = [step for step in attempts[-1].steps.values() if step.thought] if attempts else []
        return steps[-1] if steps else None

    def _costs(self) -> Text:
        run = self._story.run
        seconds = self._story.seconds + (time.monotonic() - self._heard_at if run.state == "running" else 0.0)
        cost = run.cost
        return Text(
            f"  {seconds:.0f} s · {count(cost.llm_calls, 'model call')} · {count(cost.tool_calls, 'tool call')} · "
            f"{count(cost.tokens, 'token')} · {money(cost.usd, known=self._story.usd_known)}",
            style="dim",
        )


def task_line(node: TaskNode, attempts: Sequence[Attempt]) -> Text:
    """A task with its state, and why an earlier attempt at it was not good enough."""
    sign, style = _SIGNS[node.state]
    dim = style if style == "dim" else ""
    line = Text.assemble((f"{sign} ", style), (f"{node.id} ", "dim"), (one_line(node.goal, 160), dim))
    if len(attempts) > 1:
        line.append(f"  attempt {len(attempts)}", style="yellow")
    refused = [attempt.judgement for attempt in attempts if attempt.judgement and not attempt.judgement.passed]
    if refused:
        line.append(f"\n  ↻ {refused[-1].by}: {one_line(refused[-1].criticism, 240)}", style="yellow")
    elif node.state in {TaskState.FAILED, TaskState.BLOCKED} and node.reason:
        line.append(f"\n  {one_line(node.reason, 200)}", style="red")
    return line
