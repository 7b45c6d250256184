"""File operations on a real file system; the errors are those of the reference."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from tests.support.trees import copy, do, fails, metadata, os_error, read, remove, uri, write

from exec_server.errors import InternalError, InvalidRequest, NotFound, RpcError
from exec_server.filesystem import safe_write
from exec_server.filesystem.operations import open_for_read
from exec_server.protocol import files
from exec_server.protocol.paths import PathUri, path_to_uri

# fs/readFile


@pytest.mark.parametrize("path", ["file", "flink"])
def test_read_follows_links(home: Path, path: str) -> None:
    assert do(read(path)) == files.ReadFileResult(b"abc")


def test_read_finds_the_content_of_files_that_report_no_size(home: Path) -> None:
    expected = Path("/proc/version").read_bytes()
    assert do(read("/proc/version")) == files.ReadFileResult(expected)
    Path("empty").touch()
    assert do(read("empty")) == files.ReadFileResult(b"")


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("missing", os_error(errno.ENOENT)),
        ("dangling", os_error(errno.ENOENT)),
        ("file/x", os_error(errno.ENOTDIR)),
        ("loop", os_error(errno.ELOOP)),
        ("n" * 300, os_error(errno.ENAMETOOLONG)),
        ("/", InvalidRequest("path `/` is not a file")),
        ("/dev/null", InvalidRequest("path `/dev/null` is not a file")),
    ],
)
def test_read_errors(home: Path, path: str, error: RpcError) -> None:
    fails(read(path), error)


@pytest.mark.parametrize("name", ["dir", "fifo"])
def test_read_refuses_what_is_no_regular_file(home: Path, name: str) -> None:
    fails(read(name), InvalidRequest(f"path `{home}/{name}` is not a file"))


def test_names_that_are_no_text_are_shown_with_replacement_characters(home: Path) -> None:
    os.mkdir(b"bad\xff")
    fails(
        read("bad\udcff"),
        InvalidRequest(f"path `{home}/bad\N{REPLACEMENT CHARACTER}` is not a file"),
    )


def test_read_refuses_what_is_larger_than_the_limit(home: Path) -> None:
    with open("huge", "wb") as file:
        file.truncate(safe_write.READ_LIMIT + 1)
    fails(read("huge"), InvalidRequest("file is too large to read: limit is 536870912 bytes"))


def test_read_notices_at_the_limit_that_a_file_without_size_is_too_large(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safe_write, "READ_LIMIT", 4)
    Path("file").write_bytes(bytes(9))
    with open("file", "rb") as file, pytest.raises(InvalidRequest, match="too large"):
        safe_write.read_all(file.fileno(), 0)


def test_open_for_read_gives_the_descriptor_and_the_size(home: Path) -> None:
    fd, size = open_for_read(read("file"))
    assert (os.read(fd, 9), size) == (b"abc", 3)
    assert not os.get_inheritable(fd)
    os.close(fd)


# fs/getMetadata


def test_metadata_describes_the_target_of_a_link(home: Path) -> None:
    os.utime("file", ns=(0, 1_700_000_000_123_999_999))
    expected = files.GetMetadataResult(False, True, False, 3, 0, 1_700_000_000_123)
    assert metadata("file") == expected
    assert metadata("flink") == files.GetMetadataResult(False, True, True, 3, 0, 1_700_000_000_123)
    assert metadata("dlink").is_directory
    fifo = metadata("fifo")
    assert (fifo.is_file, fifo.is_directory) == (False, False)


@pytest.mark.parametrize(
    ("nanoseconds", "followed", "direct"),
    [(-5_000_000_000, 0, -5000), (-1, 0, -1), (1_999_999, 1, 1)],
)
def test_metadata_of_old_times(home: Path, nanoseconds: int, followed: int, direct: int) -> None:
    os.utime("file", ns=(nanoseconds, nanoseconds))
    assert metadata("file").modified_at_ms == followed
    assert metadata("file", follow=False).modified_at_ms == direct


@pytest.mark.parametrize(
    ("path", "number"),
    [("missing", errno.ENOENT), ("dangling", errno.ENOENT), ("loop", errno.ELOOP)],
)
def test_metadata_errors(home: Path, path: str, number: int) -> None:
    fails(files.GetMetadataParams(uri(path)), os_error(number))


# fs/canonicalize


def test_canonicalize_resolves_links(home: Path) -> None:
    Path("dir/x (deleted)").touch()
    real = os.path.realpath(home)
    for path, expected in {
        "flink": "file",
        "dlink": "dir",
        "dlink/x (deleted)": "dir/x (deleted)",
        "fifo": "fifo",
    }.items():
        result = do(files.CanonicalizeParams(uri(path)))
        assert result == files.CanonicalizeResult(path_to_uri(f"{real}/{expected}"))
    assert do(files.CanonicalizeParams(uri("/"))) == files.CanonicalizeResult("file:///")


@pytest.mark.parametrize(
    ("path", "number"),
    [("dangling", errno.ENOENT), ("loop", errno.ELOOP), ("file/x", errno.ENOTDIR)],
)
def test_canonicalize_errors(home: Path, path: str, number: int) -> None:
    fails(files.CanonicalizeParams(uri(path)), os_error(number))


# fs/readDirectory


def test_read_directory_shows_links_as_what_they_lead_to(home: Path) -> None:
    os.mkdir(b"bad\xff")
    result = do(files.ReadDirectoryParams(uri(".")))
    assert isinstance(result, files.ReadDirectoryResult)
    assert sorted(result.entries, key=lambda entry: entry.file_name) == [
        files.DirectoryEntry("bad\N{REPLACEMENT CHARACTER}", True, False),
        files.DirectoryEntry("dir", True, False),
        files.DirectoryEntry("dlink", True, False),
        files.DirectoryEntry("fifo", False, False),
        files.DirectoryEntry("file", False, True),
        files.DirectoryEntry("flink", False, True),
    ]
    fails(files.ReadDirectoryParams(uri("file")), os_error(errno.ENOTDIR))
    fails(files.ReadDirectoryParams(uri("missing")), os_error(errno.ENOENT))


def test_read_directory_counts_beyond_its_limit(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exec_server.filesystem.operations.READ_DIRECTORY_LIMIT", 3)
    message = "fs/readDirectory returned 5 entries; limit is 3"
    fails(files.ReadDirectoryParams(uri(".")), InternalError(message))


# all operations


def test_foreign_paths_are_refused_by_every_operation(home: Path) -> None:
    foreign = PathUri.from_wire("file:///C:/x")
    expected = InvalidRequest("'file:///C:/x' is invalid on 'linux'")
    for params in (
        files.ReadFileParams(foreign),
        files.WriteFileParams(foreign, ""),
        files.CreateDirectoryParams(foreign),
        files.GetMetadataParams(foreign),
        files.CanonicalizeParams(foreign),
        files.ReadDirectoryParams(foreign),
        files.WalkParams(foreign, files.WalkOptions(1, 1, 1, False)),
        files.RemoveParams(foreign),
        files.CopyParams(foreign, foreign, True),
    ):
        fails(params, expected)


def test_nothing_stays_open(home: Path) -> None:
    before = os.listdir("/proc/self/fd")
    for params in (
        read("file"),
        write("new", b"x"),
        write("file", b"x"),
        write("new2", b"x", follow=False),
        copy("file", "other"),
        files.CreateDirectoryParams(uri("p/q"), True, False),
        files.GetMetadataParams(uri("file"), False),
        files.CanonicalizeParams(uri("file")),
        remove("p"),
    ):
        do(params)
    for bad in (read("dir"), read("fifo", follow=False), write("fifo", b""), read("x/y")):
        with pytest.raises(RpcError):
            do(bad)
    assert isinstance(os_error(errno.ENOENT), NotFound)
    assert os.listdir("/proc/self/fd") == before
    assert len(safe_write.INODE_LOCKS) == 0
