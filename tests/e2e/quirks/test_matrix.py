"""The whole agent against each quirk of matrix.toml: recovered and finished, or stopped early with a clear reason."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest

from agent.events import EventKind
from agent.llm.mock_distortions import DISTORTIONS
from agent.llm.mock_faults import DAMAGES, REFUSALS
from tests.e2e.quirks.stage import HERE, IMPATIENT, Ended, Stage, spoiled

pytestmark = [pytest.mark.bubblewrap, pytest.mark.timeout(120)]

ROWS: list[dict[str, Any]] = tomllib.loads((HERE / "matrix.toml").read_text())["row"]
EXIT_CODES = {"done": 0, "failed": 1}
MOST_FRUITLESS = 5
SILENT = {"stall", "stall_after_headers", "never_answers"}
# every call of it is another one, brings a new result and may be what the task needs: the steps bound it
NEVER_THE_SAME = {"new arguments for ever"}


def names_of(row: dict[str, Any]) -> list[str]:
    return [quirk if isinstance(quirk, str) else quirk["name"] for quirk in row["quirks"]]


def title(row: dict[str, Any]) -> str:
    return f"{row.get('name') or ' '.join(names_of(row))}-{row['role']}-{row['mode']}"


@pytest.mark.parametrize("row", ROWS, ids=title)
def test_the_agent_is_served(row: dict[str, Any], stage: Stage) -> None:
    settings = {**(IMPATIENT if SILENT & set(names_of(row)) else {}), **row.get("settings", {})}
    ended = stage.play(spoiled(row["role"], row["mode"], row["quirks"], row.get("command")), **settings)
    ended.check_invariants()
    assert ended.result["state"] == row["state"], ended.result["reason"]
    assert ended.exit_code == row.get("exit_code", EXIT_CODES.get(row["state"]))
    assert re.search(row.get("reason", "all tasks are done"), ended.result["reason"]), ended.result["reason"]
    assert ended.effects["t2"] == row.get("t2", 1)
    if "noise" in names_of(row):  # what it calls is a matter of chance; that it ends is not
        return
    assert (ended.asked(row["role"]), len(ended.requests)) == (row["asked"], row["total"])
    assert runs_of(ended, "t1") == row["runs"]
    assert ended.effects["t1"] == row.get("t1", 1)
    if row["mode"] == "ever" and row.get("name") not in NEVER_THE_SAME:
        sent_once = len({event.data["key"] for event in ended.of(EventKind.LLM_REQUESTED)})
        assert sent_once == len(ended.of(EventKind.LLM_REQUESTED))
        assert ended.fruitless() <= MOST_FRUITLESS


def runs_of(ended: Ended, task_id: str) -> int:
    return sum(event.data["task_id"] == task_id for event in ended.of(EventKind.TOOL_INTENDED))


def test_every_quirk_of_the_scripted_model_is_in_the_matrix() -> None:
    served = {name for row in ROWS for name in names_of(row)}
    assert served == {*REFUSALS, *DISTORTIONS, *DAMAGES}
