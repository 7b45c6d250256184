"""Operations with `followSymlinks: false`: a link anywhere in the path is refused."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from tests.support.trees import do, fails, metadata, os_error, read, remove, uri, write

from exec_server.errors import InternalError, InvalidRequest, RpcError
from exec_server.protocol import files

_OUTER_LINK = InvalidRequest("path contains a symbolic link")
_NO_FILE = InvalidRequest("path is not a regular file")
_NO_NAME = InvalidRequest("path must name an entry")


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("flink", os_error(errno.ELOOP)),
        ("dangling", os_error(errno.ELOOP)),
        ("dlink/x", os_error(errno.ENOTDIR)),
        ("file/x", os_error(errno.ENOTDIR)),
        ("missing/x", os_error(errno.ENOENT)),
        ("dir", _NO_FILE),
        ("fifo", _NO_FILE),
        ("/dev/null", _NO_FILE),
        ("/", _NO_NAME),
    ],
)
def test_read_without_following(home: Path, path: str, error: RpcError) -> None:
    assert do(read("file", follow=False)) == files.ReadFileResult(b"abc")
    fails(read(path, follow=False), error)


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("flink", os_error(errno.ELOOP)),
        ("dangling", os_error(errno.ELOOP)),
        ("dlink/x", os_error(errno.ENOTDIR)),
        ("dir", os_error(errno.EISDIR)),
        ("fifo", os_error(errno.ENXIO)),
        ("/dev/null", _NO_FILE),
        ("missing/x", os_error(errno.ENOENT)),
        ("/", _NO_NAME),
    ],
)
def test_write_without_following(home: Path, path: str, error: RpcError) -> None:
    fails(write(path, b"x", follow=False), error)


def test_metadata_without_following(home: Path) -> None:
    found = metadata("file", follow=False)
    assert (found.is_file, found.is_symlink, found.size) == (True, False, 3)
    assert found.created_at_ms == 0 or abs(found.created_at_ms - found.modified_at_ms) < 60_000
    assert metadata("/", follow=False).is_directory
    for path, error in {
        "flink": _OUTER_LINK,
        "dangling": _OUTER_LINK,
        "dlink/x": os_error(errno.ENOTDIR),
        "missing": os_error(errno.ENOENT),
    }.items():
        fails(files.GetMetadataParams(uri(path), False), error)


def test_remove_without_following(home: Path) -> None:
    Path("dir/x").touch()
    for params, error in {
        remove("file", None, None, False): InternalError(
            "recursive no-follow removal is unsupported"
        ),
        remove("flink", False, None, False): _OUTER_LINK,
        remove("dlink/x", False, None, False): os_error(errno.ENOTDIR),
        remove("dir", False, None, False): os_error(errno.ENOTEMPTY),
        remove("missing", False, False, False): os_error(errno.ENOENT),
        remove("/", False, None, False): _NO_NAME,
    }.items():
        fails(params, error)
    assert do(remove("missing", False, None, False)) == files.Done()
    for path in ("dir/x", "dir", "fifo"):
        assert do(remove(path, False, None, False)) == files.Done()
        assert not os.path.lexists(path)
