"""File operations on a real file system; the errors are those the reference gives."""

from __future__ import annotations

import base64
import contextlib
import errno
import os
import resource
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from exec_server.core import content, tree
from exec_server.core.files import OPERATIONS, open_for_read
from exec_server.errors import (
    InternalError,
    InvalidRequest,
    NotFound,
    RpcError,
    rpc_error_from_os,
)
from exec_server.protocol import files
from exec_server.protocol.paths import PathUri, path_to_uri

_OUTER_LINK = InvalidRequest("path contains a symbolic link")
_NO_FILE = InvalidRequest("path is not a regular file")
_NO_NAME = InvalidRequest("path must name an entry")


def _os(number: int) -> RpcError:
    return rpc_error_from_os(OSError(number, os.strerror(number)))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with one of everything."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_bytes(b"abc")
    Path("dir").mkdir()
    os.mkfifo("fifo")
    for name, target in {"flink": "file", "dlink": "dir", "dangling": "no", "loop": "loop"}.items():
        os.symlink(target, name)
    return tmp_path


def _uri(path: str) -> PathUri:
    return PathUri.from_wire(os.path.join(os.getcwd(), path))


def _do(params: object) -> object:
    """Run an operation as its edges do."""
    operation = next(f for call, f in OPERATIONS.items() if isinstance(params, call.params))
    try:
        return operation(params)
    except OSError as error:
        raise rpc_error_from_os(error) from None


def _fails(params: object, expected: RpcError) -> None:
    with pytest.raises(RpcError) as caught:
        _do(params)
    assert (type(caught.value), caught.value.message) == (type(expected), expected.message)


def _read(path: str, *, follow: bool | None = None) -> files.ReadFileParams:
    return files.ReadFileParams(_uri(path), follow)


def _write(path: str, data: bytes, *, follow: bool | None = None) -> files.WriteFileParams:
    return files.WriteFileParams(_uri(path), base64.b64encode(data).decode(), follow)


def _copy(source: str, destination: str, *, recursive: bool = True) -> files.CopyParams:
    return files.CopyParams(_uri(source), _uri(destination), recursive)


def _names(result: object) -> list[str]:
    assert isinstance(result, files.ReadDirectoryResult)
    return sorted(entry.file_name for entry in result.entries)


# fs/readFile


@pytest.mark.parametrize("path", ["file", "flink"])
def test_read_follows_links(home: Path, path: str) -> None:
    assert _do(_read(path)) == files.ReadFileResult(b"abc")


def test_read_finds_the_content_of_files_that_report_no_size(home: Path) -> None:
    expected = Path("/proc/version").read_bytes()
    assert _do(_read("/proc/version")) == files.ReadFileResult(expected)
    Path("empty").touch()
    assert _do(_read("empty")) == files.ReadFileResult(b"")


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("missing", _os(errno.ENOENT)),
        ("dangling", _os(errno.ENOENT)),
        ("file/x", _os(errno.ENOTDIR)),
        ("loop", _os(errno.ELOOP)),
        ("n" * 300, _os(errno.ENAMETOOLONG)),
        ("/", InvalidRequest("path `/` is not a file")),
        ("/dev/null", InvalidRequest("path `/dev/null` is not a file")),
    ],
)
def test_read_errors(home: Path, path: str, error: RpcError) -> None:
    _fails(_read(path), error)


@pytest.mark.parametrize("name", ["dir", "fifo"])
def test_read_refuses_what_is_no_regular_file(home: Path, name: str) -> None:
    _fails(_read(name), InvalidRequest(f"path `{home}/{name}` is not a file"))


def test_names_that_are_no_text_are_shown_with_replacement_characters(home: Path) -> None:
    os.mkdir(b"bad\xff")
    _fails(
        _read("bad\udcff"),
        InvalidRequest(f"path `{home}/bad\N{REPLACEMENT CHARACTER}` is not a file"),
    )


def test_read_refuses_what_is_larger_than_the_limit(home: Path) -> None:
    with open("huge", "wb") as file:
        file.truncate(content.READ_LIMIT + 1)
    _fails(_read("huge"), InvalidRequest("file is too large to read: limit is 536870912 bytes"))


def test_read_notices_at_the_limit_that_a_file_without_size_is_too_large(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "READ_LIMIT", 4)
    Path("file").write_bytes(bytes(9))
    with open("file", "rb") as file, pytest.raises(InvalidRequest, match="too large"):
        content.read_all(file.fileno(), 0)


def test_open_for_read_gives_the_descriptor_and_the_size(home: Path) -> None:
    fd, size = open_for_read(_read("file"))
    assert (os.read(fd, 9), size) == (b"abc", 3)
    assert not os.get_inheritable(fd)
    os.close(fd)


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("flink", _os(errno.ELOOP)),
        ("dangling", _os(errno.ELOOP)),
        ("dlink/x", _os(errno.ENOTDIR)),
        ("file/x", _os(errno.ENOTDIR)),
        ("missing/x", _os(errno.ENOENT)),
        ("dir", _NO_FILE),
        ("fifo", _NO_FILE),
        ("/dev/null", _NO_FILE),
        ("/", _NO_NAME),
    ],
)
def test_read_without_following(home: Path, path: str, error: RpcError) -> None:
    assert _do(_read("file", follow=False)) == files.ReadFileResult(b"abc")
    _fails(_read(path, follow=False), error)


# fs/writeFile


@pytest.mark.parametrize("follow", [None, False])
@pytest.mark.parametrize("data", [b"", b"x", b"abc", b"longer than before"])
def test_write_replaces_the_content_and_keeps_the_inode(
    home: Path, data: bytes, follow: bool | None
) -> None:
    os.chmod("file", 0o640)
    os.link("file", "other")
    before = os.stat("file")
    assert _do(_write("file", data, follow=follow)) == files.Done()
    after = os.stat("file")
    assert Path("other").read_bytes() == data
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)


@pytest.mark.parametrize("follow", [None, False])
def test_write_creates_a_file_with_the_usual_mode(home: Path, follow: bool | None) -> None:
    _do(_write("new", b"data", follow=follow))
    _do(_write("empty", b"", follow=follow))
    Path("usual").touch()
    assert (Path("new").read_bytes(), Path("empty").read_bytes()) == (b"data", b"")
    assert os.stat("new").st_mode == os.stat("usual").st_mode


def test_write_creates_the_target_of_a_dangling_link(home: Path) -> None:
    _do(_write("dangling", b"data"))
    assert Path("no").read_bytes() == b"data"
    assert os.path.islink("dangling")


def test_write_to_an_empty_file_counts_as_a_change(home: Path) -> None:
    Path("empty").touch()
    os.utime("empty", (1, 1))
    _do(_write("empty", b""))
    assert os.stat("empty").st_mtime > 1


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("missing/x", _os(errno.ENOENT)),
        ("dir", _os(errno.EISDIR)),
        ("dlink", _os(errno.EISDIR)),
        ("/", _os(errno.EISDIR)),
        ("loop", _os(errno.ELOOP)),
        ("file/x", _os(errno.ENOTDIR)),
        ("fifo", _os(errno.ENXIO)),
        ("/dev/full", _os(errno.ENOSPC)),
    ],
)
def test_write_errors(home: Path, path: str, error: RpcError) -> None:
    _fails(_write(path, b"x"), error)


def test_write_with_bad_base64(home: Path) -> None:
    params = files.WriteFileParams(_uri("file"), "!!")
    message = "fs/writeFile requires valid base64 dataBase64: Invalid symbol 33, offset 0."
    _fails(params, InvalidRequest(message))


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("flink", _os(errno.ELOOP)),
        ("dangling", _os(errno.ELOOP)),
        ("dlink/x", _os(errno.ENOTDIR)),
        ("dir", _os(errno.EISDIR)),
        ("fifo", _os(errno.ENXIO)),
        ("/dev/null", _NO_FILE),
        ("missing/x", _os(errno.ENOENT)),
        ("/", _NO_NAME),
    ],
)
def test_write_without_following(home: Path, path: str, error: RpcError) -> None:
    _fails(_write(path, b"x", follow=False), error)


def test_write_to_a_device(home: Path) -> None:
    assert _do(_write("/dev/null", b"x")) == files.Done()


def test_write_to_a_fifo_reaches_its_reader(home: Path) -> None:
    data = os.urandom(300_000)
    received = bytearray()
    fd = os.open("fifo", os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(fd, True)
    writer = threading.Thread(target=_do, args=[_write("fifo", data)])
    writer.start()
    while len(received) < len(data):
        received += os.read(fd, 65536)
    writer.join()
    os.close(fd)
    assert received == data


def test_write_to_a_fifo_that_nobody_reads_gives_up(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "STALL_SECONDS", 0.01)
    fd = os.open("fifo", os.O_RDONLY | os.O_NONBLOCK)
    _fails(_write("fifo", bytes(1_000_000)), _os(errno.ETIMEDOUT))
    os.close(fd)


@contextlib.contextmanager
def _files_end_at(size: int) -> Iterator[None]:
    """Make files end there, which fails like a full disk does.

    Not a fixture: pytest itself may be writing to a file when it tears those down.
    """
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_failed_write_leaves_the_old_content(home: Path) -> None:
    for size in (0, 3, 8000):
        Path("file").write_bytes(b"o" * size)
        with _files_end_at(8192):
            _fails(_write("file", bytes(10_000)), _os(errno.EFBIG))
        assert Path("file").read_bytes() == b"o" * size


@pytest.mark.parametrize("size", [100, 10_000])
def test_a_failed_write_leaves_no_new_file(home: Path, size: int) -> None:
    before = sorted(os.listdir())
    with _files_end_at(size // 2):
        _fails(_write("new", bytes(size)), _os(errno.EFBIG))
    assert sorted(os.listdir()) == before


def test_a_failed_copy_leaves_the_old_content(home: Path) -> None:
    Path("large").write_bytes(bytes(10_000))
    with _files_end_at(8192):
        _fails(_copy("large", "file"), _os(errno.EFBIG))
        _fails(_copy("large", "new"), _os(errno.EFBIG))
    assert Path("file").read_bytes() == b"abc"
    assert not os.path.lexists("new")


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EISDIR])
def test_new_files_where_unnamed_ones_are_impossible(
    home: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real_open = os.open

    def refuse(path: str, flags: int, *args: int, **options: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(number, os.strerror(number))
        return real_open(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    data = b"data" * 2000
    _do(_write("new", data))
    _do(_copy("new", "copied"))
    _do(_write("dangling", data))
    assert Path("copied").read_bytes() == Path("no").read_bytes() == data
    with _files_end_at(10):
        _fails(_write("large", bytes(10_000)), _os(errno.EFBIG))
    assert not os.path.lexists("large")


def test_sparse_files_are_given_their_blocks_first(home: Path) -> None:
    with open("sparse", "wb") as file:
        file.truncate(100_000)
    _do(_write("sparse", b"x" * 50_000))
    assert Path("sparse").read_bytes() == b"x" * 50_000


def test_readers_never_see_half_of_a_write(home: Path) -> None:
    """Two writers of different lengths and a reader, all of this server."""
    contents = [b"a" * 200_000, b"b" * 150_000]
    _do(_write("file", contents[0]))
    writers = [
        threading.Thread(target=lambda data=data: [_do(_write("file", data)) for _ in range(50)])
        for data in contents
    ]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        result = _do(_read("file"))
        assert isinstance(result, files.ReadFileResult)
        assert result.data_base64 in contents
    for writer in writers:
        writer.join()


# fs/createDirectory


@pytest.mark.parametrize(
    ("path", "recursive", "follow", "error"),
    [
        ("dir", True, True, None),
        ("dir", True, False, None),
        ("dir", False, True, _os(errno.EEXIST)),
        ("dir", False, False, _os(errno.EEXIST)),
        ("dlink", True, True, None),
        ("dlink", True, False, _os(errno.ENOTDIR)),
        ("file", True, True, _os(errno.EEXIST)),
        ("file", True, False, _os(errno.ENOTDIR)),
        ("file", False, False, _os(errno.EEXIST)),
        ("file/x", True, True, _os(errno.ENOTDIR)),
        ("dangling", True, True, _os(errno.EEXIST)),
        ("dangling/x", True, True, _os(errno.EEXIST)),
        ("dangling/x", False, True, _os(errno.ENOENT)),
        ("dangling/x", False, False, _os(errno.ENOTDIR)),
        ("dlink/x", True, True, None),
        ("dlink/x", True, False, _os(errno.ENOTDIR)),
        ("/", True, True, None),
        ("/", True, False, None),
        ("/", False, True, _os(errno.EEXIST)),
        ("/", False, False, InternalError("directory already exists")),
        ("a/b/c", True, None, None),
        ("a/b/c", True, False, None),
        ("a/b", False, True, _os(errno.ENOENT)),
        ("a/b", False, False, _os(errno.ENOENT)),
        ("new", None, None, None),
        ("new", False, False, None),
    ],
)
def test_create_directory(
    home: Path, path: str, recursive: bool | None, follow: bool | None, error: RpcError | None
) -> None:
    params = files.CreateDirectoryParams(_uri(path), recursive, follow)
    if error is not None:
        _fails(params, error)
    else:
        assert _do(params) == files.Done()
        assert os.path.isdir(path)


# fs/getMetadata


def _metadata(path: str, *, follow: bool | None = None) -> files.GetMetadataResult:
    result = _do(files.GetMetadataParams(_uri(path), follow))
    assert isinstance(result, files.GetMetadataResult)
    return result


def test_metadata_describes_the_target_of_a_link(home: Path) -> None:
    os.utime("file", ns=(0, 1_700_000_000_123_999_999))
    expected = files.GetMetadataResult(False, True, False, 3, 0, 1_700_000_000_123)
    assert _metadata("file") == expected
    assert _metadata("flink") == files.GetMetadataResult(False, True, True, 3, 0, 1_700_000_000_123)
    assert _metadata("dlink").is_directory
    fifo = _metadata("fifo")
    assert (fifo.is_file, fifo.is_directory) == (False, False)


@pytest.mark.parametrize(
    ("nanoseconds", "followed", "direct"),
    [(-5_000_000_000, 0, -5000), (-1, 0, -1), (1_999_999, 1, 1)],
)
def test_metadata_of_old_times(home: Path, nanoseconds: int, followed: int, direct: int) -> None:
    os.utime("file", ns=(nanoseconds, nanoseconds))
    assert _metadata("file").modified_at_ms == followed
    assert _metadata("file", follow=False).modified_at_ms == direct


def test_metadata_without_following(home: Path) -> None:
    found = _metadata("file", follow=False)
    assert (found.is_file, found.is_symlink, found.size) == (True, False, 3)
    assert found.created_at_ms == 0 or abs(found.created_at_ms - found.modified_at_ms) < 60_000
    assert _metadata("/", follow=False).is_directory
    for path, error in {
        "flink": _OUTER_LINK,
        "dangling": _OUTER_LINK,
        "dlink/x": _os(errno.ENOTDIR),
        "missing": _os(errno.ENOENT),
    }.items():
        _fails(files.GetMetadataParams(_uri(path), False), error)


@pytest.mark.parametrize(
    ("path", "number"),
    [("missing", errno.ENOENT), ("dangling", errno.ENOENT), ("loop", errno.ELOOP)],
)
def test_metadata_errors(home: Path, path: str, number: int) -> None:
    _fails(files.GetMetadataParams(_uri(path)), _os(number))


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
        result = _do(files.CanonicalizeParams(_uri(path)))
        assert result == files.CanonicalizeResult(path_to_uri(f"{real}/{expected}"))
    assert _do(files.CanonicalizeParams(_uri("/"))) == files.CanonicalizeResult("file:///")


@pytest.mark.parametrize(
    ("path", "number"),
    [("dangling", errno.ENOENT), ("loop", errno.ELOOP), ("file/x", errno.ENOTDIR)],
)
def test_canonicalize_errors(home: Path, path: str, number: int) -> None:
    _fails(files.CanonicalizeParams(_uri(path)), _os(number))


# fs/readDirectory


def test_read_directory_shows_links_as_what_they_lead_to(home: Path) -> None:
    os.mkdir(b"bad\xff")
    result = _do(files.ReadDirectoryParams(_uri(".")))
    assert isinstance(result, files.ReadDirectoryResult)
    assert sorted(result.entries, key=lambda entry: entry.file_name) == [
        files.DirectoryEntry("bad\N{REPLACEMENT CHARACTER}", True, False),
        files.DirectoryEntry("dir", True, False),
        files.DirectoryEntry("dlink", True, False),
        files.DirectoryEntry("fifo", False, False),
        files.DirectoryEntry("file", False, True),
        files.DirectoryEntry("flink", False, True),
    ]
    _fails(files.ReadDirectoryParams(_uri("file")), _os(errno.ENOTDIR))
    _fails(files.ReadDirectoryParams(_uri("missing")), _os(errno.ENOENT))


def test_read_directory_counts_beyond_its_limit(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exec_server.core.files.READ_DIRECTORY_LIMIT", 3)
    message = "fs/readDirectory returned 5 entries; limit is 3"
    _fails(files.ReadDirectoryParams(_uri(".")), InternalError(message))


# fs/walk


def _walk(path: str, *options: int, follow: bool = False, prune: bool = False) -> files.WalkResult:
    depth, directories, entries = options or (10, 100, 1000)
    limits = files.WalkOptions(depth, directories, entries, follow, prune)
    result = _do(files.WalkParams(_uri(path), limits))
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
    result = _do(params)
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
        _fails(files.WalkParams(_uri("."), files.WalkOptions(*options, False)), error)
    _fails(files.WalkParams(_uri("dang"), files.WalkOptions(1, 1, 1, False)), _os(errno.ENOENT))


# fs/remove


def _remove(path: str, *flags: bool | None) -> files.RemoveParams:
    return files.RemoveParams(_uri(path), *flags)


def test_remove_takes_trees_and_never_follows_links(home: Path) -> None:
    os.makedirs("dir/a/b")
    Path("dir/a/f").touch()
    os.symlink("../..", "dir/a/up")
    for path in ("file", "fifo", "dlink", "dangling", "dir"):
        assert _do(_remove(path)) == files.Done()
        assert not os.path.lexists(path)
    assert os.path.islink("flink")


def test_remove_errors(home: Path) -> None:
    Path("dir/x").touch()
    assert _do(_remove("missing")) == files.Done()
    assert _do(_remove("missing/x", None, True)) == files.Done()
    _fails(_remove("missing", None, False), _os(errno.ENOENT))
    _fails(_remove("dir", False), _os(errno.ENOTEMPTY))
    _fails(_remove("file/x"), _os(errno.ENOTDIR))
    _fails(_remove("loop/x"), _os(errno.ELOOP))
    _fails(_remove("/"), _NO_NAME)
    os.unlink("dir/x")
    assert _do(_remove("dir", False)) == files.Done()


def test_remove_without_following(home: Path) -> None:
    Path("dir/x").touch()
    for params, error in {
        _remove("file", None, None, False): InternalError(
            "recursive no-follow removal is unsupported"
        ),
        _remove("flink", False, None, False): _OUTER_LINK,
        _remove("dlink/x", False, None, False): _os(errno.ENOTDIR),
        _remove("dir", False, None, False): _os(errno.ENOTEMPTY),
        _remove("missing", False, False, False): _os(errno.ENOENT),
        _remove("/", False, None, False): _NO_NAME,
    }.items():
        _fails(params, error)
    assert _do(_remove("missing", False, None, False)) == files.Done()
    for path in ("dir/x", "dir", "fifo"):
        assert _do(_remove(path, False, None, False)) == files.Done()
        assert not os.path.lexists(path)


def test_remove_a_tree_deeper_than_any_path_may_be(home: Path) -> None:
    os.mkdir("deep")
    fd = os.open("deep", os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("directory", dir_fd=fd)
        below = os.open("directory", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    assert _do(_remove("deep")) == files.Done()
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
    _fails(_remove("dir"), InternalError("directory was moved while it was being removed"))
    assert os.path.isdir("elsewhere")


# fs/copy


def test_copy_of_a_file_takes_content_and_permissions(home: Path) -> None:
    os.chmod("file", 0o4751)
    Path("old").write_bytes(b"longer than the source")
    os.symlink("through", "dangling2")
    for destination in ("new", "old", "dangling2", "dir/x"):
        assert _do(_copy("file", destination, recursive=False)) == files.Done()
        assert Path(destination).read_bytes() == b"abc"
        assert stat.S_IMODE(os.stat(destination).st_mode) == 0o4751
    assert os.path.isfile("through")


def test_copy_of_larger_files_and_of_files_without_size(home: Path) -> None:
    data = os.urandom(3_000_000)
    Path("large").write_bytes(data)
    for destination in ("new", "file"):
        _do(_copy("large", destination))
        assert Path(destination).read_bytes() == data
    _do(_copy("/proc/version", "version"))
    assert Path("version").read_bytes() == Path("/proc/version").read_bytes()


def test_copy_where_the_kernel_cannot_do_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EXDEV, "")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    data = os.urandom(3_000_000)
    Path("large").write_bytes(data)
    _do(_copy("large", "file"))
    assert Path("file").read_bytes() == data
    _do(_copy("large", "/dev/null"))
    with open("large", "rb") as file, open("out", "wb") as out:
        range_ = content.FileRange(file.fileno(), len(data) + 1)
        with pytest.raises(InternalError, match="shorter"):
            range_.put(out.fileno(), 0, range_.size)


def test_copy_of_a_file_onto_itself_changes_nothing(home: Path) -> None:
    os.link("file", "hard")
    for destination in ("file", "hard", "flink"):
        assert _do(_copy("file", destination)) == files.Done()
        assert Path("file").read_bytes() == b"abc"


def test_copy_of_a_link_makes_a_link(home: Path) -> None:
    _do(_copy("dangling", "new", recursive=False))
    assert os.readlink("new") == "no"
    _fails(_copy("dangling", "file"), _os(errno.EEXIST))


def test_copy_of_a_tree_merges_and_leaves_special_files_out(home: Path) -> None:
    os.makedirs("dir/sub/deep")
    Path("dir/sub/f").write_bytes(b"1")
    os.symlink("../..", "dir/sub/up")
    os.mkfifo("dir/sub/p")
    _do(_copy("dir", "new/there"))
    assert _names(_do(files.ReadDirectoryParams(_uri("new/there/sub")))) == ["deep", "f", "up"]
    assert os.readlink("new/there/sub/up") == "../.."
    os.unlink("dir/sub/up")
    Path("dir/sub/f").write_bytes(b"2")
    _do(_copy("dir", "new/there"))
    assert Path("new/there/sub/f").read_bytes() == b"2"
    _do(_copy("dir/sub", "dir"))
    assert Path("dir/f").read_bytes() == b"2"


@pytest.mark.parametrize(
    ("source", "destination", "error"),
    [
        ("missing", "x", _os(errno.ENOENT)),
        ("file", "missing/x", _os(errno.ENOENT)),
        ("file", "dir", _os(errno.EISDIR)),
        ("file", "dlink", _os(errno.EISDIR)),
        ("file", "file/x", _os(errno.ENOTDIR)),
        ("file", "fifo", _os(errno.ENXIO)),
        ("file", "/dev/full", _os(errno.ENOSPC)),
        ("dir", "file", _os(errno.EEXIST)),
        ("dir", "dangling", _os(errno.EEXIST)),
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
    _fails(_copy(source, destination), error)


def test_copy_of_a_directory_must_be_recursive(home: Path) -> None:
    message = "fs/copy requires recursive: true when sourcePath is a directory"
    _fails(_copy("dir", "x", recursive=False), InvalidRequest(message))


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
        _fails(params, expected)


def test_nothing_stays_open(home: Path) -> None:
    before = os.listdir("/proc/self/fd")
    for params in (
        _read("file"),
        _write("new", b"x"),
        _write("file", b"x"),
        _write("new2", b"x", follow=False),
        _copy("file", "other"),
        files.CreateDirectoryParams(_uri("p/q"), True, False),
        files.GetMetadataParams(_uri("file"), False),
        files.CanonicalizeParams(_uri("file")),
        _remove("p"),
    ):
        _do(params)
    for bad in (_read("dir"), _read("fifo", follow=False), _write("fifo", b""), _read("x/y")):
        with pytest.raises(RpcError):
            _do(bad)
    assert isinstance(_os(errno.ENOENT), NotFound)
    assert os.listdir("/proc/self/fd") == before
    assert content.TURNS._turns == {}
