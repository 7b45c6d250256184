"""Nonblocking operations return the results of the blocking ones, or None."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from exec_server.errors import InvalidRequest
from exec_server.filesystem import nonblocking, operations, safe_write
from exec_server.filesystem.mounts import MountTable
from exec_server.filesystem.syscalls import RESOLVE_NO_SYMLINKS
from exec_server.protocol import files
from exec_server.protocol.paths import PathUri

pytestmark = pytest.mark.skipif(not nonblocking._SUPPORTED, reason="needs Linux 5.12 or newer")

LIMIT = 65536


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with one of everything, as a path without links."""
    home = tmp_path.resolve()
    monkeypatch.chdir(home)
    Path("file").write_bytes(b"abc")
    Path("empty").touch()
    Path("large").write_bytes(bytes(LIMIT + 1))
    Path("full").write_bytes(bytes(LIMIT))
    os.makedirs("dir/sub")
    os.mkfifo("fifo")
    links = {"flink": "file", "dlink": "dir", "dangling": "no", "loop": "loop", "twice": "flink"}
    for name, target in links.items():
        os.symlink(target, name)
    return home


NAMES = [
    *("file", "empty", "large", "dir", "fifo", "flink", "dlink", "dangling", "loop", "twice"),
    *("dlink/sub", "file/x", "missing", "missing/x", "dir/missing", "n" * 300, "."),
    *("/", "/dev/null", "/proc/version", "/proc/self/exe"),
]


def _uri(path: str) -> PathUri:
    return PathUri.from_wire(os.path.join(os.getcwd(), path))


def _outcome(operation: Callable[[], object]) -> object:
    try:
        return operation()
    except OSError as error:
        return error.errno


@pytest.mark.parametrize("name", NAMES)
def test_metadata_equals_what_a_thread_finds(home: Path, name: str) -> None:
    params = files.GetMetadataParams(_uri(name))
    expected = _outcome(lambda: operations.get_metadata(params))
    assert _outcome(lambda: nonblocking.try_metadata(params)) in (expected, None)


@pytest.mark.usefixtures("kernel_cache")
@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("/")])
def test_metadata_of_cached_paths_is_found(home: Path, name: str) -> None:
    params = files.GetMetadataParams(_uri(name))
    expected = _outcome(lambda: operations.get_metadata(params))
    assert _outcome(lambda: nonblocking.try_metadata(params)) == expected


def test_the_kernel_answers_from_its_cache(home: Path) -> None:
    """Against the real cache, which may refuse any single lookup but not all of them."""
    params = files.GetMetadataParams(_uri("file"))
    if not nonblocking._open_modes(str(home), False):
        pytest.skip("the temporary directory is on a slow file system")
    deadline = time.monotonic() + 10
    while (found := nonblocking.try_metadata(params)) is None:
        assert time.monotonic() < deadline
        os.stat("file")
    assert found == operations.get_metadata(params)


@pytest.mark.parametrize("name", NAMES)
def test_canonicalize_equals_what_a_thread_finds(home: Path, name: str) -> None:
    params = files.CanonicalizeParams(_uri(name))
    expected = _outcome(lambda: operations.canonicalize(params))
    assert _outcome(lambda: nonblocking.try_canonicalize(params)) in (expected, None)


def test_a_removed_file_is_left_to_a_thread(home: Path) -> None:
    Path("x (deleted)").touch()
    assert nonblocking.try_canonicalize(files.CanonicalizeParams(_uri("x (deleted)"))) is None


@pytest.mark.parametrize("name", NAMES)
def test_what_is_read_equals_what_a_thread_reads(home: Path, name: str) -> None:
    params = files.ReadFileParams(_uri(name))

    def read() -> object:
        try:
            return operations.read_file(params)
        except InvalidRequest:
            return None

    expected = _outcome(read)
    assert _outcome(lambda: nonblocking.try_read_file(params, LIMIT)) in (expected, None)


@pytest.mark.usefixtures("kernel_cache")
def test_small_files_in_the_page_cache_are_read(home: Path) -> None:
    probe = os.open("file", os.O_RDONLY)
    try:
        os.preadv(probe, [bytearray(1)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        pass  # supported: the page was reclaimed
    except OSError:
        pytest.skip("this file system does not support RWF_NOWAIT")
    finally:
        os.close(probe)
    for name, data in {"file": b"abc", "twice": b"abc", "full": bytes(LIMIT)}.items():
        params = files.ReadFileParams(_uri(name))
        deadline = time.monotonic() + 10
        while (result := nonblocking.try_read_file(params, LIMIT)) is None:
            assert time.monotonic() < deadline
            assert Path(name).read_bytes() == data  # brings reclaimed pages back
        assert result == files.ReadFileResult(data)


def test_a_file_that_is_not_cached_is_left_to_a_thread(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise BlockingIOError

    monkeypatch.setattr(os, "preadv", refuse)
    assert nonblocking.try_read_file(files.ReadFileParams(_uri("file")), LIMIT) is None


@pytest.mark.parametrize("name", ["large", "empty", "dir", "fifo", "/proc/version", "/dev/null"])
def test_everything_else_is_left_to_a_thread(home: Path, name: str) -> None:
    assert nonblocking.try_read_file(files.ReadFileParams(_uri(name)), LIMIT) is None


def test_certain_failures_are_raised(home: Path) -> None:
    missing = _uri("missing")
    assert not os.path.exists("missing")
    for operation in (
        lambda: nonblocking.try_read_file(files.ReadFileParams(missing), LIMIT),
        lambda: nonblocking.try_metadata(files.GetMetadataParams(missing)),
        lambda: nonblocking.try_canonicalize(files.CanonicalizeParams(missing)),
    ):
        assert _outcome(operation) in (errno.ENOENT, None)
    with pytest.raises(InvalidRequest):
        nonblocking.try_metadata(files.GetMetadataParams(PathUri.from_wire("file:///C:/x")))


def test_paths_that_follow_no_link_are_left_to_a_thread(home: Path) -> None:
    assert nonblocking.try_read_file(files.ReadFileParams(_uri("file"), False), LIMIT) is None
    assert nonblocking.try_metadata(files.GetMetadataParams(_uri("file"), False)) is None


def test_a_file_being_written_is_left_to_a_thread(home: Path) -> None:
    with safe_write.INODE_LOCKS.acquire(os.stat("file")):
        assert nonblocking.try_read_file(files.ReadFileParams(_uri("file")), LIMIT) is None


def test_without_kernel_support_everything_is_left_to_a_thread(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nonblocking, "_SUPPORTED", False)
    path = _uri("file")
    assert nonblocking.try_read_file(files.ReadFileParams(path), LIMIT) is None
    assert nonblocking.try_metadata(files.GetMetadataParams(path)) is None
    assert nonblocking.try_canonicalize(files.CanonicalizeParams(path)) is None


class _SlowMounts(MountTable):
    def __init__(self, *points: str) -> None:
        super().__init__()
        self._points = points

    def slow_mounts(self) -> tuple[str, ...]:
        return self._points


def test_slow_file_systems_are_left_alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonblocking, "MOUNTS", _SlowMounts(f"{home}/dir/"))
    monkeypatch.setattr(nonblocking, "_NO_SYMLINKS", nonblocking._OpenModes(RESOLVE_NO_SYMLINKS))
    metadata = {
        name: _outcome(partial(nonblocking.try_metadata, files.GetMetadataParams(_uri(name))))
        for name in ("dir", "dir/sub", "dlink", "dlink/sub", "flink", "file")
    }
    known = metadata.pop("file")
    assert isinstance(known, files.GetMetadataResult)
    assert set(metadata.values()) == {None}
    for name in ("dir/x", "dlink/x"):
        assert nonblocking.try_read_file(files.ReadFileParams(_uri(name)), LIMIT) is None
    assert nonblocking.try_canonicalize(files.CanonicalizeParams(_uri("dir"))) is None


def test_nothing_stays_open(home: Path) -> None:
    before = os.listdir("/proc/self/fd")
    for name in NAMES:
        for operation in (
            lambda name=name: nonblocking.try_read_file(files.ReadFileParams(_uri(name)), LIMIT),
            lambda name=name: nonblocking.try_metadata(files.GetMetadataParams(_uri(name))),
            lambda name=name: nonblocking.try_canonicalize(files.CanonicalizeParams(_uri(name))),
        ):
            _outcome(operation)
    assert os.listdir("/proc/self/fd") == before


# fs/readDirectory


@pytest.fixture
def recent(monkeypatch: pytest.MonkeyPatch, kernel_cache: None) -> None:
    """No directory was listed yet, and lookups never need the disk."""
    monkeypatch.setattr(nonblocking, "_RECENT", nonblocking.RecentDirectories())


def _list(path: str, *, confined: bool = False) -> list[tuple[str, bool, bool]] | None:
    params = files.ReadDirectoryParams(_uri(path))
    result = nonblocking.try_read_directory(params, confined=confined)
    if result is None:
        return None
    return sorted((entry.file_name, entry.is_directory, entry.is_file) for entry in result.entries)


@pytest.mark.usefixtures("recent")
@pytest.mark.parametrize("confined", [False, True])
def test_a_directory_that_was_just_listed_is_listed_at_once(home: Path, confined: bool) -> None:
    for name, target in {"link": "../file", "dangling": "nothing"}.items():
        os.symlink(target, f"dir/{name}")
    assert _list("dir", confined=confined) is None
    nonblocking.directory_was_listed("dir", 3)
    assert _list("dir", confined=confined) == [("link", False, True), ("sub", True, False)]
    os.utime("dir", ns=(1, 1))  # as any change would do
    assert _list("dir", confined=confined) is None


@pytest.mark.usefixtures("recent")
def test_a_directory_whose_links_are_not_cached_is_left_to_a_thread(home: Path) -> None:
    os.symlink("loop", "dir/loop")
    nonblocking.directory_was_listed("dir", 2)
    assert _list("dir") is None


@pytest.mark.usefixtures("recent")
def test_a_directory_with_a_link_into_procfs_is_left_to_the_worker(home: Path) -> None:
    os.symlink("/proc/version", "dir/link")
    nonblocking.directory_was_listed("dir", 2)
    assert _list("dir") == [("link", False, True), ("sub", True, False)]
    assert _list("dir", confined=True) is None


@pytest.mark.usefixtures("recent")
def test_large_directories_are_left_to_threads(home: Path) -> None:
    nonblocking.directory_was_listed("dir", nonblocking.INLINE_ENTRIES + 1)
    assert _list("dir") is None


@pytest.mark.usefixtures("recent")
def test_only_some_directories_are_remembered(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonblocking, "MAX_RECENT_DIRECTORIES", 3)
    for number in range(4):
        os.mkdir(f"dir/{number}")
        nonblocking.directory_was_listed(f"dir/{number}", 0)
    assert [_list(f"dir/{number}") for number in range(4)] == [None, [], [], []]


@pytest.mark.usefixtures("recent")
def test_a_listing_is_remembered_for_seconds_only(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nonblocking.directory_was_listed("dir", 1)
    later = time.monotonic() + 6
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert _list("dir") is None
