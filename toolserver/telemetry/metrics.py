"""Metrics in the Prometheus text format."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """Counters, gauges read at the time of asking, and histograms of seconds, in the Prometheus text format.

    Label values are the server's own words (a method, a status, a code, a catalog name), never a caller's text.
    """

    def __init__(self) -> None:
        self._counters: dict[str, dict[tuple[tuple[str, str], ...], float]] = defaultdict(lambda: defaultdict(float))
        self._gauges: dict[str, Callable[[], float]] = {}
        self._histograms: dict[str, list[float]] = {}
        self._sums: dict[str, float] = defaultdict(float)
        self._help: dict[str, str] = {}

    def counter(self, name: str, told: str) -> None:
        self._help[name] = told
        self._counters[name]  # shown from the start

    def gauge(self, name: str, told: str, read: Callable[[], float]) -> None:
        self._help[name] = told
        self._gauges[name] = read

    def histogram(self, name: str, told: str) -> None:
        self._help[name] = told
        self._histograms[name] = [0.0] * (len(_BUCKETS_S) + 1)

    def count(self, name: str, by: float = 1, /, **labels: str) -> None:
        self._counters[name][tuple(labels.items())] += by

    def observe(self, name: str, seconds: float) -> None:
        buckets = self._histograms[name]
        self._sums[name] += seconds
        for place, limit in enumerate(_BUCKETS_S):
            if seconds <= limit:
                buckets[place] += 1
                return
        buckets[-1] += 1

    def render(self) -> str:
        lines: list[str] = []
        for name, values in self._counters.items():
            lines += self._head(name, "counter")
            lines += [f"{name}{_labels(labels)} {value:g}" for labels, value in values.items()] or [f"{name} 0"]
        for name, read in self._gauges.items():
            lines += [*self._head(name, "gauge"), f"{name} {read():g}"]
        for name, buckets in self._histograms.items():
            lines += self._head(name, "histogram")
            total = 0.0
            for limit, count in zip((*_BUCKETS_S, float("inf")), buckets, strict=True):
                total += count
                edge = "+Inf" if limit == float("inf") else f"{limit:g}"
                lines.append(f'{name}_bucket{{le="{edge}"}} {total:g}')
            lines += [f"{name}_sum {self._sums[name]:g}", f"{name}_count {total:g}"]
        return "\n".join(lines) + "\n"

    def _head(self, name: str, kind: str) -> list[str]:
        return [f"# HELP {name} {self._help[name]}", f"# TYPE {name} {kind}"]


def _labels(labels: tuple[tuple[str, str], ...]) -> str:
    if not labels:
        return ""
    escaped = (f'{k}="{v.replace(chr(92), chr(92) * 2).replace(chr(34), chr(92) + chr(34))}"' for k, v in labels)
    return "{" + ",".join(escaped) + "}"
