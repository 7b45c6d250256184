"""The command `python -m tests.fuzz`: every decoder and every method, for a given time.

Each subject runs in a process of its own. Inputs that reach new code are kept in the cache folder
and are the start of the next run; `--keep` copies the smallest sufficient set of them into the
repository. An input that breaks a rule is stored in the folder of findings.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz import engine
from tests.fuzz.live import fuzz_server
from tests.fuzz.proxy_differential import NAME as PROXY
from tests.fuzz.proxy_differential import Differential, fuzz_proxy
from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS

_ROOT = Path(__file__).resolve().parents[2]
_SECONDS = 60.0
# Shares of the time: the decoders together, each run of the grammar, the properties, and requests
# through a proxy to origins with different parsers.
_SHARES = {"methods": 0.2, "methods-confined": 0.2, "properties": 0.15, PROXY: 0.15}
_PROPERTIES = sorted(path.name for path in Path(__file__).parent.glob("test_*.py"))
# The repository keeps small inputs only; larger ones are found again from them.
_KEPT_BYTES = 2_048
_BY_NAME = {target.name: target for target in TARGETS}
_SUBJECTS = [*_BY_NAME, *_SHARES]


def main() -> int:
    """Fuzz the chosen subjects and print a table."""
    options = _parse()
    if options.replay:
        return _replay(options.replay)
    if options.keep:
        _keep(options.cache)
        return 0
    if options.atheris:
        _atheris(_BY_NAME[options.atheris], options.seconds, options.cache)
    print(f"seed {options.seed}; findings and new inputs go to {options.cache}", flush=True)
    began = time.monotonic()
    try:
        reports = _fuzz(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    _print_table(reports)
    findings = sum(len(report["findings"]) for report in reports)
    print(f"{findings} findings in {time.monotonic() - began:.0f} s")
    return int(findings > 0)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description="Feeds every decoder and every method of the server for a given time.",
        epilog="subjects: " + ", ".join(_SUBJECTS),
    )
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="time for all subjects")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "big"))
    parser.add_argument("--only", type=_subjects, default=_SUBJECTS, metavar="NAME,...")
    parser.add_argument("--cache", type=Path, default=_ROOT / ".fuzz", metavar="FOLDER")
    parser.add_argument("--keep", action="store_true", help="copy inputs into the repository")
    parser.add_argument("--replay", nargs="+", metavar="FILE", help="TARGET-DIGEST files to check")
    parser.add_argument("--atheris", choices=list(_BY_NAME), help="use Atheris, if installed")
    return parser.parse_args()


def _subjects(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in _SUBJECTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown subject {', '.join(unknown)}")
    return names


def _seconds_of(name: str, options: argparse.Namespace) -> float:
    """The part of the time that a subject gets; several run at once."""
    decoders = [each for each in options.only if each in _BY_NAME]
    for_others = sum(share for each, share in _SHARES.items() if each in options.only)
    total: float = options.seconds * min(len(options.only), os.cpu_count() or 1)
    if name in _SHARES:
        return total * (_SHARES[name] if decoders else _SHARES[name] / for_others)
    return total * (1 - for_others) / len(decoders)


def _fuzz(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run each subject in a fork of this process, as many at a time as there are processors."""
    # The longest first, so that all end at about the same time.
    waiting = sorted(options.only, key=lambda name: _seconds_of(name, options))
    running: dict[int, str] = {}
    reports = []
    try:
        while waiting or running:
            while waiting and len(running) < (os.cpu_count() or 1):
                name = waiting.pop()
                running[_start(name, options)] = name
            pid, status = os.wait()
            reports.append(_finish(running.pop(pid), status, options))
    finally:
        for pid in running:
            os.kill(pid, signal.SIGTERM)
            os.waitpid(pid, 0)
    return reports


def _report_file(name: str, options: argparse.Namespace) -> Path:
    path: Path = options.cache / "reports" / name
    return path


def _start(name: str, options: argparse.Namespace) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    code = 1
    try:
        report = _run_one(name, _seconds_of(name, options), options.seed, options.cache)
        _write(_report_file(name, options), json.dumps(report).encode())
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


def _finish(name: str, status: int, options: argparse.Namespace) -> dict[str, Any]:
    """The report of an ended subject; its death is a finding."""
    report: dict[str, Any] = {"name": name, "inputs": 0, "new": 0}
    report["findings"] = [f"the process ended with {os.waitstatus_to_exitcode(status)}"]
    if status == 0:
        report = json.loads(_report_file(name, options).read_bytes())
    for finding in report["findings"]:
        print(f"{name}: {finding}", flush=True)
    return report


def _run_one(name: str, seconds: float, seed: int, cache: Path) -> dict[str, Any]:
    random = Random(f"{seed}/{name}")
    if name == "properties":
        return _run_properties(random, seconds, cache)
    if name in _SHARES:
        if name == PROXY:
            run = fuzz_proxy(random, seconds)
        else:
            run = fuzz_server(random, seconds, is_confined=name == "methods-confined")
        findings = [_store(cache, each) for each in run.findings]
        return {"name": name, "inputs": run.requests, "new": run.results, "findings": findings}
    target = _BY_NAME[name]
    known = engine.kept_inputs(target, cache)
    result = engine.fuzz(target, known, random, seconds)
    new = [data for data in result.interesting if data not in set(known)]
    for data in new:
        _write(cache / name / engine.name_of(data), data)
    findings = [_store(cache, each) for each in result.findings]
    return {"name": name, "inputs": result.inputs, "new": len(new), "findings": findings}


def _run_properties(random: Random, seconds: float, cache: Path) -> dict[str, Any]:
    """The properties of the test files with other examples, which hypothesis remembers."""
    deadline = time.monotonic() + seconds
    variables = {
        "EXEC_SERVER_FUZZ_EXAMPLES": str(cache / "hypothesis"),
        "EXEC_SERVER_TEST_EXAMPLES": "all",
    }
    runs = 0
    findings: list[str] = []
    while time.monotonic() < deadline and not findings:
        name = random.choice(_PROPERTIES)
        words = ["-q", "-p", "no:cacheprovider", f"--hypothesis-seed={random.getrandbits(32)}"]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *words, f"tests/fuzz/{name}"],
                cwd=_ROOT,
                env=os.environ | variables,
                capture_output=True,
                timeout=max(5.0, deadline - time.monotonic()),
                check=False,
            )
        except subprocess.TimeoutExpired:
            break
        runs += 1
        if done.returncode:
            findings.append(f"{name}: {done.stdout[-2000:].decode()}")
    return {"name": "properties", "inputs": runs, "new": 0, "findings": findings}


def _store(cache: Path, finding: engine.Finding) -> str:
    """Write the input of a finding; returns the text for people."""
    path = cache / "findings" / f"{finding.target}-{engine.name_of(finding.data)}"
    _write(path, finding.data)
    return f"{finding.text}\n    input: {path}"


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _print_table(reports: list[dict[str, Any]]) -> None:
    print(f"{'subject':22} {'inputs':>10} {'new':>6} {'findings':>9}")
    for report in reports:
        count = len(report["findings"])
        print(f"{report['name']:22} {report['inputs']:>10,} {report['new']:>6} {count:>9}")


def _replay(names: list[str]) -> int:
    failed = 0
    for name in names:
        subject, data = Path(name).name.rpartition("-")[0], Path(name).read_bytes()
        if subject == PROXY:
            with contextlib.closing(Differential()) as differential:
                reason = differential.check(data)
        else:
            reason = engine.check(_BY_NAME[subject], data)
        print(f"{name}: {reason or 'no rule is broken'}")
        failed += reason is not None
    return int(failed > 0)


def _keep(cache: Path) -> None:
    """Replace the inputs of the repository by the smallest ones that reach the same code."""
    for target in TARGETS:
        inputs = [data for data in engine.kept_inputs(target, cache) if len(data) <= _KEPT_BYTES]
        chosen = engine.minimal(target, inputs)
        folder = engine.KEPT / target.name
        for path in folder.glob("*"):
            path.unlink()
        for data in chosen:
            _write(folder / engine.name_of(data), data)
        print(f"{target.name:22} {len(chosen):5} inputs, {sum(map(len, chosen)):7,} bytes")


def _atheris(target: Target, seconds: float, cache: Path) -> None:
    """Let Atheris, a fuzzer guided by coverage, choose the inputs; does not return."""
    atheris: Any = importlib.import_module("atheris")  # optional: pip install atheris

    atheris.instrument_all()
    folder = cache / target.name
    folder.mkdir(parents=True, exist_ok=True)
    words = [sys.argv[0], str(folder), str(engine.KEPT / target.name)]
    atheris.Setup([*words, f"-max_total_time={seconds:.0f}", "-max_len=65536"], target.check)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
