"""A view is good for another use only while nothing that it was derived from has changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from exec_server.sandbox import freshness
from exec_server.sandbox.disk import HostDisk
from exec_server.sandbox.freshness import Freshness, Mounts, Pins
from exec_server.sandbox.layout import lay_out
from exec_server.sandbox.plan import Policy, Rule


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "real/.git").mkdir(parents=True)
    (tmp_path / "ws").symlink_to("real")
    return tmp_path


@pytest.fixture
def mounts() -> Iterator[Mounts]:
    mounts = Mounts()
    yield mounts
    mounts.close()


def _fresh(workspace: Path, mounts: Mounts, pins: Pins) -> Freshness:
    policy = Policy((Rule("/", "read"), Rule(str(workspace / "ws"), "write")), (), "restricted")
    view = lay_out(policy, HostDisk(sees_placeholders=True))
    return Freshness(view, mounts, pins, sees_placeholders=True)


def _replace(path: Path) -> None:
    path.rename(path.with_name("old"))
    path.mkdir()


def _relink(path: Path) -> None:
    path.unlink()
    path.symlink_to("real")


@pytest.mark.parametrize(
    "change",
    [
        lambda home: (home / "real/.codex").mkdir(),
        lambda home: (home / "real/.aws").write_text(""),
        lambda home: _replace(home / "real/.git"),
        lambda home: _replace(home / "real"),
        lambda home: _relink(home / "ws"),
    ],
    ids=["name appears", "file appears", "carve-out replaced", "root replaced", "link replaced"],
)
def test_changes_are_noticed(
    workspace: Path, mounts: Mounts, change: Callable[[Path], object]
) -> None:
    found = _fresh(workspace, mounts, Pins())
    assert found.is_current()
    (workspace / "real/file").write_text("x")
    (workspace / "real/.git/config").write_text("x")
    assert found.is_current()
    change(workspace)
    assert not found.is_current()
    found.close()


def test_a_removed_directory_keeps_its_number(workspace: Path, mounts: Mounts) -> None:
    """File systems give the number of a removed directory to the next one, unless it is in use."""
    found = _fresh(workspace, mounts, Pins())
    for _ in range(20):
        (workspace / "real/.git").rmdir()
        (workspace / "real/.git").mkdir()
        assert not found.is_current()
    found.close()


def test_pins_are_bounded_and_given_back(
    workspace: Path, mounts: Mounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    probe = _fresh(workspace, mounts, Pins())
    needed = len(os.listdir("/proc/self/fd")) - before
    probe.close()
    monkeypatch.setattr(freshness, "MAX_PINS", 2 * needed)
    pins = Pins()
    first, second, third = (_fresh(workspace, mounts, pins) for _ in range(3))
    assert (first.is_current(), second.is_current(), third.is_current()) == (True, True, False)
    first.close()
    assert _fresh(workspace, mounts, pins).is_current()
    assert not first.is_current()
