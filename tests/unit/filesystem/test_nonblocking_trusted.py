"""Reads for a sandbox that allows all reads: as without one, but never into procfs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from exec_server.errors import InvalidRequest
from exec_server.filesystem import nonblocking, operations
from exec_server.protocol import files
from exec_server.protocol.paths import PathUri


def _uri(path: object) -> PathUri:
    return PathUri.from_wire(str(path))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("content")
    (tmp_path / "dir").mkdir()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "dangling").symlink_to("nothing")
    return tmp_path


@pytest.mark.parametrize(
    "path",
    [
        "/proc/self/environ",
        "/proc/self/root/etc/hostname",
        "/proc/self/cwd/x",
        pytest.param(f"/proc/{os.getpid()}/environ", id="/proc/PID/environ"),
        "/proc/version",
        "/dev/stdin",
        "/dev/fd/0",
    ],
)
def test_nothing_is_opened_in_procfs_or_through_it(path: str) -> None:
    assert nonblocking.open_trusted(files.ReadFileParams(_uri(path))) is None


def test_links_into_procfs_do_not_help(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/proc/self/environ")
    assert nonblocking.open_trusted(files.ReadFileParams(_uri(tmp_path / "link"))) is None
    assert nonblocking.read_directory_trusted(files.ReadDirectoryParams(_uri(tmp_path))) is None
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("/proc/self/fd/0")
    assert nonblocking.read_directory_trusted(files.ReadDirectoryParams(_uri(tmp_path))) is None
    assert (
        nonblocking.read_directory_trusted(files.ReadDirectoryParams(_uri("/proc/self/fd"))) is None
    )
    assert nonblocking.read_directory_trusted(files.ReadDirectoryParams(_uri("/proc"))) is None


@pytest.mark.parametrize("path", ["/proc/self", "/proc/self/exe", "/proc/self/root", "/dev/fd"])
def test_the_cache_says_nothing_about_procfs(path: str) -> None:
    assert nonblocking.try_metadata(files.GetMetadataParams(_uri(path)), confined=True) is None
    assert nonblocking.try_canonicalize(files.CanonicalizeParams(_uri(path)), confined=True) is None


def test_files_are_opened_as_without_a_sandbox(home: Path) -> None:
    for name in ("file", "link"):
        descriptor = nonblocking.open_trusted(files.ReadFileParams(_uri(home / name)))
        assert descriptor is not None
        assert os.read(descriptor, 100) == b"content"
        os.close(descriptor)
    with pytest.raises(FileNotFoundError):
        nonblocking.open_trusted(files.ReadFileParams(_uri(home / "dangling")))
    with pytest.raises(InvalidRequest, match="is not a file"):
        nonblocking.open_trusted(files.ReadFileParams(_uri(home / "dir")))


def _names(result: files.ReadDirectoryResult | None) -> list[tuple[str, bool, bool]]:
    assert result is not None
    found = [(entry.file_name, entry.is_directory, entry.is_file) for entry in result.entries]
    return sorted(found)


def test_directories_are_listed_as_without_a_sandbox(home: Path) -> None:
    params = files.ReadDirectoryParams(_uri(home))
    expected = [("dir", True, False), ("file", False, True), ("link", False, True)]
    assert _names(operations.read_directory(params)) == expected
    assert _names(nonblocking.read_directory_trusted(params)) == expected
