"""Reads for a sandbox that allows all reads: as without one, but never into procfs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from exec_server.core import cached, direct
from exec_server.core import files as operations
from exec_server.errors import InvalidRequest
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
        f"/proc/{os.getpid()}/environ",
        "/proc/version",
        "/dev/stdin",
        "/dev/fd/0",
    ],
)
def test_nothing_is_opened_in_procfs_or_through_it(path: str) -> None:
    assert direct.open_for_read(files.ReadFileParams(_uri(path))) is None


def test_links_into_procfs_do_not_help(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/proc/self/environ")
    assert direct.open_for_read(files.ReadFileParams(_uri(tmp_path / "link"))) is None
    assert direct.read_directory(files.ReadDirectoryParams(_uri(tmp_path))) is None
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("/proc/self/fd/0")
    assert direct.read_directory(files.ReadDirectoryParams(_uri(tmp_path))) is None
    assert direct.read_directory(files.ReadDirectoryParams(_uri("/proc/self/fd"))) is None
    assert direct.read_directory(files.ReadDirectoryParams(_uri("/proc"))) is None


@pytest.mark.parametrize("path", ["/proc/self", "/proc/self/exe", "/proc/self/root", "/dev/fd"])
def test_the_cache_says_nothing_about_procfs(path: str) -> None:
    assert cached.try_metadata(files.GetMetadataParams(_uri(path)), confined=True) is None
    assert cached.try_canonicalize(files.CanonicalizeParams(_uri(path)), confined=True) is None


def test_files_are_opened_as_without_a_sandbox(home: Path) -> None:
    for name in ("file", "link"):
        descriptor = direct.open_for_read(files.ReadFileParams(_uri(home / name)))
        assert descriptor is not None
        assert os.read(descriptor, 100) == b"content"
        os.close(descriptor)
    with pytest.raises(FileNotFoundError):
        direct.open_for_read(files.ReadFileParams(_uri(home / "dangling")))
    with pytest.raises(InvalidRequest, match="is not a file"):
        direct.open_for_read(files.ReadFileParams(_uri(home / "dir")))


def _names(result: files.ReadDirectoryResult | None) -> list[tuple[str, bool, bool]]:
    assert result is not None
    found = [(entry.file_name, entry.is_directory, entry.is_file) for entry in result.entries]
    return sorted(found)


def test_directories_are_listed_as_without_a_sandbox(home: Path) -> None:
    params = files.ReadDirectoryParams(_uri(home))
    expected = [("dir", True, False), ("file", False, True), ("link", False, True)]
    assert _names(operations.read_directory(params)) == expected
    assert _names(direct.read_directory(params)) == expected


@pytest.mark.parametrize("confined", [False, True])
def test_a_directory_that_was_just_listed_is_listed_at_once(home: Path, confined: bool) -> None:
    def listed() -> files.ReadDirectoryResult | None:
        params = files.ReadDirectoryParams(_uri(home))
        return cached.try_read_directory(params, confined=confined)

    assert listed() is None
    operations.read_directory(files.ReadDirectoryParams(_uri(home)))
    cached.directory_was_listed(str(home), 4)
    expected = [("dir", True, False), ("file", False, True), ("link", False, True)]
    assert _names(listed()) == expected
    os.utime(home, ns=(1, 1))  # as any change would do
    assert listed() is None


def test_large_directories_are_left_to_threads(home: Path) -> None:
    cached.directory_was_listed(str(home), cached.INLINE_ENTRIES + 1)
    assert cached.try_read_directory(files.ReadDirectoryParams(_uri(home))) is None


def test_only_some_directories_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached, "MAX_RECENT_DIRECTORIES", 3)
    monkeypatch.setattr(cached, "_RECENT", cached._RecentDirectories())
    for number in range(4):
        (tmp_path / str(number)).mkdir()
        cached.directory_was_listed(str(tmp_path / str(number)), 0)
    answers: Callable[[int], object] = lambda number: cached.try_read_directory(  # noqa: E731
        files.ReadDirectoryParams(_uri(tmp_path / str(number)))
    )
    assert answers(0) is None
    assert all(answers(number) is not None for number in (1, 2, 3))
