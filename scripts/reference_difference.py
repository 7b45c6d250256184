"""Prints what differs between two versions of the reference.

usage: reference_difference.py OLD NEW [--without-suite]

OLD and NEW are versions, which npm installs into ~/.cache/exec-server-versions if they are not
there, or paths of programs. Compared are the members and flags that a server reports, the options
of its command line, the answers to all requests of tests/conformance/cases and parameters.json, and
the outcome of each test of tests/conformance on the reference, without those that play a client.
Each version answers the requests three times: answers that vary are counted and not compared.
The exit code is 0 whether there are differences or not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.conformance import test_cases, test_parameters
from tests.conformance.matching import mismatch
from tests.conformance.scene import Scene
from tests.support.client import (
    Client,
    Disconnected,
    RpcFailure,
    Server,
    server_environment,
    start_server,
)
from tests.versions import installed

ROOT = Path(__file__).resolve().parents[1]
# All of the suite's reference half takes ten minutes on a busy machine.
SUITE_SECONDS = 3600
HELP_SECONDS = 60
# How often the requests are made. Some answers race with the end of a process.
PASSES = 3
# The texts of one difference, for a terminal.
SHOWN_CHARACTERS = 700

Observed = dict[str, str]
# A server does not answer any more: AssertionError is also raised when nothing arrives in time.
_ENDS = (AssertionError, Disconnected, OSError)
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PORT = re.compile(r"127\.0\.0\.1:\d+")
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
_SOURCE_LINE = re.compile(r"\.rs:\d+:\d+")
_VERSION = re.compile(r'(?<="executorVersion": )"[^"]*"|sha256:[0-9a-f]{64}')
_OPTION = re.compile(r"^ {2,6}(-\w, )?(--[\w-]+)(.*)$")
_SUBCOMMAND = re.compile(r"^  ([\w-]+)  +\S")


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="reference_difference.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("old", metavar="OLD")
    parser.add_argument("new", metavar="NEW")
    parser.add_argument("--without-suite", action="store_true", help="leave out the tests")
    arguments = parser.parse_args(words)
    try:
        programs = [_program(each) for each in (arguments.old, arguments.new)]
    except OSError as problem:
        print(problem, file=sys.stderr)
        return 1
    parts = [_describe, _options, _answers] + ([] if arguments.without_suite else [_outcomes])
    for part in parts:
        title, *_ = (part.__doc__ or "").partition(":")
        old, new = (_observe(program, part) for program in programs)
        print("\n".join([f"## {title}", *difference(old, new), ""]), flush=True)
    return 0


def _program(word: str) -> Path:
    """The program of a version or at a path; raises OSError."""
    if re.fullmatch(r"\d+\.\d+\.\d+\S*", word):
        return installed.install(word)
    if not os.access(word, os.X_OK):
        raise FileNotFoundError(f"{word} is neither a version nor a program")
    return Path(word).resolve()


# ---- pure ------------------------------------------------------------------------------


def masked(text: str, folder: str) -> str:
    """A text without what differs in each run: folders, ids, ports, lines of the source."""
    text = text.replace(folder, "{dir}")
    masks = ((_UUID, "{id}"), (_PORT, "{address}"), (_ADDRESS, "0x"), (_SOURCE_LINE, ".rs"))
    for pattern, name in masks:
        text = pattern.sub(name, text)
    return text


def flattened(value: object, name: str = "") -> Observed:
    """The members of a JSON value by their paths; a list is one value."""
    if not isinstance(value, dict):
        return {name: json.dumps(value)}
    found: Observed = {}
    for member, below in value.items():
        found |= flattened(below, f"{name}.{member}" if name else member)
    return found


def options(text: str) -> Observed:
    """The options in a help text, each with its description in one line."""
    found: Observed = {}
    name = None
    for line in text.splitlines():
        match = _OPTION.match(line)
        if match is not None:
            name = match[2]
            found[name] = " ".join(match[3].split())
        elif not line.startswith(" ") and line:
            name = None
        elif name is not None:
            found[name] = " ".join([*found[name].split(), *line.split()])
    return found


def subcommands(text: str) -> list[str]:
    """The names below `Commands:`, without `help`."""
    section = text.partition("\nCommands:\n")[2].partition("\n\n")[0]
    names = [match[1] for line in section.splitlines() if (match := _SUBCOMMAND.match(line))]
    return [name for name in names if name != "help"]


def stable(observed: Sequence[Observed]) -> tuple[Observed, set[str]]:
    """What was observed each time, and the names of what varied."""
    same = dict(set.intersection(*(set(each.items()) for each in observed)))
    return same, set().union(*observed) - same.keys()


def difference(old: tuple[Observed, set[str]], new: tuple[Observed, set[str]]) -> list[str]:
    """Lines about what is gone, new or other, and how much was compared."""
    (before, varied_before), (after, varied_after) = old, new
    varied = varied_before | varied_after
    lines = []
    for name in sorted((before.keys() | after.keys()) - varied):
        was, now = before.get(name), after.get(name)
        if now is None:
            lines.append(f"- {name}: {_shown(was)}")
        elif was is None:
            lines.append(f"+ {name}: {_shown(now)}")
        elif was != now:
            lines += [f"! {name}", f"    old: {_shown(was)}", f"    new: {_shown(now)}"]
    compared = len((before.keys() & after.keys()) - varied)
    return [*lines, f"compared: {compared}; not compared, because they vary: {len(varied)}"]


def _shown(text: str | None) -> str:
    text = " ".join((text or "").split())
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"


# ---- what is observed -------------------------------------------------------------------


def _observe(program: Path, part: Any) -> tuple[Observed, set[str]]:
    with installed.as_reference(program):
        return stable([part() for _ in range(PASSES if part is _answers else 1)])


def _program_folder() -> str:
    return str(Path(os.environ["EXEC_SERVER_REFERENCE"]).parents[1])


def _describe() -> Observed:
    """Members and flags of initialize and environment/info: names and values."""
    with tempfile.TemporaryDirectory() as folder, start_server("reference", cwd=folder) as server:
        with server.connect() as client:
            found = {
                "initialize": {"sessionId": client.session_id}
                | {"environmentInfo": client.environment_info},
                "environment/info": answer(client, "environment/info"),
                "environment/status": answer(client, "environment/status"),
            }
        return {
            name: masked(value.replace(_program_folder(), "{program}"), folder)
            for name, value in flattened(found).items()
        }


def _options() -> Observed:
    """Options of the command line: of `codex exec-server` and its subcommands."""
    return _options_of("exec-server")


def _options_of(*words: str) -> Observed:
    program = os.environ["EXEC_SERVER_REFERENCE"]
    done = subprocess.run(
        [program, *words, "--help"],
        env=server_environment("reference"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=HELP_SECONDS,
        check=True,
    )
    title = " ".join(words)
    found = {f"{title} {name}": text for name, text in options(done.stdout).items()}
    for name in subcommands(done.stdout):
        found |= {f"{title} {name}": "a subcommand"} | _options_of(*words, name)
    return found


class _Recorder(Scene):
    """A scene that records every answer, whether it is the expected one or not."""

    def __init__(self, name: str, found: Observed, *words: Any, **options: Any) -> None:
        super().__init__(*words, **options)
        self._name = name
        self._found = found
        self._count = 0

    def _compare(self, expected: Any, actual: Any) -> None:
        mismatch(expected, actual, self.variables)  # keeps what later steps need
        self._count += 1
        text = masked(json.dumps(actual, ensure_ascii=False), str(self.folder))
        # Its version is in the first part, and need not be shown again.
        text = _VERSION.sub('"{version}"', text.replace(_program_folder(), "{program}"))
        self._found[f"{self._name} {self._count}"] = text


def _answers() -> Observed:
    """Answers to the requests of all cases: those of cases/*.json and parameters.json."""
    found: Observed = {}
    with tempfile.TemporaryDirectory() as root:
        home = Path(root).resolve()
        try:
            with start_server("reference", env={"HOME": str(home)}, cwd=home) as server:
                for name, case in test_cases.load().items():
                    folder = home / name.replace("/", "-")
                    folder.mkdir()
                    _play(name, case, server, folder, found)
                for method in test_parameters.METHODS:
                    found |= _refusals(method, server, home)
        except _ENDS as problem:  # it hangs, and does not end in order either
            found["the server's end"] = masked(repr(problem), str(home))
    return found


def _play(name: str, case: Mapping[str, Any], server: Server, folder: Path, into: Observed) -> None:
    steps = case.get("reference", case["steps"])
    if "ours" in case and "reference" not in case:
        return  # the reference hangs or has no such method
    try:
        test_cases.play(dict(case), steps, server, folder, partial(_Recorder, name, into))
    except (*_ENDS, KeyError, RpcFailure) as problem:
        # A step did not happen, or an earlier answer lacks what a later step needs.
        into[f"{name} end"] = masked(repr(problem), str(folder))


def _refusals(method: str, server: Server, folder: Path) -> Observed:
    found: Observed = {}
    with server.connect() as client:
        for params, _ in test_parameters.wrong_params(method, folder, "reference"):
            name = masked(f"{method} {json.dumps(params)}", str(folder))
            try:
                found[name] = masked(json.dumps(answer(client, method, params)), str(folder))
            except _ENDS as problem:
                found[name] = masked(repr(problem), str(folder))
                break
    return found


def answer(client: Client, method: str, params: Any = None) -> Any:
    """The result of a request, or code and text of its error: a version may lack the method."""
    try:
        return client.call(method, params)
    except RpcFailure as failure:
        return [failure.code, failure.message]


def _outcomes() -> Observed:
    """Outcomes of the tests of tests/conformance on the reference: the reasons of failures."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile"),
                *("-m", "reference", "-k", "not codex", "-p", "no:cacheprovider"),
                *(f"--junitxml={report}", "tests/conformance"),
            ],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            timeout=SUITE_SECONDS,
            check=False,
        )
        return outcomes(report.read_text())


def outcomes(report: str) -> Observed:
    """The outcome of each test in a report of pytest, with the first lines of a reason."""
    found: Observed = {}
    for test in ElementTree.fromstring(report).iter("testcase"):
        problem = next((each for each in test if each.tag in ("failure", "error")), None)
        skipped = test.find("skipped") is not None
        text = "skipped" if skipped else "passed"
        if problem is not None:
            text = masked(f"{problem.tag}: {problem.get('message', '')}", str(ROOT))
            text = re.sub(r"(?<=/)pytest-\S+?(?=/)", "pytest", text)
        found[f"{test.get('classname')}::{test.get('name')}"] = text
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
