"""Commands that need neither a model nor a ToolServer, in processes of their own, as a person runs them."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from datetime import datetime, timedelta
from importlib.metadata import version
from pathlib import Path

import pytest

from agent.events import EventKind
from agent.report.story import describe
from agent.store.sql_store import SqlStore
from tests.unit.report.journal_example import full_run


def agent(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("AGENT_", "OPENAI_"))}
    command = [sys.executable, "-m", "agent", *arguments]
    return subprocess.run(
        command,
        cwd=cwd,
        env={**clean, "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds a finished run."""
    folder = tmp_path_factory.mktemp("cli")
    store = SqlStore(f"sqlite:///{folder / 'runs' / 'agent.db'}")
    journal = store.create("r-1", "Look at the data")
    for event in full_run():
        journal.append(event.kind, event.data)
    journal.close()
    store.close()
    return folder


def test_help_is_quick_and_names_the_commands(tmp_path: Path) -> None:
    times = []
    for _ in range(3):
        started = time.monotonic()
        done = agent("--help", cwd=tmp_path)
        times.append(time.monotonic() - started)
    assert done.returncode == 0
    for command in ("run", "resume", "list", "show", "report", "mock", "doctor"):
        assert command in done.stdout
    assert min(times) < 2.0  # about 0.25 s on an idle machine


def test_help_imports_neither_the_model_client_nor_the_database(tmp_path: Path) -> None:
    code = "import sys, agent.cli; print([name for name in ('openai', 'sqlalchemy', 'httpx', 'pydantic', 'jinja2') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_without_a_model_three_settings_and_the_mock_are_named(tmp_path: Path) -> None:
    done = agent("run", "a goal", cwd=tmp_path)
    assert done.returncode == 2
    for name in ("AGENT_LLM__MODEL", "AGENT_LLM__BASE_URL", "AGENT_LLM__API_KEY", "agent mock"):
        assert name in done.stderr
    assert done.stdout == ""
    assert not list(tmp_path.iterdir())


def test_wrong_settings_end_with_2_and_no_traceback(tmp_path: Path) -> None:
    done = agent("run", "a goal", cwd=tmp_path, AGENT_LLM__MAX_TOKENS="x", AGENT_NOWHERE__KEY="1")
    assert done.returncode == 2
    assert "AGENT_LLM__MAX_TOKENS" in done.stderr
    assert "AGENT_NOWHERE__KEY" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("run", "  "), "goal is empty"),
        (("run", "g", "--file", "none.csv"), "none.csv: there is no such file"),
        (("run", "g", "--max-usd", "-1"), "AGENT_BUDGET__MAX_USD"),
        (("run", "g", "--max-llm-calls", "0"), "AGENT_BUDGET__MAX_LLM_CALLS"),
        (("run", "g", "--config", "none.toml"), "no settings file"),
        (("run", "g", "--toolserver", "nowhere"), "AGENT_TOOLSERVER__URL"),
        (("run", "g", "--runtime", "chroot"), "AGENT_TOOLSERVER__RUNTIME"),
        (("resume", "nothing"), "there are no runs"),
        (("show", "nothing"), "there are no runs"),
        (("report", "nothing"), "there are no runs"),
        (("mock", "none.toml"), "can't be read"),
        (("nonsense",), "No such command"),
    ],
)
def test_wrong_usage_ends_with_2_and_says_what_is_wrong(
    arguments: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    done = agent(*arguments, cwd=tmp_path, AGENT_LLM__MODEL="m", AGENT_LLM__BASE_URL="http://127.0.0.1:1/v1")
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_with_json_a_refused_start_is_an_object_too(tmp_path: Path) -> None:
    done = agent("run", "a goal", "--json", cwd=tmp_path)
    assert done.returncode == 2
    result = json.loads(done.stdout)
    assert (result["state"], result["exit_code"]) == ("not_started", 2)
    assert "AGENT_LLM__MODEL" in result["reason"]


def test_a_runs_folder_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = agent("run", "g", "--runs-dir", str(tmp_path / "file" / "runs"), cwd=tmp_path, AGENT_LLM__MODEL="m")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "runs" in done.stderr


def test_list_shows_runs_and_an_empty_place_is_no_error(runs: Path, tmp_path: Path) -> None:
    listed = agent("list", cwd=runs)
    assert listed.returncode == 0
    assert "r-1" in listed.stdout
    assert "Look at the data" in listed.stdout
    rows = json.loads(agent("list", "--json", cwd=runs).stdout)
    assert [(row["run_id"], row["state"]) for row in rows] == [("r-1", "done")]
    nothing = agent("list", cwd=tmp_path)
    assert nothing.returncode == 0
    assert json.loads(agent("list", "--json", cwd=tmp_path).stdout) == []
    assert not list(tmp_path.iterdir())


def test_show_takes_the_start_of_an_id(runs: Path) -> None:
    shown = agent("show", "r-", cwd=runs)
    assert shown.returncode == 0
    assert "t2 Draw a chart of precipitation" in shown.stdout
    result = json.loads(agent("show", "r-1", "--json", cwd=runs).stdout)
    assert result["state"] == "done"
    assert agent("show", "x", cwd=runs).returncode == 2


def test_report_is_made_again_with_the_same_bytes(runs: Path, tmp_path: Path) -> None:
    places = [tmp_path / "one.html", tmp_path / "two.html"]
    for place in places:
        done = agent("report", "r-1", "--out", str(place), cwd=runs)
        assert (done.returncode, done.stdout.strip()) == (0, str(place))
    assert places[0].read_bytes() == places[1].read_bytes()
    done = agent("report", "r-1", cwd=runs)
    assert Path(done.stdout.strip()) == runs / "runs" / "r-1" / "report.html"


def test_a_report_goes_only_into_a_folder_that_is_there(runs: Path, tmp_path: Path) -> None:
    done = agent("report", "r-1", "--out", str(tmp_path / "none" / "x.html"), cwd=runs)
    assert done.returncode == 2
    assert "there is no folder" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["run", "resume"])
def test_a_budget_in_dollars_needs_known_prices(command: str, runs: Path, tmp_path: Path) -> None:
    if command == "resume":
        interrupted(tmp_path)
    arguments = (command, "r-2", "--max-usd", "1", "--model", "nobody-knows", "--toolserver", "http://127.0.0.1:9")
    done = agent(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    for name in ("nobody-knows", "AGENT_LLM__PRICE_PROMPT_USD_PER_MTOK", "AGENT_LLM__PRICE_COMPLETION_USD_PER_MTOK"):
        assert name in done.stderr
    prices = {"AGENT_LLM__PRICE_PROMPT_USD_PER_MTOK": "0", "AGENT_LLM__PRICE_COMPLETION_USD_PER_MTOK": "2"}
    assert "needs prices" not in agent(*arguments, cwd=tmp_path, **prices).stderr


def interrupted(folder: Path) -> None:
    """A run r-2 whose process was killed."""
    store = SqlStore(f"sqlite:///{folder / 'runs' / 'agent.db'}")
    journal = store.create(
        "r-2", "Look at the data and at a great many other things that do not fit into one line of a terminal"
    )
    for event in full_run()[:12]:
        journal.append(event.kind, event.data)
    journal.close()
    store.close()


def test_a_toolserver_that_is_not_there_is_found_out_before_a_run_is_made(tmp_path: Path) -> None:
    done = agent("run", "g", "--toolserver", "http://127.0.0.1:9", cwd=tmp_path, AGENT_LLM__MODEL="m")
    assert done.returncode == 5
    assert "no ToolServer answers at http://127.0.0.1:9" in done.stderr
    assert "toolserver serve" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_killed_run_is_interrupted_wherever_it_is_shown(tmp_path: Path) -> None:
    interrupted(tmp_path)
    assert json.loads(agent("list", "--json", cwd=tmp_path).stdout)[0]["state"] == "interrupted"
    assert json.loads(agent("show", "r-2", "--json", cwd=tmp_path).stdout)["state"] == "interrupted"
    assert "interrupted" in agent("show", "r-2", cwd=tmp_path).stdout.splitlines()[0]


def test_list_has_one_line_a_run_with_duration_and_cost(tmp_path: Path) -> None:
    interrupted(tmp_path)
    head, line = agent("list", cwd=tmp_path, COLUMNS="80").stdout.splitlines()
    assert len(line) <= 80
    assert line.rstrip().endswith("…")
    for word in ("took", "cost", "goal"):
        assert word in head
    (row,) = json.loads(agent("list", "--json", cwd=tmp_path).stdout)
    for name in ("created_at", "updated_at"):
        assert datetime.fromisoformat(row[name]).utcoffset() == timedelta(0)
    assert row["seconds"] >= 0
    assert {"usd", "usd_known", "llm_calls", "tool_calls"} <= set(row["cost"])


def test_both_the_option_and_the_command_print_the_version(tmp_path: Path) -> None:
    told = {agent(word, cwd=tmp_path).stdout.strip() for word in ("--version", "version")}
    assert told == {version("toolcrib")}
    assert "completion" not in agent("--help", cwd=tmp_path).stdout


def test_resuming_a_run_that_is_done_gives_its_result_again_without_a_model(runs: Path) -> None:
    done = agent("resume", "r-1", cwd=runs)
    assert (done.returncode, done.stdout) == (0, "It is **fine**.\n")
    assert "done already" in done.stderr
    assert (runs / "runs" / "r-1" / "result.json").exists()


def test_a_tampered_journal_is_told_and_nothing_runs(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "runs", tmp_path / "runs")
    with sqlite3.connect(tmp_path / "runs" / "agent.db") as database:
        database.execute("update events set data = replace(data, 'made it', 'faked it')")
    database.close()
    done = agent("resume", "r-1", cwd=tmp_path, AGENT_LLM__MODEL="m")
    assert done.returncode == 2
    assert "hash" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_kinds_of_events_are_all_told_in_a_line() -> None:
    told = {event.kind: describe(event)[0] for event in full_run()}
    assert all(told.values())
    assert set(told) >= {EventKind.PLAN_EDITED, EventKind.TASK_JUDGED, EventKind.TOOL_SETTLED}
