"""Feeds a target with mutated inputs for a time, and keeps those that reach new code.

An input is a finding if the target raises, if it takes more processor time than a stated bound,
or if memory grows although nothing is kept.
"""

from __future__ import annotations

import gc
import hashlib
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

from tests.fuzz import novelty
from tests.fuzz.mutation import MAX_BYTES, mutate, mutate_json
from tests.fuzz.target import Target

KEPT = Path(__file__).with_name("corpus")

# Processor time that one input of at most MAX_BYTES (64 KiB) may take: about a hundred times the
# usual, so that only work that is quadratic or worse exceeds it, on slow machines too.
WORK_SECONDS = 0.25
# An input that takes longer is measured again, so that a pause of the machine is no finding.
_WORK_ATTEMPTS = 3
# Resident memory that may be added while a target runs: caches with a bound, and fragmentation.
GROWTH_BYTES = 48 * 1024 * 1024
# Inputs that are mutated; the most recent ones are the most interesting.
_POOL = 2_000
_RECENT = 50


@dataclass(frozen=True)
class Finding:
    """An input that breaks a rule."""

    target: str
    data: bytes
    text: str


@dataclass
class Run:
    """The result of feeding one target."""

    target: Target
    inputs: int = 0
    interesting: list[bytes] = field(default_factory=list)  # that reached new code
    findings: list[Finding] = field(default_factory=list)


def check(target: Target, data: bytes) -> str | None:
    """Give a target one input; returns the reason if it breaks a rule."""
    began = time.thread_time()
    try:
        target.check(data)
    except Exception:
        return traceback.format_exc(limit=-3)
    return None if time.thread_time() - began <= WORK_SECONDS else _work(target, data)


def _work(target: Target, data: bytes) -> str | None:
    """Measure an input that was slow without a trace function and garbage of others."""
    tracer = sys.gettrace()
    sys.settrace(None)
    try:
        for _ in range(_WORK_ATTEMPTS):
            gc.collect()
            began = time.thread_time()
            target.check(data)
            taken = time.thread_time() - began
            if taken <= WORK_SECONDS:
                return None
    finally:
        sys.settrace(tracer)
    return f"{taken:.2f} s of processor time for {len(data)} bytes, allowed are {WORK_SECONDS} s"


def kept_inputs(target: Target, *folders: Path) -> list[bytes]:
    """The inputs of a target in the repository and in other folders, smallest first."""
    found = {bytes(seed) for seed in target.seeds}
    for folder in (KEPT, *folders):
        place = folder / target.name
        if place.is_dir():
            found |= {path.read_bytes()[:MAX_BYTES] for path in sorted(place.iterdir())}
    return sorted(found, key=lambda data: (len(data), data))


def fuzz(target: Target, inputs: Sequence[bytes], random: Random, seconds: float) -> Run:
    """Run the inputs and mutations of them until the time is over."""
    run = Run(target)
    pool: list[bytes] = []
    with novelty.counting() as count:

        def give(data: bytes) -> None:
            reason: list[str | None] = []
            new = count(lambda: reason.append(check(target, data)))
            run.inputs += 1
            if reason[0] is not None:
                run.findings.append(Finding(target.name, data, reason[0]))
            elif new:
                run.interesting.append(data)
                pool.append(data)

        for data in inputs or [b""]:
            give(data)
        pool = list(inputs or [b""])
        change = mutate_json if target.is_json else mutate
        before = _resident()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not run.findings:
            start = random.choice(pool[-_RECENT:] if random.random() < 0.3 else pool)
            give(change(start, random, pool, target.words))
            del pool[:-_POOL]
    gc.collect()
    growth = _resident() - before
    if growth > GROWTH_BYTES:
        text = f"memory grew by {growth / 1e6:.0f} MB in {run.inputs:,} inputs"
        run.findings.append(Finding(target.name, b"", text))
    return run


def minimal(target: Target, inputs: Iterable[bytes]) -> list[bytes]:
    """The inputs that reach new code if all are run in order of their size."""
    found = []
    with novelty.counting() as count:
        for data in sorted(set(inputs), key=lambda each: (len(each), each)):
            if count(partial(check, target, data)):
                found.append(data)
    return found


def name_of(data: bytes) -> str:
    """The file name of an input."""
    return hashlib.sha256(data).hexdigest()[:16]


def _resident() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096
