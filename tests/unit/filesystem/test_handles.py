"""Block reads and writes through handles; the errors are those the reference gives."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from exec_server.errors import InvalidRequest, NotFound, RpcError, rpc_error_from_os
from exec_server.filesystem import handles
from exec_server.filesystem.handles import MAX_BLOCK, HandleTable
from exec_server.filesystem.operations import open_regular
from exec_server.protocol import files
from exec_server.protocol.decoding import Base64
from exec_server.protocol.files import HandleId
from exec_server.protocol.paths import PathUri

DATA = bytes(range(256))


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HandleTable]:
    monkeypatch.chdir(tmp_path)
    Path("a").write_bytes(DATA)
    before = os.listdir("/proc/self/fd")
    table = HandleTable()
    yield table
    table.close_all()
    assert os.listdir("/proc/self/fd") == before


def _open(
    table: HandleTable, handle_id: str, path: str = "a", mode: Literal["read", "replace"] = "read"
) -> object:
    uri = PathUri.from_wire(os.path.join(os.getcwd(), path))
    return table.adopt(files.OpenParams(HandleId(handle_id), uri, mode), handles.open_file)


def _block(handle_id: str, offset: int, length: int) -> files.ReadBlockParams:
    return files.ReadBlockParams(HandleId(handle_id), offset, length)


def _chunk(handle_id: str, offset: int, data: bytes) -> files.WriteBlockParams:
    return files.WriteBlockParams(HandleId(handle_id), offset, Base64(data))


def _error(operation: object, *arguments: object) -> tuple[type[RpcError], str]:
    """What a failing operation answers."""
    with pytest.raises((RpcError, OSError)) as caught:
        operation(*arguments)  # type: ignore[operator]
    error = caught.value
    if isinstance(error, OSError):
        error = rpc_error_from_os(error)
    assert isinstance(error, RpcError)
    return type(error), error.message


@pytest.mark.parametrize(
    ("offset", "length", "data", "eof"),
    [
        (0, 4, DATA[:4], False),
        (252, 4, DATA[252:], False),
        (254, 4, DATA[254:], True),
        (256, 4, b"", True),
        (9999, 4, b"", True),
        (0, MAX_BLOCK, DATA, True),
        (2**63 - 2, 1, b"", True),
    ],
)
def test_read_block(table: HandleTable, offset: int, length: int, data: bytes, eof: bool) -> None:
    assert _open(table, "h") == files.OpenResult(HandleId("h"))
    expected = files.ReadBlockResult(data, eof)
    assert table.read_block(_block("h", offset, length)) == expected
    assert table.try_read_block(_block("h", offset, length)) in (expected, None)


def test_a_file_that_gives_little_at_a_time_is_read_to_the_end(
    table: HandleTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, length, offset: real(fd, min(length, 3), offset))
    _open(table, "h")
    assert table.read_block(_block("h", 0, 10)) == files.ReadBlockResult(DATA[:10], False)
    assert table.read_block(_block("h", 250, 10)) == files.ReadBlockResult(DATA[250:], True)


def test_replace_empties_the_file_at_once_and_writes_anywhere(table: HandleTable) -> None:
    _open(table, "w", "a", "replace")
    assert Path("a").read_bytes() == b""
    assert table.write_block(_chunk("w", 0, b"abc")) == files.Done()
    table.write_block(_chunk("w", 5, b"Z"))
    assert Path("a").read_bytes() == b"abc\0\0Z"
    os.symlink("target", "dangling")
    _open(table, "n", "dangling", "replace")
    assert os.path.isfile("target")


def test_the_wrong_direction(table: HandleTable) -> None:
    bad = rpc_error_from_os(OSError(errno.EBADF, os.strerror(errno.EBADF)))
    expected = (type(bad), bad.message)
    _open(table, "r")
    assert _error(table.write_block, _chunk("r", 0, b"x")) == expected
    # A failed write leaves the handle, a failed read closes it.
    assert table.read_block(_block("r", 0, 1)).chunk == DATA[:1]
    _open(table, "w", "new", "replace")
    assert _error(table.read_block, _block("w", 0, 1)) == expected
    assert len(table) == 1


@pytest.mark.parametrize(
    ("path", "mode", "expected"),
    [
        ("missing", "read", (NotFound, "No such file or directory (os error 2)")),
        ("missing/x", "replace", (NotFound, "No such file or directory (os error 2)")),
        ("/dev/null", "read", (InvalidRequest, "path `/dev/null` is not a file")),
        ("/dev/null", "replace", (InvalidRequest, "path `/dev/null` is not a file")),
        ("/", "read", (InvalidRequest, "path `/` is not a file")),
    ],
)
def test_open_errors_leave_the_id_free(
    table: HandleTable, path: str, mode: str, expected: tuple[type[RpcError], str]
) -> None:
    assert _error(_open, table, "h", path, mode) == expected
    assert len(table) == 0
    _open(table, "h")


def test_open_of_a_fifo_does_not_wait(table: HandleTable) -> None:
    os.mkfifo("fifo")
    path = f"{os.getcwd()}/fifo"
    assert _error(_open, table, "h", "fifo") == (InvalidRequest, f"path `{path}` is not a file")
    message = "No such device or address (os error 6)"
    assert _error(_open, table, "h", "fifo", "replace")[1] == message


def test_ids(table: HandleTable) -> None:
    too_long = (InvalidRequest, "file handle ID must not exceed 32 bytes")
    _open(table, "")
    _open(table, "x" * 32)
    for long in ("x" * 33, "é" * 17):
        assert _error(_open, table, long) == too_long
        assert _error(table.read_block, _block(long, 0, 0)) == too_long
        assert _error(table.write_block, _chunk(long, 2**64 - 1, b"")) == too_long
        assert _error(table.close, files.CloseParams(HandleId(long))) == too_long
    assert _error(_open, table, "", "missing") == (InvalidRequest, "file handle `` already exists")


def test_at_most_128_handles(table: HandleTable) -> None:
    for number in range(handles.MAX_HANDLES):
        _open(table, str(number))
    message = "at most 128 file handles may be open per connection"
    assert _error(_open, table, "more", "missing") == (InvalidRequest, message)
    table.close(files.CloseParams(HandleId("5")))
    _open(table, "more")


def test_lengths_are_checked_before_ids_and_keep_the_handle(table: HandleTable) -> None:
    _open(table, "h")
    read = (InvalidRequest, "file read block length must be between 1 and 1048576")
    write = (InvalidRequest, "file write block length must be between 1 and 1048576")
    for handle_id in ("h", "unknown"):
        for length in (0, MAX_BLOCK + 1):
            assert _error(table.read_block, _block(handle_id, 0, length)) == read
            assert _error(table.try_read_block, _block(handle_id, 0, length)) == read
            assert _error(table.write_block, _chunk(handle_id, 0, bytes(length))) == write
        assert _error(table.write_block, _chunk(handle_id, 2**63 - 1, b"xx")) == (
            InvalidRequest,
            "file write range exceeds the signed 64-bit file offset limit",
        )
    assert len(table) == 1


@pytest.mark.parametrize(("offset", "length"), [(2**63 - 1, 1), (2**64 - 1, 4), (2**63 - 10, 99)])
def test_an_impossible_offset_closes_the_handle(
    table: HandleTable, offset: int, length: int
) -> None:
    _open(table, "h")
    assert table.try_read_block(_block("h", offset, length)) is None
    expected = (InvalidRequest, "Invalid argument (os error 22)")
    assert _error(table.read_block, _block("h", offset, length)) == expected
    unknown = (NotFound, "unknown file handle `h`")
    assert _error(table.read_block, _block("h", 0, 4)) == unknown
    assert _error(table.try_read_block, _block("h", 0, 4)) == unknown
    assert _error(table.write_block, _chunk("h", 0, b"x")) == unknown


def test_close_forgives_unknown_ids(table: HandleTable) -> None:
    _open(table, "h")
    assert table.close(files.CloseParams(HandleId("h"))) == files.Done()
    assert table.close(files.CloseParams(HandleId("h"))) == files.Done()
    assert len(table) == 0


def test_a_handle_closed_during_a_read_is_closed_after_it(
    table: HandleTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The descriptor must not be reused under a running read."""
    reading, closed = threading.Event(), threading.Event()
    real = os.pread
    seen: list[object] = []

    def slow(fd: int, length: int, offset: int) -> bytes:
        reading.set()
        assert closed.wait(10)
        os.fstat(fd)
        return real(fd, length, offset)

    monkeypatch.setattr(os, "pread", slow)
    _open(table, "h")
    thread = threading.Thread(target=lambda: seen.append(table.read_block(_block("h", 0, 4))))
    thread.start()
    assert reading.wait(10)
    table.close(files.CloseParams(HandleId("h")))
    table.close_all()
    closed.set()
    thread.join()
    assert seen == [files.ReadBlockResult(DATA[:4], False)]


def test_a_file_opened_after_the_connection_ended_is_closed(
    table: HandleTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = open_regular

    def end_meanwhile(path: str) -> tuple[int, os.stat_result]:
        table.close_all()
        return real(path)

    monkeypatch.setattr(handles, "open_regular", end_meanwhile)
    _open(table, "h")
    assert len(table) == 0
