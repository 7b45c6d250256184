"""How the content of files is read and written, so that no failure destroys what was there.

- A new file is written without a name (O_TMPFILE) and then linked: it appears complete or
  not at all, even if the server is killed. One of at most a page gets its name first, which
  is twice as fast: the kernel writes a page whole or not at all.
- An existing regular file keeps its inode, mode and hard links, so it is written in place,
  never truncated first: first what lies beyond the old end, which is what can fail for lack
  of space (and is then cut off again), then the rest over the old content, then the cut if
  the file became shorter. Holes are given their blocks beforehand. Only an I/O error, or a
  full copy-on-write file system, can still leave a mixture.
- FIFOs and devices are written without blocking and given up when nobody takes the data.

Writers and readers of this server take turns on an inode, so that none of our readers sees
half of what one of our writers wrote.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, Protocol

from exec_server.core import filecalls, guard
from exec_server.errors import InternalError, InvalidRequest

# A reader of a FIFO that takes nothing for this long is taken for dead; a thread of the
# pool waits meanwhile, so it must not be much.
STALL_SECONDS: Final = 5.0
# The whole patience with a FIFO or device, however steadily its reader trickles.
STREAM_SECONDS: Final = 60.0
# The reference's limit (chapter 5.2) for what is read at once: a larger answer would be too
# much for a client.
READ_LIMIT: Final = 512 * 1024 * 1024
# Up to here the content of a new file needs no protection by a late name.
PAGE_BYTES: Final = 4096
# The kernel's own limit for links that lead to links.
MAX_LINKS: Final = 40
# For files of unknown size and copies that the kernel cannot do itself; more is not faster.
_BLOCK: Final = 1 << 20

_OPEN_EXISTING: Final = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NO_UNNAMED_FILES: Final = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS})
_CANNOT_COPY_RANGE: Final = frozenset(
    {errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EPERM}
)


def read_all(fd: int, size: int) -> bytes:
    """What is left of a file, which reports this size; procfs and the like report 0."""
    # One byte more than reported, so that one call finds the end too.
    data = os.read(fd, size + 1)
    if data and len(data) == size:
        return data
    blocks = [data]
    total = len(data)
    while blocks[-1]:
        if total > READ_LIMIT:
            raise too_large()
        blocks.append(os.read(fd, _BLOCK))
        total += len(blocks[-1])
    return b"".join(blocks)


def too_large() -> InvalidRequest:
    """The error for a file beyond READ_LIMIT."""
    return InvalidRequest(f"file is too large to read: limit is {READ_LIMIT} bytes")


class Content(Protocol):
    """What a file shall contain."""

    size: int

    def put(self, fd: int, start: int, end: int) -> None:
        """Write this range of the content to the same range of the file."""

    def blocks(self) -> Iterator[bytes | memoryview]:
        """The whole content in pieces."""


class Bytes:
    """Content that is in memory."""

    def __init__(self, data: bytes) -> None:
        self.size = len(data)
        self._view = memoryview(data)

    def put(self, fd: int, start: int, end: int) -> None:
        while start < end:
            start += _write_at(fd, self._view[start:end], start)

    def blocks(self) -> Iterator[memoryview]:
        yield self._view


class FileRange:
    """Content that is the first `size` bytes of another file, copied by the kernel if it can."""

    def __init__(self, source: int, size: int) -> None:
        self.size = size
        self._source = source

    def put(self, fd: int, start: int, end: int) -> None:
        while start < end:
            try:
                done = os.copy_file_range(self._source, fd, end - start, start, start)
            except OSError as error:
                if error.errno not in _CANNOT_COPY_RANGE:
                    raise
                done = 0
            # Zero may mean "at the end" or "I cannot do this kind of file": a read tells.
            if done == 0:
                done = _write_at(fd, self._read(start, end), start)
            start += done

    def blocks(self) -> Iterator[bytes]:
        start = 0
        while start < self.size:
            block = self._read(start, self.size)
            yield block
            start += len(block)

    def _read(self, start: int, end: int) -> bytes:
        block = os.pread(self._source, min(_BLOCK, end - start), start)
        if not block:
            raise InternalError("file became shorter while it was being copied")
        return block


def _write_at(fd: int, block: bytes | memoryview, offset: int) -> int:
    # Many files of procfs can only be written at their beginning, without naming an offset;
    # descriptors that come here have never been moved from there.
    return os.pwrite(fd, block, offset) if offset else os.write(fd, block)


class _Turn:
    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0


class Turns:
    """Whose turn it is on which inode; holds only the inodes in use."""

    def __init__(self) -> None:
        self.taken = 0  # how many turns ever began: unchanged means nobody interfered
        self._guard = threading.Lock()
        self._turns: dict[tuple[int, int], _Turn] = {}

    @contextmanager
    def take(self, info: os.stat_result) -> Iterator[None]:
        """Wait for the turn on this inode and keep it inside the `with`."""
        key = (info.st_dev, info.st_ino)
        with self._guard:
            self.taken += 1
            turn = self._turns.get(key)
            if turn is None:
                turn = self._turns[key] = _Turn()
            turn.users += 1
        try:
            with turn.lock:
                yield
        finally:
            with self._guard:
                turn.users -= 1
                if turn.users == 0:
                    del self._turns[key]

    def is_taken(self, info: os.stat_result) -> bool:
        """Whether someone has, or waits for, the turn on this inode."""
        return bool(self._turns) and (info.st_dev, info.st_ino) in self._turns


TURNS: Final = Turns()


def write(path: str, content: Content, *, mode: int | None = None) -> None:
    """Make the file at `path` contain this, following links; `mode` also sets its permissions."""
    try:
        fd = os.open(path, _OPEN_EXISTING)
    except FileNotFoundError:
        if _create_at(path, content, mode):
            return
        fd = open_or_create(path, 0o666 if mode is None else mode)
    try:
        overwrite(fd, content, mode=mode)
    finally:
        os.close(fd)


def open_or_create(path: str, permissions: int) -> int:
    """Open for writing what the path or a dangling link leads to, creating it if need be."""
    for _ in range(MAX_LINKS):
        try:
            return os.open(path, _OPEN_EXISTING)
        except FileNotFoundError:
            pass
        with guard.creating(path) as (directory, name):
            flags = _OPEN_EXISTING | os.O_CREAT | os.O_NOFOLLOW
            try:
                return os.open(name, flags, permissions, dir_fd=directory)
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                path = os.path.join(os.path.dirname(path), os.readlink(name, dir_fd=directory))
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _create_at(path: str, content: Content, mode: int | None) -> bool:
    if content.size <= PAGE_BYTES and not guard.is_armed():
        return _create_named(None, path, content, mode)
    with guard.creating(path) as (directory, name):
        return _create(directory, name, content, mode)


def write_entry(directory: int, name: str, content: Content) -> None:
    """Make the entry of a directory contain this; a link is ELOOP, nothing is followed."""
    flags = _OPEN_EXISTING | os.O_NOFOLLOW
    try:
        fd = os.open(name, flags, dir_fd=directory)
    except FileNotFoundError:
        guard.check_creation(directory, name)
        if _create(directory, name, content, None):
            return
        fd = os.open(name, flags, dir_fd=directory)
    try:
        overwrite(fd, content, only_regular=True)
    finally:
        os.close(fd)


def overwrite(
    fd: int, content: Content, *, mode: int | None = None, only_regular: bool = False
) -> None:
    """Replace what an open file contains; raises before it changes anything if it can."""
    guard.check_opened(fd, writing=True)
    info = os.fstat(fd)
    if stat.S_ISREG(info.st_mode):
        with TURNS.take(info):
            info = os.fstat(fd)
            if mode is not None and stat.S_IMODE(info.st_mode) != mode:
                os.fchmod(fd, mode)
            _overwrite_regular(fd, content, info)
            if mode is not None and mode & (stat.S_ISUID | stat.S_ISGID):
                os.fchmod(fd, mode)  # writing took these bits away
    elif only_regular:
        raise InvalidRequest("path is not a regular file")
    else:
        _stream(fd, content)


def _overwrite_regular(fd: int, content: Content, info: os.stat_result) -> None:
    old, new = info.st_size, content.size
    if info.st_blocks * 512 < old and new:
        filecalls.reserve(fd, min(old, new))
    if new > old:
        try:
            content.put(fd, old, new)
        except OSError:
            with suppress(OSError):
                os.ftruncate(fd, old)
            raise
    content.put(fd, 0, min(old, new))
    # An empty file written with nothing still counts as modified.
    if new < old or new == 0:
        os.ftruncate(fd, new)


def _create(directory: int, name: str, content: Content, mode: int | None) -> bool:
    """Create the file complete; False if the name is taken by now, even by a dangling link."""
    permissions = 0o666 if mode is None else mode
    flags = os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC
    try:
        fd = os.open(".", flags, permissions, dir_fd=directory)
    except OSError as error:
        if error.errno not in _NO_UNNAMED_FILES:
            raise
        return _create_named(directory, name, content, mode)
    try:
        content.put(fd, 0, content.size)
        if mode is not None:
            os.fchmod(fd, mode)
        # Naming both directories makes Python use linkat, which follows the magic link.
        os.link(f"/proc/self/fd/{fd}", name, src_dir_fd=directory, dst_dir_fd=directory)
    except FileExistsError:
        return False
    except FileNotFoundError:
        return _create_named(directory, name, content, mode)  # there is no /proc
    finally:
        os.close(fd)
    return True


def _create_named(directory: int | None, name: str, content: Content, mode: int | None) -> bool:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, 0o666 if mode is None else mode, dir_fd=directory)
    except FileExistsError:
        return False
    try:
        content.put(fd, 0, content.size)
        if mode is not None:
            os.fchmod(fd, mode)
    except BaseException:
        with suppress(OSError):
            os.unlink(name, dir_fd=directory)
        raise
    finally:
        os.close(fd)
    return True


def _stream(fd: int, content: Content) -> None:
    """Write to a FIFO or device whose descriptor does not block."""
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    deadline = time.monotonic() + STREAM_SECONDS
    for block in content.blocks():
        view = memoryview(block)
        while view:
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:
                patience = min(STALL_SECONDS, deadline - time.monotonic())
                if patience <= 0 or not poller.poll(patience * 1000):
                    raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from None
