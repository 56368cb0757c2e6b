"""Benchmarks of the ToolServer on the Docker runtime, each beside its floor of the same run. See README.md."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from floor import load
from ours import MEASUREMENTS, Figure
from rivals.race import ROSTER, race
from server import Server


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _line(figure: Figure) -> str:
    floor = f"{_number(figure.floor)} {figure.unit}  {figure.floor_name}" if figure.floor is not None else ""
    ratio = f"{figure.ratio:.2f}" if figure.ratio is not None else ""
    sign = "≤" if figure.better == "less" else "≥"
    goal = "" if figure.goal is None else f"{sign} {figure.goal:.3g} {'reached' if figure.reached else 'MISSED'}"
    return f"{figure.name:38} {_number(figure.value):>8} {figure.unit:5} {ratio:>7}  {goal:15} {floor}".rstrip()


def _json(figure: Figure) -> dict[str, Any]:
    return {**asdict(figure), "ratio": figure.ratio, "reached": figure.reached}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="comma-separated: " + ", ".join(MEASUREMENTS))
    parser.add_argument("--rivals", help="all, none, or comma-separated: " + ", ".join(ROSTER), default="none")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    wanted = list(MEASUREMENTS) if options.only is None else [name for name in options.only.split(",") if name]
    rivals = {"all": list(ROSTER), "none": []}.get(options.rivals) or [n for n in options.rivals.split(",") if n]
    rivals = [] if options.rivals == "none" else rivals
    if unknown := {*wanted} - {*MEASUREMENTS} | {*rivals} - {*ROSTER}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    out = sys.stderr if options.json else sys.stdout
    results: dict[str, Any] = {"load_before": load(), "figures": []}
    if wanted:
        print(f"{'':38} {'value':>8} {'':5} {'ratio':>7}  {'goal':15} floor", file=out)
        with Server() as server:
            for name in wanted:
                for figure in MEASUREMENTS[name](server, options.quick):
                    results["figures"].append(_json(figure))
                    print(_line(figure), file=out, flush=True)
    if rivals:
        results["rivals"] = race(rivals, quick=options.quick, say=lambda line: print(line, file=out, flush=True))
    results["load_after"] = load()
    print(f"load {results['load_before']} -> {results['load_after']}", file=out)
    if options.json:
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
