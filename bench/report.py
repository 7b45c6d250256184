"""Turns samples into a table, Markdown and JSON."""

import json
import os
import platform
import statistics
import sysconfig
import time
from pathlib import Path
from typing import Any

from bench.runner import BARE, Result
from bench.servers import OURS, REFERENCE
from bench.workloads import UNITS


def number(value: float) -> str:
    """Writes a value with three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percentile(samples: list[float], share: float) -> float:
    """The value below which this share of the samples lies."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


class Row:
    """The medians of one workload, with ratios and target."""

    def __init__(self, result: Result) -> None:
        self.workload = result.workload
        self._notes = result.notes
        factor = UNITS[self.workload.unit]
        self.samples = {
            label: [value * factor for value in values] for label, values in result.samples.items()
        }
        self.medians = {
            label: statistics.median(values) for label, values in self.samples.items() if values
        }

    def ratio(self, label: str, other: str) -> float | None:
        """How many times better the first server is than the second."""
        mine, theirs = self.medians.get(label), self.medians.get(other)
        if not mine or not theirs:
            return None
        return mine / theirs if self.workload.more_is_better else theirs / mine

    def bare_share(self) -> float | None:
        """The time of this server as a multiple of the bare kernel's."""
        ratio = self.ratio(OURS, BARE)
        return 1 / ratio if ratio else None

    def target(self) -> str:
        """Formats the target of this row."""
        parts = []
        if self.workload.ratio is not None:
            parts.append(f"≥ {self.workload.ratio:g}x")
        if self.workload.bare_ratio is not None:
            parts.append(f"≤ {self.workload.bare_ratio:g} bare")
        if self.workload.limit is not None:
            sign = "≥" if self.workload.more_is_better else "≤"
            parts.append(f"{sign} {self.workload.limit:g} {self.workload.unit}")
        return ", ".join(parts)

    def met(self) -> str:
        """Whether this server reaches the target; empty if that is unknown."""
        ours = self.medians.get(OURS)
        if not self.target():
            return ""
        if ours is None:
            return "no" if OURS in self._notes else ""
        checks: list[bool | None] = []
        if self.workload.ratio is not None:
            ratio = self.ratio(OURS, REFERENCE)
            checks.append(None if ratio is None else ratio >= self.workload.ratio)
        if self.workload.bare_ratio is not None:
            share = self.bare_share()
            checks.append(None if share is None else share <= self.workload.bare_ratio)
        if self.workload.limit is not None:
            is_rate, limit = self.workload.more_is_better, self.workload.limit
            checks.append(ours >= limit if is_rate else ours <= limit)
        if False in checks:
            return "no"
        return "" if None in checks else "yes"

    def cells(self, labels: list[str]) -> list[str]:
        """Writes the row in the order of `headings`."""
        cells = [f"{self.workload.title} ({self.workload.unit})"]
        cells += [self._median(label) for label in labels]
        others = [label for label in labels if label != REFERENCE]
        cells += [_times(self.ratio(label, REFERENCE)) for label in others]
        cells += [self.target(), self.met()]
        cells += [self._spread(label) for label in labels]
        return [*cells, self._median(BARE), _times(self.bare_share())]

    def _median(self, label: str) -> str:
        if label in self.medians:
            return number(self.medians[label])
        return self._notes.get(label, "")

    def _spread(self, label: str) -> str:
        values = self.samples.get(label, [])
        if len(values) < 2:
            return ""
        return f"{number(percentile(values, 0.1))}..{number(percentile(values, 0.9))}"

    def data(self) -> dict[str, Any]:
        """The row as plain values for JSON."""
        servers = {
            label: {
                "median": self.medians[label],
                "p10": percentile(values, 0.1),
                "p90": percentile(values, 0.9),
                "count": len(values),
                "ratio": self.ratio(label, REFERENCE),
            }
            for label, values in self.samples.items()
        }
        return {
            "name": self.workload.name,
            "title": self.workload.title,
            "unit": self.workload.unit,
            "target": self.target(),
            "met": self.met(),
            "servers": servers,
            "notes": self._notes,
        }


def _times(value: float | None) -> str:
    return "" if value is None else f"{number(value)}x"


def headings(labels: list[str]) -> list[str]:
    """Names the columns of `Row.cells`."""
    names = ["workload", *labels]
    names += [
        "ratio" if label == OURS else f"{label} ratio" for label in labels if label != REFERENCE
    ]
    names += ["target", "met", *[f"{label} p10..p90" for label in labels]]
    return [*names, "bare", "ours/bare"]


def text_table(rows: list[Row], labels: list[str]) -> str:
    """Lays the rows out for a terminal."""
    lines = [headings(labels), *[row.cells(labels) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    texts = []
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        texts.append("  ".join(cells).rstrip())
    return "\n".join(texts)


def markdown(rows: list[Row], labels: list[str], facts: dict[str, str]) -> str:
    """Writes the facts about the run and its tables, one for each section of the document."""
    lines = [f"- {name}: {value}" for name, value in facts.items()]
    for title, prefix in _SECTIONS.items():
        found = [row for row in rows if _section(row) == prefix]
        if found:
            lines += [""] if title is None else ["", f"### {title}", ""]
            lines += _table(found, labels)
    return "\n".join(lines) + "\n"


# The sections of docs/performance.md by the beginnings of the names of their rows.
_SECTIONS = {None: "", "Through a relay": "relay-", "The sandbox": "sandbox-"}


def _section(row: Row) -> str:
    prefixes = [prefix for prefix in _SECTIONS.values() if row.workload.name.startswith(prefix)]
    return max(prefixes, key=len)


def _table(rows: list[Row], labels: list[str]) -> list[str]:
    names = headings(labels)
    lines = ["| " + " | ".join(names) + " |", "|---|" + "---:|" * (len(names) - 1)]
    return lines + ["| " + " | ".join(row.cells(labels)) + " |" for row in rows]


def write_json(path: str, rows: list[Row], facts: dict[str, str]) -> None:
    """Stores the facts and all rows."""
    data = {"facts": facts, "rows": [row.data() for row in rows]}
    Path(path).write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def gather_facts(versions: dict[str, str], folder: str) -> dict[str, str]:
    """Describes the machine and the run."""
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "kernel": f"{platform.system()} {platform.release()}",
        "CPU": f"{_cpu_model()}, {os.cpu_count()} cores",
        "Python": f"{platform.python_version()}, {_python_build()}",
        "files on": _file_system(folder),
    }
    return facts | {f"version of {label}": version for label, version in versions.items()}


def _python_build() -> str:
    """How this Python was built: an optimised build is 10 to 25 % faster."""
    options = sysconfig.get_config_var("CONFIG_ARGS") or ""
    names = {"--enable-optimizations": "profile-guided", "--with-lto": "link-time"}
    found = [name for option, name in names.items() if option in options]
    kinds = " and ".join(found) if found else "no"
    return f"built with {kinds} optimisation"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _file_system(folder: str) -> str:
    """Names the type of the file system with the longest mount point above the folder."""
    best, kind = "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _device, point, name = line.split()[:3]
        inside = folder == point or folder.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, name
    return kind
