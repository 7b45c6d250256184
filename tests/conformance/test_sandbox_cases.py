"""The cases of sandbox_cases.json, whose `format` says how each of its members is meant."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from tests.support.barriers import User, in_private_mounts, start_server_as, user_id
from tests.support.client import Client, Server
from tests.support.sandbox import (
    MARKER,
    NEEDS_ROOT,
    Json,
    Outcome,
    Scratch,
    finish,
    interpreter,
    run,
    start_process,
)

_FILE = json.loads(Path(__file__).with_name("sandbox_cases.json").read_text())
_CASES: dict[str, Json] = {case["name"]: case for case in _FILE["cases"]}
# Places outside the scratch tree that cases name, which a failing one may have left.
_STRAYS = (Path("/tmp/exec-demo-t"), Path("/dev/shm/exec-demo-shm"))


class Place(NamedTuple):
    """Which server runs a case, and where."""

    kind: str
    user: User
    environment: str  # a barrier's name, or `private-mounts`

    def __str__(self) -> str:
        return "-".join(part for part in self if part != "none")


@dataclass
class Stage:
    """A running server with its scratch tree."""

    kind: str
    server: Server
    scratch: Scratch

    def fill_in(self, value: Any) -> Any:
        """A value of the file with policies and substitutions put in."""
        if isinstance(value, dict):
            return {name: self.fill_in(member) for name, member in value.items()}
        if isinstance(value, list):
            return [self.fill_in(member) for member in value]
        if not isinstance(value, str):
            return value
        if value.startswith("@") and value[1:] in _FILE["policies"]:
            return self.fill_in(_FILE["policies"][value[1:]])
        for name, text in self._substitutions.items():
            value = value.replace(name, text)
        return value

    @functools.cached_property
    def _substitutions(self) -> dict[str, str]:
        return {
            "{BASE}": str(self.scratch.base),
            "{PYTHON}": interpreter(),
            "{SERVER_PORT}": str(urlsplit(self.server.url).port),
            "{SERVER_PID}": str(self.server.process.pid),
            "{SERVER_ENV_MARKER}": MARKER,
        }


@dataclass
class Seen:
    """Everything that one request brought about."""

    scratch: Scratch
    result: Json | None = None
    error: Json | None = None
    process: Outcome = field(default_factory=Outcome)
    seconds: float = 0.0


def _ask(client: Client, stage: Stage, request: Json) -> Seen:
    """Sends a request of any form but a sequence."""
    began = time.monotonic()
    seen = Seen(stage.scratch)
    if "terminate" in request:
        seen.process = _terminate(client, request)
    elif "race" in request:
        _race(client, stage, request["race"])
    elif request["method"] == "process/start":
        params = dict(request["params"])
        seen.process = run(client, params.pop("sandbox", None), params.pop("argv"), **params)
    else:
        answer = client.answer(client.request(request["method"], request["params"]))
        seen.result, seen.error = answer.get("result"), answer.get("error")
    seen.seconds = time.monotonic() - began
    return seen


def _terminate(client: Client, request: Json) -> Outcome:
    params = dict(request["terminate"]["params"])
    start = start_process(client, params.pop("sandbox", None), params.pop("argv"), **params)
    time.sleep(request["afterSeconds"])
    client.call("process/terminate", {"processId": start["processId"]})
    return finish(client, start)


def _race(client: Client, stage: Stage, race: Json) -> None:
    """Sends one request many times while a thread re-points a symbolic link."""
    link = stage.scratch.path(race["flip"])
    spare = link.with_name(link.name + ".spare")
    over = threading.Event()

    def flip() -> None:
        while not over.is_set():
            for target in race["targets"]:
                spare.symlink_to(target)
                spare.replace(link)

    thread = threading.Thread(target=flip)
    thread.start()
    try:
        for _ in range(race["requests"]):
            client.answer(client.request(race["request"]["method"], race["request"]["params"]))
    finally:
        over.set()
        thread.join()


def _includes(whole: Any, part: Any) -> bool:
    """Whether a value has at least the members of another."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(
            name in whole and _includes(whole[name], member) for name, member in part.items()
        )
    return bool(whole == part)


def _check_result(seen: Seen, wanted: Json) -> bool:
    return seen.result is not None and _includes(seen.result, wanted)


def _check_error(seen: Seen, wanted: Json) -> bool:
    return seen.error is not None and _includes(seen.error, wanted)


def _check_message(seen: Seen, wanted: str) -> bool:
    return seen.error is not None and wanted in seen.error["message"]


def _check_entries(seen: Seen, wanted: list[str]) -> bool:
    return seen.result is not None and set(wanted) <= {
        entry["fileName"] for entry in seen.result["entries"]
    }


def _check_server_environment(seen: Seen, wanted: bool) -> bool:
    assert wanted is True
    if seen.result is None:
        return False
    return MARKER.encode() not in base64.b64decode(seen.result["dataBase64"])


def _check_start_error(seen: Seen, wanted: Json) -> bool:
    refusal = seen.process.refusal
    return refusal is not None and _includes(
        {"code": refusal.code, "message": refusal.message}, wanted
    )


def _check_exit_code(seen: Seen, wanted: int | Json) -> bool:
    code = seen.process.exit_code
    if isinstance(wanted, dict):
        return code is not None and code != wanted.get("not")
    return code == wanted


def _check_stdout_number(seen: Seen, wanted: int) -> bool:
    return int(seen.process.stdout) <= wanted


def _check_host(seen: Seen, wanted: list[Json]) -> bool:
    return all(_is_fact(seen.scratch, fact) for fact in wanted)


def _is_fact(scratch: Scratch, fact: Json) -> bool:
    if "sameInode" in fact:
        one, other = (scratch.path(name) for name in fact["sameInode"])
        return one.samefile(other)
    path = scratch.path(fact["path"])
    ((kind, wanted),) = ((k, v) for k, v in fact.items() if k != "path")
    if kind == "content":
        return path.is_file() and path.read_text() == wanted
    checks = {
        "absent": not os.path.lexists(path),
        "exists": os.path.lexists(path),
        "symlink": path.is_symlink(),
    }
    return checks[kind] is wanted


_CHECKS: dict[str, Callable[[Seen, Any], bool]] = {
    "result": _check_result,
    "error": _check_error,
    "errorMessageContains": _check_message,
    "entriesInclude": _check_entries,
    "resultLacksServerEnv": _check_server_environment,
    "maxSeconds": lambda seen, wanted: seen.seconds <= wanted,
    "start": lambda seen, wanted: _includes(seen.process.start, wanted),
    "startError": _check_start_error,
    "exitCode": _check_exit_code,
    "sandboxDenied": lambda seen, wanted: seen.process.denied is wanted,
    "outputContains": lambda seen, wanted: wanted in seen.process.output,
    "outputContainsAll": lambda seen, wanted: all(w in seen.process.output for w in wanted),
    "outputLacks": lambda seen, wanted: wanted not in seen.process.output,
    "outputLacksAlso": lambda seen, wanted: wanted not in seen.process.output,
    "stdoutLacks": lambda seen, wanted: wanted not in seen.process.stdout,
    "stdoutIntMax": _check_stdout_number,
    "host": _check_host,
    "anyOf": lambda seen, wanted: any(not _violations(seen, each) for each in wanted),
    "settleSeconds": lambda seen, wanted: True,  # waited for before anything is checked
    "enforcedElsewhere": lambda seen, wanted: True,  # said for readers
}


def _violations(seen: Seen, expect: Json) -> list[str]:
    """Which expectations are not met."""
    return [
        f"{name}: {wanted!r}" for name, wanted in expect.items() if not _CHECKS[name](seen, wanted)
    ]


def _meet(seen: Seen, expect: Json) -> None:
    time.sleep(expect.get("settleSeconds", 0.0))
    if seen.process.refusal is not None and "exitCode" in expect:
        raise AssertionError(f"not started: {seen.process.refusal}")
    assert not (violated := _violations(seen, expect)), f"violated {violated} by {seen}"


def _play(case: Json, stage: Stage) -> None:
    """Runs a case from its setup to its last expectation."""
    stage.scratch.reset(stage.fill_in([*_FILE["baseSetup"], *case["setup"]]))
    request, expect = stage.fill_in(case["request"]), stage.fill_in(_expected(case, stage.kind))
    steps = request.get("sequence", [{"request": request, "expect": expect}])
    with stage.server.connect() as client:
        for step in steps:
            if "host" in step:
                stage.scratch.apply(step["host"])
            else:
                _meet(_ask(client, stage, step["request"]), step["expect"])
    if "sequence" in request:
        _meet(Seen(stage.scratch), expect)


def _expected(case: Json, kind: str) -> Json:
    """What a server of this kind has to do; `ours` says where ours differs on purpose."""
    expected: Json = case["ours"]["expect"] if kind == "ours" and "ours" in case else case["expect"]
    return expected


@contextlib.contextmanager
def _start(place: Place) -> Iterator[Stage]:
    barrier = "none" if place.environment == "private-mounts" else place.environment
    with (
        Scratch(user_id(place.user)) as scratch,
        start_server_as(
            place.kind,
            place.user,
            barrier=barrier,
            env={MARKER: MARKER, "HOME": str(scratch.base), "TMPDIR": None},
        ) as server,
    ):
        yield Stage(place.kind, server, scratch)


class Stages:
    """The one stage that is in use; cases come sorted by their places."""

    def __init__(self) -> None:
        self._exits = contextlib.ExitStack()
        self._place: Place | None = None
        self._stage: Stage | None = None

    def at(self, place: Place) -> Stage:
        """The running stage of a place."""
        if self._stage is None or self._place != place:
            self.close()
            self._stage, self._place = self._exits.enter_context(_start(place)), place
        return self._stage

    def close(self) -> None:
        self._stage = None
        self._exits.close()
        for stray in _STRAYS:
            stray.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def stages() -> Iterator[Stages]:
    """One server for all the cases of a place."""
    running = Stages()
    yield running
    running.close()


def _environments(case: Json) -> Sequence[str]:
    """Where a case has to hold: without namespaces it must not matter whether there is Landlock."""
    named = case.get("env", "none")
    return (named, "no-namespaces-no-landlock") if named == "no-namespaces" else (named,)


def _marks(place: Place, case: Json) -> list[pytest.MarkDecorator]:
    marks = []
    if place.user == "root":
        marks += [pytest.mark.root, NEEDS_ROOT]
    if place.kind == "reference":
        marks += [pytest.mark.reference]
        if case["reference"] != "as-expected":
            marks += [pytest.mark.skip(reason=case.get("stricterThanReference", "not run"))]
    return marks


def _parameters(*, private: bool) -> list[Any]:
    places: tuple[tuple[str, User], ...] = (
        ("ours", "root"),
        ("ours", "ordinary"),
        ("reference", "root"),
    )
    return [
        pytest.param(place, name, marks=_marks(place, case), id=f"{place}-{name}")
        for kind, user in places
        for environment in ("none", "no-namespaces", "no-namespaces-no-landlock", "private-mounts")
        for name, case in _CASES.items()
        for place in [Place(kind, user, environment)]
        if environment in _environments(case)
        and (environment == "private-mounts") == private
        # A case that was not run with it says nothing of the reference without Landlock.
        and not (kind == "reference" and environment != case.get("env", "none"))
    ]


@pytest.mark.parametrize(("place", "name"), _parameters(private=False))
def test_case(stages: Stages, place: Place, name: str) -> None:
    _play(_CASES[name], stages.at(place))


@pytest.mark.parametrize(("place", "name"), _parameters(private=True))
def test_case_with_private_mounts(place: Place, name: str) -> None:
    """The server has to notice mounts of the host's, so it and the test share their mounts."""

    def play() -> None:
        with _start(place) as stage:
            _play(_CASES[name], stage)

    in_private_mounts(play)


@pytest.mark.quick
def test_every_expectation_of_the_file_is_known() -> None:
    known = set(_CHECKS)

    def check(expect: Json) -> None:
        assert set(expect) <= known
        for alternative in expect.get("anyOf", ()):
            check(alternative)

    for case in _CASES.values():
        check(case["expect"])
        check(_expected(case, "ours"))
        for step in case["request"].get("sequence", ()):
            check(step.get("expect", {}))
