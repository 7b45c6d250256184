"""The files one connection has opened for block reads and writes. Thread-safe.

Descriptors close with the last reference: a read during a close could hit a reused number.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from exec_server.errors import InvalidRequest, NotFound
from exec_server.filesystem import safe_write
from exec_server.filesystem.operations import check_regular, open_regular
from exec_server.protocol import files

# The reference's limits; above them a client gets an error.
MAX_HANDLES: Final = 128
MAX_ID_BYTES: Final = 32
MAX_BLOCK: Final = 1024 * 1024

_MAX_OFFSET: Final = 2**63 - 1
_DONE: Final = files.Done()


class _Handle:
    """One open file; `users` counts the table and every operation under way."""

    __slots__ = ("fd", "users")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 1


class HandleTable:
    """The handles of one connection; `close_all` must be called when it ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # None: the id is reserved while its file is being opened.
        self._handles: dict[files.HandleId, _Handle | None] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._handles)

    def adopt(
        self, params: files.OpenParams, opener: Callable[[files.OpenParams], int]
    ) -> files.OpenResult:
        """Keep the descriptor of `opener` under the id that the client chose. Blocking."""
        self._reserve(params.handle_id)
        fd = -1
        try:
            fd = opener(params)
        finally:
            self._resolve_reservation(params.handle_id, fd)
        return files.OpenResult(params.handle_id)

    def read_block(self, params: files.ReadBlockParams) -> files.ReadBlockResult:
        """Up to `len` bytes at an offset, fewer only at the end. Blocking."""
        _check_read(params)
        with self._acquire(params.handle_id) as fd:
            try:
                data = _read_range(fd, params.offset, params.len)
            except OSError:
                self._drop(params.handle_id)
                raise
        return files.ReadBlockResult(data, len(data) < params.len)

    def try_read_block(self, params: files.ReadBlockParams) -> files.ReadBlockResult | None:
        """The block if all of it is in the page cache, None if reading it might block."""
        _check_read(params)
        if params.offset + params.len > _MAX_OFFSET:
            return None
        buffer = bytearray(params.len)
        with self._acquire(params.handle_id) as fd:
            try:
                count = os.preadv(fd, [buffer], params.offset, os.RWF_NOWAIT)
            except OSError:
                return None
        # A short read may mean the end of the file or the end of what is cached.
        return files.ReadBlockResult(bytes(buffer), False) if count == params.len else None

    def write_block(self, params: files.WriteBlockParams) -> files.Done:
        """Write bytes at an offset. A failure leaves the handle open. Blocking."""
        _check_id(params.handle_id)
        length = len(params.chunk)
        if not 1 <= length <= MAX_BLOCK:
            raise InvalidRequest(f"file write block length must be between 1 and {MAX_BLOCK}")
        if params.offset + length > _MAX_OFFSET:
            raise InvalidRequest("file write range exceeds the signed 64-bit file offset limit")
        view = memoryview(params.chunk)
        offset = params.offset
        with self._acquire(params.handle_id) as fd:
            while view:
                count = os.pwrite(fd, view, offset)
                view = view[count:]
                offset += count
        return _DONE

    def close(self, params: files.CloseParams) -> files.Done:
        """Close a handle; an unknown id is no error."""
        _check_id(params.handle_id)
        self._drop(params.handle_id)
        return _DONE

    def close_all(self) -> None:
        """Close every handle; those being opened or used are closed when that is done."""
        with self._lock:
            self._is_closed = True
            handles = [handle for handle in self._handles.values() if handle is not None]
            self._handles.clear()
        for handle in handles:
            self._release(handle)

    def _reserve(self, handle_id: files.HandleId) -> None:
        _check_id(handle_id)
        with self._lock:
            if handle_id in self._handles:
                raise InvalidRequest(f"file handle `{handle_id}` already exists")
            if len(self._handles) >= MAX_HANDLES:
                raise InvalidRequest(
                    f"at most {MAX_HANDLES} file handles may be open per connection"
                )
            self._handles[handle_id] = None

    def _resolve_reservation(self, handle_id: files.HandleId, fd: int) -> None:
        """Store an opened file under its reserved id, or drop the reservation if `fd` is -1."""
        with self._lock:
            # The client may have closed the id meanwhile, and even have begun to open it again.
            reserved = handle_id in self._handles and self._handles[handle_id] is None
            if reserved and fd >= 0 and not self._is_closed:
                self._handles[handle_id] = _Handle(fd)
                return
            if reserved:
                del self._handles[handle_id]
        if fd >= 0:
            os.close(fd)

    @contextmanager
    def _acquire(self, handle_id: files.HandleId) -> Iterator[int]:
        with self._lock:
            handle = self._handles.get(handle_id)
            if handle is None:
                raise NotFound(f"unknown file handle `{handle_id}`")
            handle.users += 1
        try:
            yield handle.fd
        finally:
            self._release(handle)

    def _drop(self, handle_id: files.HandleId) -> None:
        with self._lock:
            handle = self._handles.pop(handle_id, None)
        if handle is not None:
            self._release(handle)

    def _release(self, handle: _Handle) -> None:
        with self._lock:
            handle.users -= 1
            unused = handle.users == 0
        if unused:
            os.close(handle.fd)


def open_file(params: files.OpenParams) -> int:
    """A descriptor of a regular file for reading, or of a truncated one for writing."""
    path = params.path.native()
    return open_regular(path)[0] if params.mode == "read" else _open_replace(path)


def _open_replace(path: str) -> int:
    fd = safe_write.open_or_create(path, 0o666)
    try:
        with safe_write.INODE_LOCKS.acquire(check_regular(fd, path, writing=True)):
            os.ftruncate(fd, 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _read_range(fd: int, offset: int, length: int) -> bytes:
    if offset + length > _MAX_OFFSET:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    data = block = os.pread(fd, length, offset)
    while block and len(data) < length:
        block = os.pread(fd, length - len(data), offset + len(data))
        data += block
    return data


def _check_read(params: files.ReadBlockParams) -> None:
    _check_id(params.handle_id)
    if not 1 <= params.len <= MAX_BLOCK:
        raise InvalidRequest(f"file read block length must be between 1 and {MAX_BLOCK}")


def _check_id(handle_id: files.HandleId) -> None:
    if len(handle_id) > MAX_ID_BYTES or len(handle_id.encode()) > MAX_ID_BYTES:
        raise InvalidRequest(f"file handle ID must not exceed {MAX_ID_BYTES} bytes")
