"""A view is reused only while the entries that it was derived from are unchanged."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from exec_server.sandbox import builder
from exec_server.sandbox.builder import InodePins, MountChanges, ViewDependencies
from exec_server.sandbox.policy.layout import lay_out
from exec_server.sandbox.policy.model import Policy, Rule
from exec_server.sandbox.runtime.disk import HostDisk


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "real/.git").mkdir(parents=True)
    (tmp_path / "ws").symlink_to("real")
    return tmp_path


@pytest.fixture
def mounts() -> Iterator[MountChanges]:
    mounts = MountChanges()
    yield mounts
    mounts.close()


def _dependencies(workspace: Path, mounts: MountChanges, pins: InodePins) -> ViewDependencies:
    policy = Policy((Rule("/", "read"), Rule(str(workspace / "ws"), "write")), (), "restricted")
    view = lay_out(policy, HostDisk(sees_placeholders=True))
    return ViewDependencies(view, mounts, pins, sees_placeholders=True)


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
    workspace: Path, mounts: MountChanges, change: Callable[[Path], object]
) -> None:
    found = _dependencies(workspace, mounts, InodePins())
    assert found.is_current()
    (workspace / "real/file").write_text("x")
    (workspace / "real/.git/config").write_text("x")
    assert found.is_current()
    change(workspace)
    assert not found.is_current()
    found.close()


def test_a_removed_directory_keeps_its_number(workspace: Path, mounts: MountChanges) -> None:
    """File systems give the number of a removed directory to the next one, unless it is in use."""
    found = _dependencies(workspace, mounts, InodePins())
    for _ in range(20):
        (workspace / "real/.git").rmdir()
        (workspace / "real/.git").mkdir()
        assert not found.is_current()
    found.close()


def test_what_cannot_be_examined_is_not_current(
    workspace: Path, mounts: MountChanges, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _dependencies(workspace, mounts, InodePins())
    assert found.is_current()

    def refuse(path: str) -> os.stat_result:
        raise PermissionError(13, "Permission denied", path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "lstat", refuse)
        assert not found.is_current()
    assert found.is_current()
    found.close()


def test_a_change_during_the_layout_is_noticed(
    workspace: Path, mounts: MountChanges, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new view must not be used, not even once."""
    ws = workspace / "real"

    def changed_path(change: Callable[[], object]) -> str | None:
        policy = Policy((Rule("/", "read"), Rule(str(ws), "write")), (), "restricted")
        view = lay_out(policy, HostDisk(sees_placeholders=True))
        change()
        found = ViewDependencies(view, mounts, InodePins(), sees_placeholders=True)
        assert found.is_current() == (found.changed_path() is None)
        found.close()
        return found.changed_path()

    def refuse(path: str) -> os.stat_result:
        raise PermissionError(13, "Permission denied", path)

    (workspace / "real/.git").rmdir()
    (workspace / "real/.git").write_text("gitdir: one")
    assert changed_path(lambda: (ws / ".git").write_text("gitdir: two")) == str(ws / ".git")
    (workspace / "real/.git").unlink()
    (workspace / "real/.git").mkdir()
    assert changed_path(lambda: None) is None
    assert changed_path((ws / ".codex").mkdir) == str(ws / ".codex")
    assert changed_path(lambda: _replace(ws / ".git")) == str(ws / ".git")
    assert changed_path(lambda: monkeypatch.setattr(os, "lstat", refuse)) is not None


def test_the_content_of_files_that_were_not_read_does_not_matter(
    workspace: Path, mounts: MountChanges
) -> None:
    """Programs of the host may write to a denied file all the time."""
    denied = workspace / "real/a.log"
    denied.touch()
    rules = (Rule("/", "read"), Rule(str(workspace / "real"), "write"), Rule(str(denied), "deny"))
    view = lay_out(Policy(rules, (), "restricted"), HostDisk(sees_placeholders=True))
    found = ViewDependencies(view, mounts, InodePins(), sees_placeholders=True)
    denied.write_text("a line")
    assert found.is_current()
    denied.unlink()
    assert not found.is_current()
    found.close()


def test_a_change_is_noticed_without_pins(
    workspace: Path, mounts: MountChanges, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "MAX_PINS", 0)
    found = _dependencies(workspace, mounts, InodePins())
    assert not found.is_current()
    assert found.changed_path() is None
    (workspace / "real/.codex").mkdir()
    assert found.changed_path() == str(workspace / "real/.codex")


def test_pins_are_bounded_and_given_back(
    workspace: Path, mounts: MountChanges, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    probe = _dependencies(workspace, mounts, InodePins())
    needed = len(os.listdir("/proc/self/fd")) - before
    probe.close()
    monkeypatch.setattr(builder, "MAX_PINS", 2 * needed)
    pins = InodePins()
    first, second, third = (_dependencies(workspace, mounts, pins) for _ in range(3))
    assert (first.is_current(), second.is_current(), third.is_current()) == (True, True, False)
    first.close()
    assert _dependencies(workspace, mounts, pins).is_current()
    assert not first.is_current()


def test_without_a_mount_table_everything_may_have_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(builder, "_MOUNT_TABLE", str(tmp_path / "missing"))
    changes = MountChanges()
    assert changes.count() != changes.count()
    changes.close()
