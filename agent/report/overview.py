"""All runs of a place, a line each."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from rich.table import Table
from rich.text import Text

from agent.budget import Cost
from agent.errors import JournalBroken
from agent.report.figures import duration, money
from agent.report.plain_text import one_line
from agent.report.story import tell
from agent.report.terminal import STYLES, moment
from agent.store.base import PlanStore, RunRow


@dataclass(frozen=True)
class Line:
    """A run with what it took. `cost` None: its journal is damaged."""

    row: RunRow
    seconds: float = 0.0
    cost: Cost | None = None
    usd_known: bool = True

    def as_json(self) -> dict[str, Any]:
        times = {name: _time(getattr(self.row, name)) for name in ("created_at", "updated_at")}
        costs = None if self.cost is None else {**asdict(self.cost), "usd_known": self.usd_known}
        return {**asdict(self.row), **times, "seconds": round(self.seconds, 3), "cost": costs}


def lines_of(store: PlanStore) -> list[Line]:
    """Newest first."""
    return [_line(store, row) for row in store.runs()]


def runs_table(lines: list[Line]) -> Table:
    """One line a run: the goal takes what the others leave, and is cut there."""
    table = Table(box=None, pad_edge=False, expand=True)
    for name in ("run", "state", "started", "took", "cost"):
        table.add_column(name, no_wrap=True)
    table.add_column("goal", no_wrap=True, overflow="ellipsis", ratio=1)
    for line in lines:
        row = line.row
        cost = "damaged" if line.cost is None else money(line.cost.usd, known=line.usd_known).removeprefix("cost ")
        state = Text(row.state, style=STYLES.get(row.state, ""))
        goal = Text(one_line(row.goal, 200))
        table.add_row(row.run_id, state, moment(row.created_at), duration(line.seconds * 1000), cost, goal)
    return table


def _line(store: PlanStore, row: RunRow) -> Line:
    try:
        story = tell(store.read(row.run_id))
    except JournalBroken:
        return Line(row)
    return Line(row, story.run.seconds, story.run.cost, story.usd_known)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
