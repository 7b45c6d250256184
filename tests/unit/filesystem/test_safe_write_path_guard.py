"""Checks of a confined worker that no mount can make. Each test uses a process of its own."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from exec_server.filesystem.safe_write import PathGuard

_ARM = """
import os, sys
from exec_server.filesystem import handles, operations, tree
from exec_server.filesystem.safe_write import GUARD, PathGuard
from exec_server.protocol import files
from exec_server.protocol.paths import PathUri
home = sys.argv[1]
def uri(name): return PathUri.from_wire(f"{home}/{name}")
def attempt(act):
    try:
        act()
        print("done")
    except OSError as error:
        print(error.errno)
info = os.stat(home)
GUARD.forbid_name(info.st_dev, info.st_ino, ".git")
GUARD.add_path_check(lambda path, writing: 13 if path.endswith(".key") else 0)
"""


def _results(home: Path, *attempts: str) -> list[str]:
    lines = [f"attempt(lambda: {attempt})" for attempt in attempts]
    code = _ARM + "\n".join(lines)
    run = subprocess.run(
        [sys.executable, "-c", code, str(home)], capture_output=True, text=True, check=True
    )
    return run.stdout.split()


@pytest.mark.parametrize("path", [".git", "alias/.git", "link", "sub/../.git"])
def test_a_missing_name_stays_missing_however_it_is_spelt(tmp_path: Path, path: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "alias").symlink_to(".")
    (tmp_path / "link").symlink_to(".git")
    write = f'operations.write_file(files.WriteFileParams(uri("{path}"), "eA=="))'
    large = f'operations.write_file(files.WriteFileParams(uri("{path}"), "eHh4" * 4000))'
    make = f'operations.create_directory(files.CreateDirectoryParams(uri("{path}")))'
    below = f'operations.create_directory(files.CreateDirectoryParams(uri("{path}/x/y")))'
    replace = f'handles.open_file(files.OpenParams("h", uri("{path}"), "replace"))'
    results = _results(tmp_path, write, large, replace)
    assert results == [str(errno.EROFS)] * 3
    if path != "link":
        assert _results(tmp_path, make, below) == [str(errno.EROFS)] * 2
    assert not os.path.lexists(tmp_path / ".git")


def test_other_names_and_other_places_are_free(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    make = 'operations.create_directory(files.CreateDirectoryParams(uri("{}")))'
    assert _results(tmp_path, make.format("sub/.git"), make.format(".gitx")) == ["done", "done"]


def test_denied_files_are_neither_read_nor_changed_nor_removed(tmp_path: Path) -> None:
    (tmp_path / "a.key").write_text("secret")
    (tmp_path / "alias").symlink_to("a.key")
    results = _results(
        tmp_path,
        'operations.read_file(files.ReadFileParams(uri("a.key")))',
        'operations.read_file(files.ReadFileParams(uri("alias")))',
        'operations.get_metadata(files.GetMetadataParams(uri("alias")))',
        'operations.write_file(files.WriteFileParams(uri("alias"), "eA=="))',
        'operations.write_file(files.WriteFileParams(uri("b.key"), "eA=="))',
        'operations.remove(files.RemoveParams(uri("a.key")))',
        'tree.copy(files.CopyParams(uri("a.key"), uri("copy"), False))',
        'operations.remove(files.RemoveParams(uri("alias")))',
    )
    assert results == ["13"] * 7 + ["done"]
    assert (tmp_path / "a.key").read_text() == "secret"
    assert sorted(os.listdir(tmp_path)) == ["a.key"]


def test_a_name_that_vanishes_after_the_check_is_not_created(tmp_path: Path) -> None:
    """A placeholder at the name may be removed at any time."""
    vanish = """
real_lstat = os.lstat
def lstat(name, *, dir_fd=None):
    found = real_lstat(name, dir_fd=dir_fd)
    os.rmdir(name, dir_fd=dir_fd)
    return found
def attempt_beside(act):
    os.mkdir(f"{home}/.git")
    os.lstat = lstat
    attempt(act)
    os.lstat = real_lstat
"""
    attempts = [
        'operations.create_directory(files.CreateDirectoryParams(uri(".git"), False))',
        'operations.create_directory(files.CreateDirectoryParams(uri(".git"), False, None, False))',
        'operations.create_directory(files.CreateDirectoryParams(uri(".git"), True))',
    ]
    lines = [f"attempt_beside(lambda: {action})" for action in attempts]
    code = _ARM + vanish + "\n".join(lines)
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert os.listdir(tmp_path) == []


def test_a_file_that_is_removed_while_it_is_opened_is_checked_by_its_old_name(
    tmp_path: Path,
) -> None:
    code = """
for name in ("a.key", "b.txt"):
    with open(f"{home}/{name}", "w") as stream:
        os.unlink(stream.name)
        attempt(lambda: GUARD.check_opened(stream.fileno(), writing=False))
"""
    run = subprocess.run(
        [sys.executable, "-c", _ARM + code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == ["13", "done"]


def test_a_tree_check_sees_the_path_of_a_renamed_directory(tmp_path: Path) -> None:
    guard = PathGuard()
    directory = os.open(tmp_path, os.O_PATH)
    guard.check_tree_rename(directory, "d")
    seen: list[str] = []
    guard.add_tree_check(lambda path: seen.append(path) or 0)  # type: ignore[func-returns-value]
    guard.check_tree_rename(directory, "d")
    assert seen == [f"{tmp_path}/d"]
    guard.add_tree_check(lambda path: errno.EBUSY)
    with pytest.raises(OSError, match="busy"):
        guard.check_tree_rename(directory, "d")
    os.close(directory)
