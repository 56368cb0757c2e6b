"""Metrics in the Prometheus text format.

Label values are the server's own words (a method, a status, a code, a catalog name), never a caller's text: what callers
send must not make the list longer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping

_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
Labels = tuple[tuple[str, str], ...]


class _Histogram:
    __slots__ = ("buckets", "total")

    def __init__(self) -> None:
        self.buckets = [0] * (len(_BUCKETS_S) + 1)
        self.total = 0.0


class Metrics:
    """Counters, gauges read at the time of asking, and histograms of seconds. A name is described once, then used."""

    def __init__(self) -> None:
        self._help: dict[str, str] = {}
        self._counters: dict[str, dict[Labels, float]] = {}
        self._gauges: dict[str, Callable[[], float | Mapping[str, float]]] = {}
        self._read_counters: set[str] = set()
        self._gauge_labels: dict[str, str] = {}
        self._histograms: dict[str, dict[Labels, _Histogram]] = {}

    def counter(self, name: str, told: str) -> None:
        """Shown from the start: as 0 until it is counted with labels."""
        self._help[name] = told
        self._counters[name] = defaultdict(float)

    def counter_of(self, name: str, told: str, read: Callable[[], float]) -> None:
        """One that somebody else counts."""
        self.gauge(name, told, read)
        self._read_counters.add(name)

    def gauge(self, name: str, told: str, read: Callable[[], float]) -> None:
        self._help[name] = told
        self._gauges[name] = read

    def gauges(self, name: str, told: str, label: str, read: Callable[[], Mapping[str, float]]) -> None:
        """One value for each of a few values of `label`."""
        self._help[name] = told
        self._gauges[name], self._gauge_labels[name] = read, label

    def histogram(self, name: str, told: str) -> None:
        self._help[name] = told
        self._histograms[name] = defaultdict(_Histogram)

    def count(self, name: str, by: float = 1, /, **labels: str) -> None:
        self._counters[name][tuple(labels.items())] += by

    def observe(self, name: str, seconds: float, /, **labels: str) -> None:
        histogram = self._histograms[name][tuple(labels.items())]
        histogram.total += seconds
        histogram.buckets[bisect_left(_BUCKETS_S, seconds)] += 1

    def render(self) -> str:
        lines: list[str] = []
        for name, counted in self._counters.items():
            lines += self._head(name, "counter")
            lines += [_line(name, labels, value) for labels, value in counted.items()] or [_line(name, (), 0)]
        for name, read in self._gauges.items():
            lines += self._head(name, "counter" if name in self._read_counters else "gauge")
            value = read()
            if isinstance(value, Mapping):
                label = self._gauge_labels[name]
                lines += [_line(name, ((label, which),), each) for which, each in value.items()]
            else:
                lines.append(_line(name, (), value))
        for name, histograms in self._histograms.items():
            lines += self._head(name, "histogram")
            for labels, histogram in histograms.items() or [((), _Histogram())]:
                lines += _spread(name, labels, histogram)
        return "\n".join(lines) + "\n"

    def _head(self, name: str, kind: str) -> list[str]:
        return [f"# HELP {name} {self._help[name]}", f"# TYPE {name} {kind}"]


def _spread(name: str, labels: Labels, histogram: _Histogram) -> list[str]:
    lines, count = [], 0
    for edge, more in zip((*map(_number, _BUCKETS_S), "+Inf"), histogram.buckets, strict=True):
        count += more
        lines.append(_line(f"{name}_bucket", (*labels, ("le", edge)), count))
    return [*lines, _line(f"{name}_sum", labels, histogram.total), _line(f"{name}_count", labels, count)]


def _line(name: str, labels: Labels, value: float) -> str:
    return f"{name}{_labels(labels)} {_number(value)}"


def _number(value: float) -> str:
    return repr(int(value)) if float(value).is_integer() else repr(float(value))


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    told = (f'{name}="{_escaped(value)}"' for name, value in labels)
    return "{" + ",".join(told) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
