"""`make soak` for a few seconds: it runs, finds nothing, and ends in order."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from soak import leftovers
from soak.__main__ import main
from soak.accounting import Account, WrongBytes, seeded_bytes
from soak.checks import not_drained, not_flat
from soak.footprint import Footprint, Process, below, with_token
from soak.leftovers import Leftovers
from soak.scenarios import SCENARIOS
from tests.support.client import scaled

assert callable(main)  # imported for the type checker, which then reads the whole package

_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def token() -> Iterator[str]:
    """A word in the environment of a soak; no process with it may be left."""
    word = f"soak-test-{os.getpid()}-{time.monotonic_ns()}"
    yield word
    assert with_token(word) == []


def _soak(token: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "soak", *words],
        cwd=_ROOT,
        env=os.environ | {"SOAK_TEST": token},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.measured
@pytest.mark.timeout(300)
def test_a_short_soak_finds_nothing(token: str) -> None:
    with _soak(token, "--seconds", "8", "--clients", "8", "--seed", "1", "--calm", "1") as soak:
        output, _ = soak.communicate()
    assert soak.returncode == 0, output
    rows = dict(re.findall(r"^(.+?)  +(\S.*)$", output, re.MULTILINE))
    assert rows["violations"] == "0", output
    assert rows["outputs with wrong or undeclared bytes"] == "0"
    assert int(rows["scenarios"]) > 8


@pytest.mark.measured
@pytest.mark.timeout(120)
def test_each_scenario_can_be_repeated(token: str) -> None:
    with _soak(token, "--case", "7") as soak:
        output, _ = soak.communicate()
    assert soak.returncode == 0, output
    assert re.search(rf"^scenarios +{len(SCENARIOS)}$", output, re.MULTILINE), output


@pytest.mark.measured
@pytest.mark.timeout(120)
def test_an_interrupt_ends_the_servers(token: str) -> None:
    with _soak(token, "--seconds", "100") as soak:
        deadline = time.monotonic() + scaled(30)
        while len(with_token(token)) < 5 and time.monotonic() < deadline:
            time.sleep(0.05)  # until the server and some clients' commands run
        soak.send_signal(signal.SIGINT)
        output, _ = soak.communicate()
    assert soak.returncode == 130, output
    assert "interrupted; the servers have ended" in output
    assert "Traceback" not in output


# ---- the pure parts -------------------------------------------------------------------


def test_received_and_declared_bytes_make_an_account() -> None:
    printed = seeded_bytes(1, 100)
    account = Account(printed)
    account.add(printed[:10])
    account.add(printed[30:60], lost_before=20)
    account.lose(40)
    account.close()
    assert (account.received, account.declared, account.missing) == (40, 60, 0)


def test_a_declaration_may_precede_its_gap() -> None:
    """As after two cuts in a row: the client knows the sum of two gaps only."""
    printed = seeded_bytes(1, 100)
    account = Account(printed)
    account.add(printed[10:30], lost_before=25)
    account.add(printed[45:])
    account.close()


@pytest.mark.parametrize(
    ("pieces", "what"),
    [
        ([(0, 50)], "are missing"),
        ([(0, 50), (60, 100)], "are wrong"),
        ([(0, 50), (40, 100)], "are wrong"),
        ([(50, 100), (0, 50)], "are wrong"),
    ],
    ids=["lost end", "gap", "repetition", "order"],
)
def test_undeclared_differences_are_found(pieces: list[tuple[int, int]], what: str) -> None:
    with pytest.raises(WrongBytes, match=what):
        _receive(seeded_bytes(1, 100), pieces)


def _receive(printed: bytes, pieces: list[tuple[int, int]]) -> None:
    account = Account(printed)
    for start, end in pieces:
        account.add(printed[start:end])
    account.close()


def _footprint(**changes: object) -> Footprint:
    values = {
        "resident": 50_000_000,
        "threads": 20,
        "helpers": Counter({"exec-guardian": 1, "exec-launcher": 1}),
        "descriptors": Counter({"socket": 10, "pipe": 3}),
    }
    return Footprint(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"resident": 90_000_000}, "memory grew from 50.0 to 90.0 MB, allowed are 88.6 MB"),
        ({"threads": 25}, "threads grew from 20 to 25"),
        ({"others": (Process(7, 1, "sleep", 0),)}, "process 7 sleep is left"),
        ({"helpers": Counter({"exec-worker": 17})}, "17 processes exec-worker, at most 16"),
        ({"descriptors": Counter({"pipe": 4})}, "descriptors of kind pipe grew from 3 to 4"),
        ({"descriptors": Counter({"inotify": 2})}, "descriptors of kind inotify grew from 0 to 2"),
    ],
)
def test_each_kind_of_growth_is_found(changes: dict[str, object], text: str) -> None:
    assert not_flat(_footprint(), _footprint(), is_quick=False) == []
    assert not_flat(_footprint(), _footprint(**changes), is_quick=False) == [text]


def test_leftovers_are_one_violation_for_each_kind(tmp_path: Path) -> None:
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "file").touch()
    found = Leftovers([], [str(path) for path in sorted(tmp_path.iterdir())], ["80"], [])
    assert found.summary() == [f"2 files: {tmp_path}/file, {tmp_path}/folder", "1 ports: 80"]
    own = {process.pid for process in below(os.getpid())}
    leftovers.remove("no process has this token", own, [tmp_path])
    assert list(tmp_path.iterdir()) == []


def test_after_a_long_rest_nothing_more_than_at_the_start_is_left() -> None:
    busy = _footprint(
        helpers=Counter({"exec-guardian": 1, "exec-launcher": 1, "exec-worker": 1}),
        descriptors=Counter({"socket": 11, "pipe": 3}),
    )
    assert not_drained(_footprint(), _footprint()) == []
    assert not_drained(_footprint(), busy) == [
        "helpers are left: {'exec-worker': 1}",
        "1 more descriptors of kind socket",
    ]
