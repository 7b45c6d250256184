"""Many small files in one request."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from exec_server.errors import InvalidParams
from exec_server.filesystem.operations import MAX_BYTES, MAX_FILES, read_files, write_files
from exec_server.protocol.files import NewFile, ReadFilesParams, WriteFilesParams
from exec_server.protocol.paths import PathUri


def _uri(path: Path) -> PathUri:
    return PathUri.from_text(str(path))


def test_files_are_written_with_their_modes(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"older and longer")
    (tmp_path / "link").symlink_to("new")
    files = [
        NewFile(_uri(tmp_path / "new"), 2, 0o640),
        NewFile(_uri(tmp_path / "missing" / "x"), 3),
        NewFile(_uri(tmp_path / "old"), 1),
        NewFile(_uri(tmp_path), 0),
        NewFile(_uri(tmp_path / "empty"), 0, 0o100600),
    ]
    result = write_files(WriteFilesParams(files), memoryview(b"abcdef"))
    assert result.failed == [1, 3]
    assert (tmp_path / "new").read_bytes() == b"ab"
    assert (tmp_path / "new").stat().st_mode & 0o7777 == 0o640
    assert (tmp_path / "old").read_bytes() == b"f"
    assert (tmp_path / "empty").stat().st_mode & 0o7777 == 0o600


def test_the_sizes_fit_the_data(tmp_path: Path) -> None:
    path = _uri(tmp_path / "a")
    for size, data in ((1, b""), (1, b"ab"), (MAX_BYTES + 1, bytes(MAX_BYTES + 1))):
        with pytest.raises(InvalidParams, match="add up"):
            write_files(WriteFilesParams([NewFile(path, size)]), data)
    assert not (tmp_path / "a").exists()


def test_files_are_read_as_far_as_they_fit(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "large").write_bytes(bytes(MAX_BYTES - 1))
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    names = ("a", "none", "large", "pipe", "empty", "a", ".")
    paths = [*(_uri(tmp_path / name) for name in names), PathUri.from_text("/proc/self/status")]
    result, data = read_files(ReadFilesParams(paths))
    assert result.sizes == [3, None, None, None, 0, 3, None, None]
    assert data == b"abcabc"


def test_the_number_of_files_is_limited(tmp_path: Path) -> None:
    paths = [_uri(tmp_path / "a")] * (MAX_FILES + 1)
    with pytest.raises(InvalidParams, match="at most 256 files"):
        read_files(ReadFilesParams(paths))
    with pytest.raises(InvalidParams, match="at most 256 files"):
        write_files(WriteFilesParams([NewFile(path, 0) for path in paths]), b"")
