"""Directories and trees: create, walk, remove, copy."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from tests.support.file_operations import copy, do, fails, names, os_error, remove, uri

from exec_server.errors import InternalError, InvalidRequest, RpcError
from exec_server.filesystem import safe_write, tree
from exec_server.protocol import files
from exec_server.protocol.paths import PathUri, path_to_uri

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


# fs/walk


def _walk(path: str, *options: int, follow: bool = False, prune: bool = False) -> files.WalkResult:
    depth, directories, entries = options or (10, 100, 1000)
    limits = files.WalkOptions(depth, directories, entries, follow, prune)
    result = do(files.WalkParams(uri(path), limits))
    assert isinstance(result, files.WalkResult)
    return result


def _found(result: files.WalkResult) -> str:
    """The entries below the working directory, directories with a slash."""
    start = len(path_to_uri(os.getcwd())) + 1
    return " ".join(
        entry.path[start:] + "/" * (entry.kind == "directory") for entry in result.entries
    )


@pytest.fixture
def forest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for directory in (".h/.g/k", "a/b/c"):
        os.makedirs(directory)
    for file in (".h/f", "a/f", "a/b/g"):
        Path(file).touch()
    for link, target in {"la": "a", "lla": "la", "lf": "a/f", "a/up": "..", "dang": "no"}.items():
        os.symlink(target, link)
    os.mkfifo("p")


_TREE = ".h/ a/ .h/.g/ .h/f a/b/ a/f .h/.g/k/ a/b/c/ a/b/g"


def test_walk_is_breadth_first_and_skips_links(forest: None) -> None:
    result = _walk(".")
    assert _found(result) == _TREE
    assert (result.errors, result.truncated) == ([], False)
    assert _found(_walk(".", prune=True)) == ".h/ a/ a/b/ a/f a/b/c/ a/b/g"
    assert _found(_walk(".h", prune=True)) == ".h/.g/ .h/f"
    assert _found(_walk(".", 0, 100, 1000)) == ".h/ a/"
    assert _found(_walk(".", 1, 100, 1000)) == ".h/ a/ .h/.g/ .h/f a/b/ a/f"


def test_walk_enters_each_linked_directory_once(forest: None) -> None:
    result = _walk(".", follow=True)
    assert _found(result) == ".h/ a/ la/ lla/ .h/.g/ .h/f a/b/ a/f a/up/ .h/.g/k/ a/b/c/ a/b/g"
    assert not result.truncated
    assert _found(_walk("la", 0, 100, 1000, follow=True)) == "la/b/ la/f la/up/"


@pytest.mark.parametrize("path", ["la", "lf", "p", "a/f"])
def test_walk_of_what_is_no_directory_finds_nothing(forest: None, path: str) -> None:
    assert _walk(path) == files.WalkResult([], [], False)


@pytest.mark.parametrize(
    ("directories", "entries", "expected"),
    [
        (100, 1, ".h/"),
        (100, 6, ".h/ a/"),
        (100, 7, ".h/ a/ .h/.g/"),
        (1, 1000, ".h/ a/"),
        (3, 1000, ".h/ a/ .h/.g/ .h/f a/b/ a/f"),
        (6, 1000, _TREE),
    ],
)
def test_walk_says_when_it_stopped_early(
    forest: None, directories: int, entries: int, expected: str
) -> None:
    result = _walk(".", 10, directories, entries)
    assert (_found(result), result.truncated) == (expected, True)


def test_walk_stops_when_the_answer_gets_too_large(
    forest: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = len(path_to_uri(os.path.join(os.getcwd(), ".h"))) + 64
    monkeypatch.setattr(tree, "WALK_REPLY_BUDGET", cost)
    result = _walk(".")
    assert (_found(result), result.truncated) == (".h/", True)


def test_walk_of_a_huge_directory_keeps_the_first_names(forest: None) -> None:
    os.mkdir("many")
    for number in range(1500):
        Path(f"many/{number:04}").touch()
    result = _walk("many", 1, 1, 5)
    assert _found(result) == "many/0000 many/0001 many/0002 many/0003 many/0004"
    assert result.truncated


def test_walk_keeps_the_spelling_of_its_root_and_reports_names_that_are_no_text(
    forest: None,
) -> None:
    Path("a/b/x y").touch()
    os.mkdir(b"a/b/bad\xff")
    base = path_to_uri(os.getcwd())
    params = files.WalkParams(
        PathUri.from_wire(f"{base}/a/%62/"), files.WalkOptions(0, 1, 9, False)
    )
    result = do(params)
    assert isinstance(result, files.WalkResult)
    assert [entry.path for entry in result.entries] == [
        f"{base}/a/%62/c",
        f"{base}/a/%62/g",
        f"{base}/a/%62/x%20y",
    ]
    assert result.errors == [
        files.WalkError(f"{base}/a/%62/bad%EF%BF%BD", "No such file or directory (os error 2)")
    ]


def test_walk_of_the_root_directory(forest: None) -> None:
    result = _walk("/", 0, 1, 1000)
    assert "file:///proc" in [entry.path for entry in result.entries]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_walk_reports_directories_it_cannot_read(forest: None) -> None:
    os.chmod("a", 0)
    assert [error.message for error in _walk(".").errors] == ["Permission denied (os error 13)"]


def test_walk_limits(forest: None) -> None:
    zero = InvalidRequest("filesystem walk limits must be greater than zero")
    maximum = InvalidRequest(
        "filesystem walk limits exceed maximums: depth=64, directories=10000, entries=50000"
    )
    for options, error in {
        (65, 0, 1): zero,
        (1, 1, 0): zero,
        (65, 1, 1): maximum,
        (1, 10_001, 1): maximum,
        (1, 1, 50_001): maximum,
    }.items():
        fails(files.WalkParams(uri("."), files.WalkOptions(*options, False)), error)
    fails(files.WalkParams(uri("dang"), files.WalkOptions(1, 1, 1, False)), os_error(errno.ENOENT))


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
        content = safe_write.FileContent(file.fileno(), len(data) + 1)
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
