"""Programs of the system: only those that root alone can replace."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from exec_server.host import interpreter
from exec_server.host.interpreter import find_system_program

_NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root has directories of root")
_OTHER = 12_345


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only directory of the system; everything above it belongs to root."""
    parent = "/root" if os.access("/root", os.W_OK) else None
    with TemporaryDirectory(dir=parent) as name:
        path = Path(name, "bin")
        path.mkdir(mode=0o755)
        (path / "tool").write_text("#!/bin/sh\n")
        (path / "tool").chmod(0o755)
        monkeypatch.setattr(interpreter, "SYSTEM_DIRECTORIES", ("/nonexistent", str(path)))
        yield path


def test_the_shell_is_a_program_of_the_system() -> None:
    found = find_system_program("sh")
    assert found is not None
    assert os.path.samefile(found, "/bin/sh")
    assert find_system_program("no such program") is None


def test_the_path_of_the_server_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tool").write_text("#!/bin/sh\n")
    (tmp_path / "tool").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_system_program("tool") is None


@pytest.mark.root
@_NEEDS_ROOT
def test_what_is_a_program(folder: Path) -> None:
    (folder / "link").symlink_to("tool")
    (folder / "dangling").symlink_to("missing")
    (folder / "directory").mkdir()
    (folder / "text").touch(0o644)
    assert find_system_program("tool") == str(folder / "tool")
    assert find_system_program("link") == str(folder / "tool")
    names = ("dangling", "directory", "text", "missing")
    assert [find_system_program(name) for name in names] == [None] * 4


@pytest.mark.root
@_NEEDS_ROOT
@pytest.mark.parametrize("name", ["tool", ".", ".."])
@pytest.mark.parametrize("mode", [0o757, 0o1777])
def test_others_may_not_write(folder: Path, name: str, mode: int) -> None:
    (folder / name).chmod(mode)
    assert find_system_program("tool") is None


@pytest.mark.root
@_NEEDS_ROOT
@pytest.mark.parametrize("name", ["tool", ".", ".."])
def test_another_owner_or_group_may_not_write(folder: Path, name: str) -> None:
    (folder / name).chmod(0o775)
    assert find_system_program("tool") == str(folder / "tool")  # the group of root
    os.chown(folder / name, 0, _OTHER)
    assert find_system_program("tool") is None
    os.chown(folder / name, _OTHER, 0)
    (folder / name).chmod(0o755)
    assert find_system_program("tool") is None


@pytest.mark.root
@_NEEDS_ROOT
def test_a_link_to_a_place_of_others(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tool").write_text("#!/bin/sh\n")
    (tmp_path / "tool").chmod(0o755)
    (folder / "linked").symlink_to(tmp_path / "tool")
    assert find_system_program("linked") is None  # /tmp is open to all
