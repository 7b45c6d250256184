"""What a worker refuses where no mount can. Each test arms a process of its own."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

_ARM = """
import os, sys
from exec_server.core import guard
from exec_server.core import files as operations, handles, tree
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
guard.keep_missing(info.st_dev, info.st_ino, ".git")
guard.judge_by(lambda path, writing: 13 if path.endswith(".key") else 0)
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
