"""Turns the outcomes of a soak into one table."""

from collections import Counter
from collections.abc import Callable

from bench.report import number, percentile

from soak.outcome import Outcome

_MEGABYTE = 1_000_000

Cell = Callable[[Outcome], str]


def _count(name: str) -> Cell:
    return lambda outcome: f"{outcome.world.tally[name]:,}"


def _megabytes(name: str) -> Cell:
    return lambda outcome: number(outcome.world.tally[name] / _MEGABYTE)


def _ping(share: float) -> Cell:
    def cell(outcome: Outcome) -> str:
        times = outcome.ping_seconds
        return number(percentile(times, share) * 1000) if times else ""

    return cell


def _resident(outcome: Outcome) -> str:
    if outcome.warm is None or outcome.end is None:
        return ""
    values = outcome.warm.resident, outcome.end.resident, outcome.peak_resident
    return " / ".join(number(value / _MEGABYTE) for value in values)


def _pair(name: str) -> Cell:
    def cell(outcome: Outcome) -> str:
        if outcome.warm is None or outcome.end is None:
            return ""
        return " / ".join(str(getattr(each, name)) for each in (outcome.warm, outcome.end))

    return cell


def _helpers(outcome: Outcome) -> str:
    return "" if outcome.end is None else str(outcome.end.helpers.total())


def _others(outcome: Outcome) -> str:
    return "" if outcome.end is None else str(len(outcome.end.others))


def _left(phase: str, kind: str) -> Cell:
    def cell(outcome: Outcome) -> str:
        found = getattr(outcome, phase)
        return "" if found is None else str(len(getattr(found, kind)))

    return cell


ROWS: tuple[tuple[str, Cell], ...] = (
    ("traffic (s)", lambda outcome: f"{outcome.traffic_seconds:.0f}"),
    ("scenarios", lambda outcome: f"{outcome.scenarios_run:,}"),
    ("commands started", _count("commands")),
    ("… confined requests", _count("confined requests")),
    ("… trees with daemons killed", _count("trees killed")),
    (
        "clients and connections",
        lambda o: f"{o.world.tally['clients'] + o.world.tally['connections']:,}",
    ),
    ("… connections cut", _count("connections cut")),
    ("… clients killed", _count("clients killed")),
    (
        "helpers killed or stopped",
        lambda o: str(o.world.tally["helpers killed"] + o.world.tally["helpers stopped"]),
    ),
    ("… confined requests repeated for it", _count("confined requests repeated")),
    ("bytes printed (MB)", _megabytes("bytes printed")),
    ("… received and right", _megabytes("bytes received")),
    ("… declared lost by retention", _megabytes("bytes declared lost")),
    ("… of commands killed on purpose", _megabytes("bytes of killed commands")),
    ("outputs with wrong or undeclared bytes", _count("wrong outputs")),
    ("processes that outlived their kill", _count("processes left")),
    ("ping while loaded, median (ms)", _ping(0.5)),
    ("… p99 (ms)", _ping(0.99)),
    ("… longest (ms)", _ping(1.0)),
    ("memory after warm-up / end / peak (MB)", _resident),
    ("descriptors after warm-up / end", _pair("descriptor_count")),
    ("threads after warm-up / end", _pair("threads")),
    ("helper processes at the end", _helpers),
    ("other processes below the server", _others),
    ("SIGTERM until the end (s)", lambda outcome: f"{outcome.stop_seconds:.2f}"),
    ("… processes left", _left("after_stop", "processes")),
    ("… files, ports, mounts left", lambda o: _rest(o, "after_stop")),
    ("SIGKILL: processes left", _left("after_kill", "processes")),
    ("… files, ports, mounts left", lambda o: _rest(o, "after_kill")),
    ("violations", lambda outcome: str(len(outcome.findings))),
)


def _violation_rows(outcomes: list[Outcome]) -> list[list[str]]:
    """One row for each scenario or phase with violations."""
    counts = [Counter(finding.scenario for finding in each.findings) for each in outcomes]
    names = sorted({name for count in counts for name in count})
    return [[f"… in {name}", *(str(count[name]) for count in counts)] for name in names]


def _rest(outcome: Outcome, phase: str) -> str:
    found = getattr(outcome, phase)
    return "" if found is None else str(len(found.files) + len(found.ports) + len(found.mounts))


def _lines(outcomes: list[Outcome]) -> list[list[str]]:
    heading = ["", *(outcome.label for outcome in outcomes)]
    rows = [[title, *(cell(each) for each in outcomes)] for title, cell in ROWS]
    return [heading, *rows, *_violation_rows(outcomes)]


def text_table(outcomes: list[Outcome]) -> str:
    """The table for a terminal."""
    lines = _lines(outcomes)
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        ).rstrip()
        for line in lines
    )


def markdown(outcomes: list[Outcome], facts: dict[str, str]) -> str:
    """The facts about the run and its table."""
    heading, *rows = _lines(outcomes)
    lines = [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", "| " + " | ".join(heading) + " |", "|---|" + "---:|" * len(outcomes)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"
