"""What the suite of fsspec does not ask: options, users, directories, and files without a size."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from exec_server.adapters.fsspec import ExecServerFileSystem
from exec_server.errors import Unsupported
from tests.adapters.conftest import NOBODY


def test_an_unknown_option_is_refused(server_url: str) -> None:
    with pytest.raises(TypeError, match="no option tarrget"):
        fsspec.filesystem("exec-server", tarrget=server_url)
    with pytest.raises(TypeError, match="no option sandox"):
        fsspec.filesystem("exec-server", target=server_url, sandox="read-only")
    with pytest.raises(ValueError, match="exclude each other"):
        fsspec.filesystem("exec-server", target=server_url, sandbox="read-only", user="nobody")


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that other users reach; each start of pytest closes the parent of tmp_path."""
    with tempfile.TemporaryDirectory(prefix="exec-server-fsspec-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


def test_files_of_another_user(server_url: str, open_directory: Path) -> None:
    folder = open_directory / "theirs"
    folder.mkdir()
    files = ExecServerFileSystem(server_url, user=str(NOBODY), skip_instance_cache=True)
    try:
        if os.geteuid():
            with pytest.raises(Unsupported):
                files.ls(str(folder))
            return
        with pytest.raises(PermissionError):
            files.pipe_file(f"{folder}/file", b"1")
        os.chown(folder, NOBODY, NOBODY)
        files.pipe_file(f"{folder}/file", b"1")
        assert (folder / "file").stat().st_uid == NOBODY
    finally:
        files.close()


def test_a_file_without_a_size_is_read(server_url: str, tmp_path: Path) -> None:
    files = ExecServerFileSystem(server_url, skip_instance_cache=True)
    try:
        with files.open("/proc/version") as opened:
            assert opened.read() == Path("/proc/version").read_bytes()
        (tmp_path / "empty").touch()
        with files.open(str(tmp_path / "empty")) as opened:
            assert opened.read() == b""
    finally:
        files.close()


def test_a_directory_is_not_opened(server_url: str, tmp_path: Path) -> None:
    files = ExecServerFileSystem(server_url, skip_instance_cache=True)
    try:
        with pytest.raises(IsADirectoryError):
            files.open(str(tmp_path))
    finally:
        files.close()


def test_links_are_not_followed(server_url: str, tmp_path: Path) -> None:
    """As by the local file system; otherwise links to directories above have no end."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file").write_bytes(b"123")
    for name, target in {"x": ".", "y": "folder", "z": "folder/file", "none": "nowhere"}.items():
        (tmp_path / name).symlink_to(target)
    files = ExecServerFileSystem(server_url, skip_instance_cache=True)
    local = fsspec.filesystem("file")
    try:
        top = str(tmp_path)
        assert sorted(files.find(top)) == sorted(local.find(top))
        assert sorted(files.glob(f"{top}/**")) == sorted(local.glob(f"{top}/**"))
        walked = [(path, sorted(dirs), sorted(names)) for path, dirs, names in files.walk(top)]
        assert walked == [
            (path, sorted(dirs), sorted(names)) for path, dirs, names in local.walk(top)
        ]
        ours, theirs = (
            {
                each["name"]: (each["type"], each["islink"], each["size"])
                for each in system.ls(top, detail=True)
            }
            for system in (files, local)
        )
        assert ours == theirs
        assert (files.isdir(f"{top}/y"), files.isfile(f"{top}/z")) == (True, True)
        assert files.cat_file(f"{top}/y/file") == b"123"
    finally:
        files.close()


def test_a_move_makes_the_directory(server_url: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"123")
    files = ExecServerFileSystem(server_url, skip_instance_cache=True)
    try:
        files.mv(str(tmp_path / "file"), str(tmp_path / "new/deep/file"))
    finally:
        files.close()
    assert (tmp_path / "new/deep/file").read_bytes() == b"123"
    assert not (tmp_path / "file").exists()
