"""The loop's own file operations answer like those of the threads, or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from exec_server.core import cached, content
from exec_server.core import files as core_files
from exec_server.errors import InvalidRequest
from exec_server.protocol import files
from exec_server.protocol.paths import PathUri

pytestmark = pytest.mark.skipif(not cached._SUPPORTED, reason="needs Linux 5.12 or newer")

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
    expected = _outcome(lambda: core_files.get_metadata(params))
    # The first look-up brought everything into the kernel's cache.
    assert _outcome(lambda: cached.try_metadata(params)) in (expected, None)
    if isinstance(expected, files.GetMetadataResult) and not name.startswith("/"):
        assert cached.try_metadata(params) == expected


@pytest.mark.parametrize("name", NAMES)
def test_canonicalize_equals_what_a_thread_finds(home: Path, name: str) -> None:
    params = files.CanonicalizeParams(_uri(name))
    expected = _outcome(lambda: core_files.canonicalize(params))
    assert _outcome(lambda: cached.try_canonicalize(params)) in (expected, None)


def test_a_removed_file_is_left_to_a_thread(home: Path) -> None:
    Path("x (deleted)").touch()
    assert cached.try_canonicalize(files.CanonicalizeParams(_uri("x (deleted)"))) is None


@pytest.mark.parametrize("name", NAMES)
def test_what_is_read_equals_what_a_thread_reads(home: Path, name: str) -> None:
    params = files.ReadFileParams(_uri(name))

    def read() -> object:
        try:
            return core_files.read_file(params)
        except InvalidRequest:
            return None

    expected = _outcome(read)
    assert _outcome(lambda: cached.try_read_file(params, LIMIT)) in (expected, None)


def test_small_files_in_the_page_cache_are_read(home: Path) -> None:
    probe = os.open("file", os.O_RDONLY)
    try:
        os.preadv(probe, [bytearray(1)], 0, os.RWF_NOWAIT)
    except OSError:
        pytest.skip("this file system cannot say what is in the page cache")
    finally:
        os.close(probe)
    for name, data in {"file": b"abc", "twice": b"abc", "full": bytes(LIMIT)}.items():
        # Following a link for the first time notes the time of access, which may need the disk.
        os.stat(name)
        result = cached.try_read_file(files.ReadFileParams(_uri(name)), LIMIT)
        assert result == files.ReadFileResult(data)


@pytest.mark.parametrize("name", ["large", "empty", "dir", "fifo", "/proc/version", "/dev/null"])
def test_everything_else_is_left_to_a_thread(home: Path, name: str) -> None:
    assert cached.try_read_file(files.ReadFileParams(_uri(name)), LIMIT) is None


def test_certain_failures_are_raised(home: Path) -> None:
    missing = _uri("missing")
    assert not os.path.exists("missing")
    for operation in (
        lambda: cached.try_read_file(files.ReadFileParams(missing), LIMIT),
        lambda: cached.try_metadata(files.GetMetadataParams(missing)),
        lambda: cached.try_canonicalize(files.CanonicalizeParams(missing)),
    ):
        assert _outcome(operation) in (errno.ENOENT, None)
    with pytest.raises(InvalidRequest):
        cached.try_metadata(files.GetMetadataParams(PathUri.from_wire("file:///C:/x")))


def test_paths_that_follow_no_link_are_left_to_a_thread(home: Path) -> None:
    assert cached.try_read_file(files.ReadFileParams(_uri("file"), False), LIMIT) is None
    assert cached.try_metadata(files.GetMetadataParams(_uri("file"), False)) is None


def test_a_file_being_written_is_left_to_a_thread(home: Path) -> None:
    with content.TURNS.take(os.stat("file")):
        assert cached.try_read_file(files.ReadFileParams(_uri("file")), LIMIT) is None


def test_without_kernel_support_everything_is_left_to_a_thread(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached, "_SUPPORTED", False)
    path = _uri("file")
    assert cached.try_read_file(files.ReadFileParams(path), LIMIT) is None
    assert cached.try_metadata(files.GetMetadataParams(path)) is None
    assert cached.try_canonicalize(files.CanonicalizeParams(path)) is None


def test_slow_file_systems_are_found_in_the_mount_table() -> None:
    table = (
        b"21 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        b"22 21 0:4 / /proc rw shared:5 - proc proc rw\n"
        b"23 21 0:9 / /mnt/my\\040disk rw shared:7 master:2 - nfs4 host:/x rw\n"
        b"24 21 0:9 / /mnt/\xc3\xa9 rw - fuse.sshfs x rw\n"
    )
    mounts = cached._parse_mounts(table)
    assert cached._slow_mounts(mounts) == ("/mnt/my disk/", "/mnt/é/")
    assert [mount.device for mount in mounts if mount.kind == "proc"] == [os.makedev(0, 4)]
    assert cached._slow_mounts(cached._parse_mounts(b"1 0 0:9 / / rw - nfs x rw")) == ("/",)


def test_slow_file_systems_are_left_alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = cached._Mounts()
    monkeypatch.setattr(cached, "_MOUNTS", mounts)
    monkeypatch.setattr(cached, "_slow_mounts", lambda _: (f"{home}/dir/",))
    metadata = {
        name: _outcome(lambda name=name: cached.try_metadata(files.GetMetadataParams(_uri(name))))
        for name in ("dir", "dir/sub", "dlink", "dlink/sub", "flink", "file")
    }
    known = metadata.pop("file")
    assert isinstance(known, files.GetMetadataResult)
    assert set(metadata.values()) == {None}
    for name in ("dir/x", "dlink/x"):
        assert cached.try_read_file(files.ReadFileParams(_uri(name)), LIMIT) is None
    assert cached.try_canonicalize(files.CanonicalizeParams(_uri("dir"))) is None


def test_nothing_stays_open(home: Path) -> None:
    before = os.listdir("/proc/self/fd")
    for name in NAMES:
        for operation in (
            lambda name=name: cached.try_read_file(files.ReadFileParams(_uri(name)), LIMIT),
            lambda name=name: cached.try_metadata(files.GetMetadataParams(_uri(name))),
            lambda name=name: cached.try_canonicalize(files.CanonicalizeParams(_uri(name))),
        ):
            _outcome(operation)
    assert os.listdir("/proc/self/fd") == before
