"""The demo as a person runs it. The figures of its answer are computed again here, by other means."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.e2e.agent_process import clean_environment
from toolserver.app import server_id

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "weather" / "demo.py"
DATA = ROOT / "examples" / "data" / "seattle-weather.csv"
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]

Row = dict[str, str]


def run_demo(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(DEMO), *options, "--json"], cwd=folder, env=clean_environment(**environment), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Its JSON result, and the run's folder, where no engine answers."""
    folder = tmp_path_factory.mktemp("demo")
    done = run_demo(folder, DOCKER_HOST=f"unix://{folder}/nobody.sock")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Sandboxes: bubblewrap\nThird-party tool: left out, since images of others need Docker" in done.stderr
    result = json.loads(done.stdout)
    return result, Path(result["folder"])


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    with DATA.open(newline="") as file:
        return list(csv.DictReader(file))


def by(rows: list[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    groups: dict[Any, list[Row]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return groups


def month_precipitation(rows: list[Row]) -> dict[str, float]:
    """Mean over the years of each month's total, by the month's name."""
    totals: dict[int, list[float]] = defaultdict(list)
    for (_, month), days in by(rows, lambda row: (row["date"][:4], int(row["date"][5:7]))).items():
        totals[month].append(sum(float(day["precipitation"]) for day in days))
    return {MONTHS[month - 1]: mean(values) for month, values in totals.items()}


def month_mean(rows: list[Row], column: str) -> dict[str, float]:
    """Mean over the years of each month's mean."""
    means: dict[int, list[float]] = defaultdict(list)
    for (_, month), days in by(rows, lambda row: (row["date"][:4], int(row["date"][5:7]))).items():
        means[month].append(mean(float(day[column]) for day in days))
    return {MONTHS[month - 1]: mean(values) for month, values in means.items()}


def figure(text: str, pattern: str) -> tuple[str, float]:
    found = re.search(pattern, text)
    assert found, f"{pattern} is not in the answer:\n{text}"
    return found[1], float(found[2])


def best(values: dict[str, float], choose: Callable[..., str]) -> str:
    return choose(values, key=values.__getitem__)


pytestmark = [pytest.mark.bubblewrap, pytest.mark.timeout(240)]


def test_the_figures_of_the_answer_are_right(demo: tuple[dict[str, Any], Path], rows: list[Row]) -> None:
    answer = str(demo[0]["answer"])
    rain, high = month_precipitation(rows), month_mean(rows, "temp_max")
    for pattern, values, choose in (
        (r"Wettest month:\*\* (\w+) with ([\d.]+) mm", rain, max),
        (r"Driest:\*\* (\w+) with ([\d.]+) mm", rain, min),
        (r"Warmest month:\*\* (\w+) with highs of ([\d.]+) °C", high, max),
        (r"Coldest:\*\* (\w+) with highs of ([\d.]+) °C", high, min),
    ):
        name, value = figure(answer, pattern)
        assert name == best(values, choose)
        assert value == pytest.approx(values[name], abs=0.06)
    _, year = figure(answer, r"(average) year brings ([\d.]+) mm")
    assert year == pytest.approx(sum(rain.values()), abs=0.06)
    _, days = figure(answer, r"(complete): (\d+) days")
    assert days == len(rows)


def test_the_years_of_the_answer_are_right(demo: tuple[dict[str, Any], Path], rows: list[Row]) -> None:
    answer = str(demo[0]["answer"])
    years = by(rows, lambda row: row["date"][:4])
    rain = {year: sum(float(day["precipitation"]) for day in days) for year, days in years.items()}
    high = {year: mean(float(day["temp_max"]) for day in days) for year, days in years.items()}
    wet_days = {year: sum(float(day["precipitation"]) > 0 for day in days) for year, days in years.items()}
    for pattern, values, choose in (
        (r"wettest was (\d{4}) with ([\d.]+) mm", rain, max),
        (r"driest (\d{4}) with ([\d.]+) mm", rain, min),
        (r"warmest was (\d{4}) with a mean high of ([\d.]+) °C", high, max),
        (r"coolest (\d{4}) with a mean high of ([\d.]+) °C", high, min),
    ):
        name, value = figure(answer, pattern)
        assert name == best(values, choose)
        assert value == pytest.approx(values[name], abs=0.06)
    wettest, count = figure(answer, r"wettest was (\d{4}) with [\d.]+ mm on (\d+) rainy days")
    assert count == wet_days[wettest]


def test_one_task_failed_first_for_a_reason_that_its_output_shows(
    demo: tuple[dict[str, Any], Path], rows: list[Row]
) -> None:
    result, folder = demo
    assert [(task["state"], task["attempts"]) for task in result["tasks"]] == [
        ("success", 1),
        ("success", 2),
        ("success", 1),
        ("success", 1),
    ]
    assert any(task["depends_on"] == ["t1", "t2"] for task in result["tasks"])
    report = (folder / "report.html").read_text()
    four_years = sum(float(row["precipitation"]) for row in rows)
    assert f"the twelve months add up to {four_years:.1f} mm" in report
    assert "Plan refiner: modify" in report


def test_the_pictures_are_pngs_of_a_sane_size_and_in_the_report(demo: tuple[dict[str, Any], Path]) -> None:
    result, folder = demo
    made = {entry["path"]: entry for entry in result["artifacts"] if entry["made_by"] == "t3"}
    assert set(made) == {"climate.png", "years.png", "yearly.csv"}
    for name in ("climate.png", "years.png"):
        data = (folder / "workspace" / name).read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = struct.unpack(">II", data[16:24])
        assert 1000 <= width <= 3000
        assert 500 <= height <= 3000
        assert 20_000 < len(data) < 1_000_000
    report = (folder / "report.html").read_text()
    assert report.count('src="data:image/png;base64,') >= 2


def test_tables_and_text_are_there_and_agree(demo: tuple[dict[str, Any], Path], rows: list[Row]) -> None:
    workspace = demo[1] / "workspace"
    with (workspace / "monthly.csv").open(newline="") as file:
        monthly = {row["name"]: float(row["precipitation"]) for row in csv.DictReader(file)}
    assert monthly == pytest.approx(month_precipitation(rows), abs=0.006)
    with (workspace / "clean.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(rows)
    summary = (workspace / "summary.md").read_text()
    assert best(monthly, max) in summary
    assert len(summary.split()) <= 150
    assert "{{" not in summary


def test_nothing_in_the_script_is_a_figure_of_the_answer(demo: tuple[dict[str, Any], Path]) -> None:
    script = (DEMO.parent / "script.toml").read_text()
    figures = set(re.findall(r"\d+\.\d", str(demo[0]["answer"])))
    assert figures
    assert not [value for value in figures if value in script]


def test_the_report_is_made_again_with_the_same_bytes(demo: tuple[dict[str, Any], Path]) -> None:
    result, folder = demo
    first = (folder / "report.html").read_bytes()
    command = [sys.executable, "-m", "agent", "report", result["run_id"], "--runs-dir", str(folder.parent)]
    subprocess.run(command, env=clean_environment(), check=True, capture_output=True, timeout=60)
    assert (folder / "report.html").read_bytes() == first


@pytest.mark.docker
@pytest.mark.skipif(shutil.which("docker") is None, reason="no Docker engine on this machine")
def test_it_runs_in_containers_too(tmp_path: Path, demo: tuple[dict[str, Any], Path]) -> None:
    done = run_demo(tmp_path, "--runtime", "docker")
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    assert result["answer"] == demo[0]["answer"]
    left = [
        "docker",
        "ps",
        "-aq",
        "--filter",
        f"label=toolcrib.server={server_id(Path(result['folder']) / 'toolserver' / 'state')}",
    ]
    assert subprocess.run(left, capture_output=True, text=True, check=True, env=dict(os.environ)).stdout == ""
