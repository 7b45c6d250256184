"""Directories and trees: create, walk, remove, copy."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from tests.support.trees import copy, do, fails, names, os_error, remove, uri

from exec_server.errors import InternalError, InvalidRequest, RpcError
from exec_server.filesystem import safe_write, tree
from exec_server.protocol import files

_NO_NAME = InvalidRequest("path must name an entry")


# fs/createDirectory


@pytest.mark.parametrize(
    ("path", "recursive", "follow", "error"),
    [
        ("dir", True, True, None),
        ("dir", True, False, None),
        ("dir", False, True, os_error(errno.EEXIST)),
        ("dir", False, False, os_error(errno.EEXIST)),
        ("dlink", True, True, None),
        ("dlink", True, False, os_error(errno.ENOTDIR)),
        ("file", True, True, os_error(errno.EEXIST)),
        ("file", True, False, os_error(errno.ENOTDIR)),
        ("file", False, False, os_error(errno.EEXIST)),
        ("file/x", True, True, os_error(errno.ENOTDIR)),
        ("dangling", True, True, os_error(errno.EEXIST)),
        ("dangling/x", True, True, os_error(errno.EEXIST)),
        ("dangling/x", False, True, os_error(errno.ENOENT)),
        ("dangling/x", False, False, os_error(errno.ENOTDIR)),
        ("dlink/x", True, True, None),
        ("dlink/x", True, False, os_error(errno.ENOTDIR)),
        ("/", True, True, None),
        ("/", True, False, None),
        ("/", False, True, os_error(errno.EEXIST)),
        ("/", False, False, InternalError("directory already exists")),
        ("a/b/c", True, None, None),
        ("a/b/c", True, False, None),
        ("a/b", False, True, os_error(errno.ENOENT)),
        ("a/b", False, False, os_error(errno.ENOENT)),
        ("new", None, None, None),
        ("new", False, False, None),
    ],
)
def test_create_directory(
    home: Path, path: str, recursive: bool | None, follow: bool | None, error: RpcError | None
) -> None:
    params = files.CreateDirectoryParams(uri(path), recursive, follow)
    if error is not None:
        fails(params, error)
    else:
        assert do(params) == files.Done()
        assert os.path.isdir(path)


# fs/remove


def test_remove_takes_trees_and_never_follows_links(home: Path) -> None:
    os.makedirs("dir/a/b")
    Path("dir/a/f").touch()
    os.symlink("../..", "dir/a/up")
    for path in ("file", "fifo", "dlink", "dangling", "dir"):
        assert do(remove(path)) == files.Done()
        assert not os.path.lexists(path)
    assert os.path.islink("flink")


def test_remove_errors(home: Path) -> None:
    Path("dir/x").touch()
    assert do(remove("missing")) == files.Done()
    assert do(remove("missing/x", None, True)) == files.Done()
    fails(remove("missing", None, False), os_error(errno.ENOENT))
    fails(remove("dir", False), os_error(errno.ENOTEMPTY))
    fails(remove("file/x"), os_error(errno.ENOTDIR))
    fails(remove("loop/x"), os_error(errno.ELOOP))
    fails(remove("/"), _NO_NAME)
    os.unlink("dir/x")
    assert do(remove("dir", False)) == files.Done()


def test_remove_a_tree_deeper_than_any_path_may_be(home: Path) -> None:
    os.mkdir("deep")
    fd = os.open("deep", os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("directory", dir_fd=fd)
        below = os.open("directory", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    assert do(remove("deep")) == files.Done()
    assert not os.path.lexists("deep")


def test_remove_stops_when_the_tree_is_moved_away(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.makedirs("dir/a/b")
    real = tree._remove_files

    def move_meanwhile(directory: int) -> list[str]:
        if not os.path.exists("elsewhere") and os.path.samestat(
            os.fstat(directory), os.stat("dir/a/b")
        ):
            os.mkdir("elsewhere")
            os.rename("dir/a/b", "elsewhere/b")
        return real(directory)

    monkeypatch.setattr(tree, "_remove_files", move_meanwhile)
    fails(remove("dir"), InternalError("directory was moved while it was being removed"))
    assert os.path.isdir("elsewhere")


# fs/copy


def test_copy_of_a_file_takes_content_and_permissions(home: Path) -> None:
    os.chmod("file", 0o4751)
    Path("old").write_bytes(b"longer than the source")
    os.symlink("through", "dangling2")
    for destination in ("new", "old", "dangling2", "dir/x"):
        assert do(copy("file", destination, recursive=False)) == files.Done()
        assert Path(destination).read_bytes() == b"abc"
        assert stat.S_IMODE(os.stat(destination).st_mode) == 0o4751
    assert os.path.isfile("through")


def test_copy_of_larger_files_and_of_files_without_size(home: Path) -> None:
    data = os.urandom(3_000_000)
    Path("large").write_bytes(data)
    for destination in ("new", "file"):
        do(copy("large", destination))
        assert Path(destination).read_bytes() == data
    do(copy("/proc/version", "version"))
    assert Path("version").read_bytes() == Path("/proc/version").read_bytes()


def test_copy_where_the_kernel_cannot_do_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EXDEV, "")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    data = os.urandom(3_000_000)
    Path("large").write_bytes(data)
    do(copy("large", "file"))
    assert Path("file").read_bytes() == data
    do(copy("large", "/dev/null"))
    with open("large", "rb") as file, open("out", "wb") as out:
        content = safe_write.DescriptorContent(file.fileno(), len(data) + 1)
        with pytest.raises(InternalError, match="shorter"):
            content.write_range(out.fileno(), 0, content.size)


def test_copy_of_a_file_onto_itself_changes_nothing(home: Path) -> None:
    os.link("file", "hard")
    for destination in ("file", "hard", "flink"):
        assert do(copy("file", destination)) == files.Done()
        assert Path("file").read_bytes() == b"abc"


def test_copy_of_a_link_makes_a_link(home: Path) -> None:
    do(copy("dangling", "new", recursive=False))
    assert os.readlink("new") == "no"
    fails(copy("dangling", "file"), os_error(errno.EEXIST))


def test_copy_of_a_tree_merges_and_leaves_special_files_out(home: Path) -> None:
    os.makedirs("dir/sub/deep")
    Path("dir/sub/f").write_bytes(b"1")
    os.symlink("../..", "dir/sub/up")
    os.mkfifo("dir/sub/p")
    do(copy("dir", "new/there"))
    assert names(do(files.ReadDirectoryParams(uri("new/there/sub")))) == ["deep", "f", "up"]
    assert os.readlink("new/there/sub/up") == "../.."
    os.unlink("dir/sub/up")
    Path("dir/sub/f").write_bytes(b"2")
    do(copy("dir", "new/there"))
    assert Path("new/there/sub/f").read_bytes() == b"2"
    do(copy("dir/sub", "dir"))
    assert Path("dir/f").read_bytes() == b"2"


@pytest.mark.parametrize(
    ("source", "destination", "error"),
    [
        ("missing", "x", os_error(errno.ENOENT)),
        ("file", "missing/x", os_error(errno.ENOENT)),
        ("file", "dir", os_error(errno.EISDIR)),
        ("file", "dlink", os_error(errno.EISDIR)),
        ("file", "file/x", os_error(errno.ENOTDIR)),
        ("file", "fifo", os_error(errno.ENXIO)),
        ("file", "/dev/full", os_error(errno.ENOSPC)),
        ("dir", "file", os_error(errno.EEXIST)),
        ("dir", "dangling", os_error(errno.EEXIST)),
        (
            "fifo",
            "x",
            InvalidRequest("fs/copy only supports regular files, directories, and symlinks"),
        ),
    ]
    + [
        (
            "dir",
            destination,
            InvalidRequest("fs/copy cannot copy a directory to itself or one of its descendants"),
        )
        for destination in ("dir", "dir/x", "dlink/x/y", "dlink")
    ],
)
def test_copy_errors(home: Path, source: str, destination: str, error: RpcError) -> None:
    fails(copy(source, destination), error)


def test_copy_of_a_directory_must_be_recursive(home: Path) -> None:
    message = "fs/copy requires recursive: true when sourcePath is a directory"
    fails(copy("dir", "x", recursive=False), InvalidRequest(message))
