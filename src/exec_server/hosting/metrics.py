"""Counters of a node in the text format of Prometheus. No label holds an environment or tenant.

Hand-written, because prometheus_client takes longer to import than typer or h11 (`python -m
bench.alternatives`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Final

PREFIX: Final = "exec_server_registry_"
# Upper bounds in seconds: a statement takes 0.1 ms, a request with a slow database seconds.
BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class Counter:
    """A number for each combination of labels; callers use a fixed set of them."""

    def __init__(self, name: str, *labels: str) -> None:
        self.name = name
        self._labels = labels
        self._values: dict[tuple[str, ...], int] = {}

    def add(self, *values: str, count: int = 1) -> None:
        self._values[values] = self._values.get(values, 0) + count

    def lines(self) -> Iterable[str]:
        yield f"# TYPE {PREFIX}{self.name} counter"
        for values, number in sorted(self._values.items()):
            yield f"{PREFIX}{self.name}{_braces(self._labels, values)} {number}"


class Histogram:
    """Durations for each value of one label."""

    def __init__(self, name: str, label: str) -> None:
        self.name = name
        self._label = label
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

    def observe(self, value: str, seconds: float) -> None:
        counts = self._counts.setdefault(value, [0] * (len(BUCKETS) + 1))
        counts[bisect_left(BUCKETS, seconds)] += 1
        self._sums[value] = self._sums.get(value, 0.0) + seconds

    def lines(self) -> Iterable[str]:
        name = PREFIX + self.name
        yield f"# TYPE {name} histogram"
        for value, counts in sorted(self._counts.items()):
            total = 0
            for bound, count in zip((*BUCKETS, "+Inf"), counts, strict=True):
                total += count
                yield f'{name}_bucket{{{self._label}="{value}",le="{bound}"}} {total}'
            yield f'{name}_sum{{{self._label}="{value}"}} {self._sums[value]:.6f}'
            yield f'{name}_count{{{self._label}="{value}"}} {total}'


class Metrics:
    """All counters of a node. Gauges are computed when they are asked for."""

    def __init__(self) -> None:
        self.relayed_bytes = Counter("relayed_bytes_total", "direction")
        self.relayed_frames = Counter("relayed_frames_total", "direction")
        self.requests = Counter("requests_total", "endpoint", "code")
        self.upgrades = Counter("upgrades_total", "role", "outcome")
        self.refusals = Counter("refusals_total", "endpoint", "reason")
        self.resets = Counter("resets_total", "reason")
        self.validations = Counter("validations_total", "outcome")
        self.request_seconds = Histogram("request_seconds", "endpoint")
        self.database_seconds = Histogram("database_seconds", "statement")

    def text(self, gauges: Mapping[str, int]) -> str:
        lines: list[str] = []
        for name, number in gauges.items():
            lines += [f"# TYPE {PREFIX}{name} gauge", f"{PREFIX}{name} {number}"]
        counters = (self.relayed_bytes, self.relayed_frames, self.requests, self.upgrades)
        for counter in (*counters, self.refusals, self.resets, self.validations):
            lines += counter.lines()
        for histogram in (self.request_seconds, self.database_seconds):
            lines += histogram.lines()
        return "\n".join(lines) + "\n"


def _braces(labels: tuple[str, ...], values: tuple[str, ...]) -> str:
    pairs = ",".join(f'{label}="{value}"' for label, value in zip(labels, values, strict=True))
    return f"{{{pairs}}}"
