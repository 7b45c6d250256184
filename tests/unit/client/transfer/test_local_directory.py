"""Local directories of both kinds of systems: the same calls, and no symlink is followed."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from exec_server.client.transfer import local_directory, posix_directory, windows_directory

pytestmark = pytest.mark.quick


@pytest.fixture(params=[posix_directory, windows_directory])
def system(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_this_system_has_directories_of_posix() -> None:
    assert local_directory.Directory is posix_directory.Directory
    for name in local_directory.__all__:
        assert hasattr(windows_directory, name)


def test_entries_are_made_renamed_and_removed(system: Any, tmp_path: Path) -> None:
    top = system.Directory.open(str(tmp_path))
    same = top.duplicate()
    top.close()
    same.make_directory("d")
    below = same.child("d")
    same.close()
    descriptor = below.open_part("part", 0o640)
    assert system.pwrite(descriptor, b"cd", 2) == 2
    assert system.pwrite(descriptor, b"ab", 0) == 2
    assert system.pread(descriptor, 10, 1) == b"bcd"
    system.set_file_mode(descriptor, 0o640)
    os.close(descriptor)
    below.replace("part", "file")
    assert (tmp_path / "d" / "file").read_bytes() == b"abcd"
    below.make_symlink("file", "link")
    assert stat.S_ISLNK(below.lstat("link").st_mode)
    assert stat.S_ISREG(below.stat("link").st_mode)
    below.remove("link")
    below.remove("link")
    assert os.listdir(tmp_path / "d") == ["file"]
    below.close()


def test_a_temporary_file_is_created_once(system: Any, tmp_path: Path) -> None:
    top = system.Directory.open(str(tmp_path))
    (tmp_path / "link").symlink_to("elsewhere")
    os.close(top.create_part("part", 0o640))
    assert (tmp_path / "part").stat().st_mode & 0o077 in (0, 0o044)  # Windows has no modes
    for name in ("part", "link"):
        with pytest.raises(FileExistsError):
            top.create_part(name, None)
    top.close()
    assert sorted(os.listdir(tmp_path)) == ["link", "part"]


def test_a_symlink_is_no_directory(system: Any, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "file").touch()
    top = system.Directory.open(str(tmp_path / "link"))  # the caller has named it
    top.close()
    top = system.Directory.open(str(tmp_path))
    with pytest.raises(OSError, match="symlink") as refused:
        top.child("link")
    assert refused.value.errno == errno.ELOOP
    with pytest.raises(NotADirectoryError):
        top.child("file")
    with pytest.raises(FileNotFoundError):
        top.child("missing")
    with pytest.raises(NotADirectoryError):
        system.Directory.open(str(tmp_path / "file"))
    top.close()


def test_a_foreign_temporary_file_is_refused(system: Any, tmp_path: Path) -> None:
    (tmp_path / "one").touch()
    os.link(tmp_path / "one", tmp_path / "part")
    top = system.Directory.open(str(tmp_path))
    with pytest.raises(FileExistsError, match="remove it and try again"):
        top.open_part("part", None)
    top.close()
