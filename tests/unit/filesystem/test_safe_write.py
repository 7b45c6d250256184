"""Writing content: in place, complete or not at all, and never half visible."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.trees import copy, do, fails, os_error, read, uri, write

from exec_server.errors import InvalidRequest, RpcError
from exec_server.filesystem import safe_write
from exec_server.protocol import files


@pytest.mark.parametrize("follow", [None, False])
@pytest.mark.parametrize("data", [b"", b"x", b"abc", b"longer than before"])
def test_write_replaces_the_content_and_keeps_the_inode(
    home: Path, data: bytes, follow: bool | None
) -> None:
    os.chmod("file", 0o640)
    os.link("file", "other")
    before = os.stat("file")
    assert do(write("file", data, follow=follow)) == files.Done()
    after = os.stat("file")
    assert Path("other").read_bytes() == data
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)


@pytest.mark.parametrize("follow", [None, False])
def test_write_creates_a_file_with_the_usual_mode(home: Path, follow: bool | None) -> None:
    do(write("new", b"data", follow=follow))
    do(write("empty", b"", follow=follow))
    Path("usual").touch()
    assert (Path("new").read_bytes(), Path("empty").read_bytes()) == (b"data", b"")
    assert os.stat("new").st_mode == os.stat("usual").st_mode


def test_write_creates_the_target_of_a_dangling_link(home: Path) -> None:
    do(write("dangling", b"data"))
    assert Path("no").read_bytes() == b"data"
    assert os.path.islink("dangling")


def test_write_to_an_empty_file_counts_as_a_change(home: Path) -> None:
    Path("empty").touch()
    os.utime("empty", (1, 1))
    do(write("empty", b""))
    assert os.stat("empty").st_mtime > 1


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("missing/x", os_error(errno.ENOENT)),
        ("dir", os_error(errno.EISDIR)),
        ("dlink", os_error(errno.EISDIR)),
        ("/", os_error(errno.EISDIR)),
        ("loop", os_error(errno.ELOOP)),
        ("file/x", os_error(errno.ENOTDIR)),
        ("fifo", os_error(errno.ENXIO)),
        ("/dev/full", os_error(errno.ENOSPC)),
    ],
)
def test_write_errors(home: Path, path: str, error: RpcError) -> None:
    fails(write(path, b"x"), error)


def test_write_with_bad_base64(home: Path) -> None:
    params = files.WriteFileParams(uri("file"), "!!")
    message = "fs/writeFile requires valid base64 dataBase64: Invalid symbol 33, offset 0."
    fails(params, InvalidRequest(message))


def test_write_to_a_device(home: Path) -> None:
    assert do(write("/dev/null", b"x")) == files.Done()


def test_write_to_a_fifo_reaches_its_reader(home: Path) -> None:
    data = os.urandom(300_000)
    received = bytearray()
    fd = os.open("fifo", os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(fd, True)
    writer = threading.Thread(target=do, args=[write("fifo", data)])
    writer.start()
    while len(received) < len(data):
        received += os.read(fd, 65536)
    writer.join()
    os.close(fd)
    assert received == data


def test_write_to_a_fifo_that_nobody_reads_gives_up(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safe_write, "STALL_SECONDS", 0.01)
    fd = os.open("fifo", os.O_RDONLY | os.O_NONBLOCK)
    fails(write("fifo", bytes(1_000_000)), os_error(errno.ETIMEDOUT))
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
            fails(write("file", bytes(10_000)), os_error(errno.EFBIG))
        assert Path("file").read_bytes() == b"o" * size


@pytest.mark.parametrize("size", [100, 10_000])
def test_a_failed_write_leaves_no_new_file(home: Path, size: int) -> None:
    before = sorted(os.listdir())
    with _files_end_at(size // 2):
        fails(write("new", bytes(size)), os_error(errno.EFBIG))
    assert sorted(os.listdir()) == before


def test_a_failed_copy_leaves_the_old_content(home: Path) -> None:
    Path("large").write_bytes(bytes(10_000))
    with _files_end_at(8192):
        fails(copy("large", "file"), os_error(errno.EFBIG))
        fails(copy("large", "new"), os_error(errno.EFBIG))
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
    do(write("new", data))
    do(copy("new", "copied"))
    do(write("dangling", data))
    assert Path("copied").read_bytes() == Path("no").read_bytes() == data
    with _files_end_at(10):
        fails(write("large", bytes(10_000)), os_error(errno.EFBIG))
    assert not os.path.lexists("large")


def test_sparse_files_are_given_their_blocks_first(home: Path) -> None:
    with open("sparse", "wb") as file:
        file.truncate(100_000)
    do(write("sparse", b"x" * 50_000))
    assert Path("sparse").read_bytes() == b"x" * 50_000


def test_readers_never_see_half_of_a_write(home: Path) -> None:
    """Two writers of different lengths and a reader, all of this server."""
    contents = [b"a" * 200_000, b"b" * 150_000]
    do(write("file", contents[0]))
    writers = [
        threading.Thread(target=lambda data=data: [do(write("file", data)) for _ in range(50)])
        for data in contents
    ]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        result = do(read("file"))
        assert isinstance(result, files.ReadFileResult)
        assert result.data_base64 in contents
    for writer in writers:
        writer.join()


# inode locks


def test_an_inode_lock_excludes_other_threads_and_is_forgotten(home: Path) -> None:
    locks = safe_write.InodeLocks()
    info = os.stat("file")
    order: list[str] = []
    started = threading.Event()

    def wait() -> None:
        started.set()
        with locks.acquire(info):
            order.append("second")

    thread = threading.Thread(target=wait)
    with locks.acquire(info):
        thread.start()
        started.wait(10)
        while locks.acquisitions < 2:
            time.sleep(0.001)
        assert locks.is_held(info)
        assert not locks.is_held(os.stat("dir"))
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert len(locks) == 0
    assert not locks.is_held(info)


def test_a_lock_is_taken_without_waiting_only_if_it_is_free(home: Path) -> None:
    locks = safe_write.InodeLocks()
    info = os.stat("file")
    assert locks.acquire_now(info)
    assert locks.is_held(info)
    assert not locks.acquire_now(info)
    assert locks.is_held(info)
    locks.release(info)
    with locks.acquire(info):
        assert not locks.acquire_now(info)
    assert (len(locks), locks.acquisitions) == (0, 2)


def test_a_thread_waits_for_a_lock_that_was_free(home: Path) -> None:
    locks = safe_write.InodeLocks()
    info = os.stat("file")
    order: list[str] = []

    def wait() -> None:
        with locks.acquire(info):
            order.append("second")

    thread = threading.Thread(target=wait)
    assert locks.acquire_now(info)
    thread.start()
    while locks.acquisitions < 2:
        time.sleep(0.001)
    order.append("first")
    locks.release(info)
    thread.join()
    assert (order, len(locks)) == (["first", "second"], 0)


def test_locks_of_different_inodes_do_not_exclude_each_other(home: Path) -> None:
    locks = safe_write.InodeLocks()
    with locks.acquire(os.stat("file")), locks.acquire(os.stat("dir")):
        assert len(locks) == 2


# content


def test_content_is_written_by_ranges(home: Path) -> None:
    with open("file", "rb") as source:
        for content in (
            safe_write.BytesContent(b"abc"),
            safe_write.DescriptorContent(source.fileno(), 3),
        ):
            assert b"".join(content.blocks()) == b"abc"
            target = os.open("copy", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            content.write_range(target, 1, 3)
            content.write_range(target, 0, 1)
            assert os.pread(target, 10, 0) == b"abc"
            os.close(target)


class _Overtaken(safe_write.BytesContent):
    """Content before whose first byte another writer overwrites the new file."""

    def __init__(self, data: bytes, other: bytes) -> None:
        super().__init__(data)
        self._other: bytes | None = other

    def write_range(self, fd: int, start: int, end: int) -> None:
        if self._other is not None:
            other, self._other = safe_write.BytesContent(self._other), None
            safe_write.write("new", other)
        super().write_range(fd, start, end)


@pytest.mark.parametrize("other", [b"", b"1", b"other" * 1000])
@pytest.mark.parametrize("mode", [None, 0o600])
def test_a_new_file_is_never_mixed_with_that_of_another_writer(
    home: Path, other: bytes, mode: int | None
) -> None:
    safe_write.write("new", _Overtaken(b"data", other), mode=mode)
    assert Path("new").read_bytes() == b"data"
    assert len(safe_write.INODE_LOCKS) == 0


def test_write_entry_creates_and_overwrites_without_following(home: Path) -> None:
    directory = os.open(".", os.O_PATH | os.O_DIRECTORY)
    for name, data in {"new": b"1", "large": bytes(9000), "file": b"2"}.items():
        safe_write.write_entry(directory, name, safe_write.BytesContent(data))
        assert Path(name).read_bytes() == data
    with pytest.raises(OSError) as failed:
        safe_write.write_entry(directory, "flink", safe_write.BytesContent(b"3"))
    assert failed.value.errno == errno.ELOOP
    os.close(directory)


def test_open_or_create_follows_a_chain_of_dangling_links(home: Path) -> None:
    os.symlink("dangling", "chain")
    descriptor = safe_write.open_or_create(str(home / "chain"), 0o600)
    assert os.path.samestat(os.fstat(descriptor), os.stat("no"))
    os.close(descriptor)
    with pytest.raises(OSError) as failed:
        safe_write.open_or_create(str(home / "loop"), 0o600)
    assert failed.value.errno == errno.ELOOP


@pytest.mark.parametrize("mode", [0o640, 0o4755])
def test_the_mode_of_a_copy_is_set_on_new_and_old_files(home: Path, mode: int) -> None:
    for name in ("file", "new"):
        safe_write.write(str(home / name), safe_write.BytesContent(b"x"), mode=mode)
        assert stat.S_IMODE(os.stat(name).st_mode) == mode
