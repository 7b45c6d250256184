"""Reads and writes the content of files so that a failure never destroys the old content.

- A new file is written without a name (O_TMPFILE) and then linked: it appears complete or not at
  all, even if the server is killed. A file of at most one page gets its name first, which is
  twice as fast: the kernel writes a page completely or not at all.
- An existing regular file keeps its inode, mode and hard links, so it is written in place and
  never truncated first. The part beyond the old end is written first, because that can fail for
  lack of space (and is then cut off again), then the rest over the old content; a file that
  became shorter is truncated last. Blocks of holes are allocated beforehand. Only an I/O error,
  or a full copy-on-write file system, can still leave a mixture.
- FIFOs and devices are written without blocking; the write fails if no reader takes the data.

Readers and writers of this server lock the inode, so no reader sees a partial write. The creator of
a file of at most one page does not: it writes once more if another one may have overtaken it.

GUARD has the checks that the mounts of a confined worker cannot make.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, Protocol

from exec_server.errors import InternalError, InvalidRequest
from exec_server.filesystem import syscalls

# A FIFO whose reader takes nothing for this long is given up; a thread of the pool waits
# meanwhile, so the time has to be short.
STALL_SECONDS: Final = 5.0
# The limit for a whole write to a FIFO or device, even if its reader takes data steadily.
STREAM_SECONDS: Final = 60.0
# The reference's limit of one read: a larger response would be too large for a client.
READ_LIMIT: Final = 512 * 1024 * 1024
# Up to this size a new file is written under its name: the kernel writes a page atomically.
PAGE_BYTES: Final = 4096
# The kernel's own limit of a chain of symbolic links.
MAX_LINKS: Final = 40
# One read of a file of unknown size or of a copy in user space; larger ones are not faster.
_BLOCK: Final = 1 << 20

_OPEN_EXISTING: Final = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NO_UNNAMED_FILES: Final = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS})
_CANNOT_COPY_RANGE: Final = frozenset(
    {errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EPERM}
)
# The kernel appends this to the path of a removed file.
_DELETED: Final = " (deleted)"

# The error number that an operation on a path gets, 0 for none; `writing` is any change.
PathCheck = Callable[[str, bool], int]
# The error number for renaming a directory, 0 for none.
TreeCheck = Callable[[str], int]


class PathGuard:
    """Rules for paths. Each `check_` method raises OSError if a rule denies the operation.

    Mounts cannot keep a name missing, nor deny files by pattern, and replacing a directory on the
    host detaches its mounts. So functions ask the guard right before they act, with the descriptor
    that they are going to use: a link or rename in between does not change the file that was
    checked. In the server itself every check passes.
    """

    def __init__(self) -> None:
        self._forbidden_names: set[tuple[int, int, str]] = set()
        self._path_checks: list[PathCheck] = []
        self._tree_checks: list[TreeCheck] = []

    def forbid_name(self, device: int, inode: int, name: str) -> None:
        """Deny the creation and removal of this name in that directory."""
        self._forbidden_names.add((device, inode, name))

    def add_path_check(self, check: PathCheck) -> None:
        """Call this check for every path that is opened, created or removed; needs /proc."""
        self._path_checks.append(check)

    def add_tree_check(self, check: TreeCheck) -> None:
        """Call this check for every directory that is renamed, with its path."""
        self._tree_checks.append(check)

    def check_tree_rename(self, directory: int, name: str) -> None:
        """Check a directory that is to be renamed together with everything below it."""
        if self._tree_checks:
            path = f"{_path_of(directory).rstrip('/')}/{name}"
            for check in self._tree_checks:
                _raise_if(check(path))

    @property
    def has_rules(self) -> bool:
        return bool(self._forbidden_names or self._path_checks)

    def check_creation(self, directory: int, name: str) -> None:
        """Check an entry that is to be created in an open directory.

        The error for an existing entry is the kernel's, but it is raised here: the entry may be
        removed before the kernel looks.
        """
        try:
            self.check_removal(directory, name)
        except OSError as refusal:
            try:
                os.lstat(name, dir_fd=directory)
            except FileNotFoundError:
                raise refusal from None
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None

    def check_removal(self, directory: int, name: str) -> None:
        """Check an entry that is to be removed from an open directory."""
        if self._forbidden_names:
            info = os.fstat(directory)
            if (info.st_dev, info.st_ino, name) in self._forbidden_names:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        if self._path_checks:
            self._check_path(f"{_path_of(directory).rstrip('/')}/{name}", writing=True)

    def check_opened(self, descriptor: int, *, writing: bool) -> None:
        """Check an open file or directory."""
        if self._path_checks:
            path = _path_of(descriptor)
            self._check_path(path, writing=writing)
            if path.endswith(_DELETED):
                self._check_path(path.removesuffix(_DELETED), writing=writing)

    def check_named(self, path: str) -> None:
        """Check a path as the client spelt it, before any link is followed.

        A file that is moved while it is being opened has another path afterwards.
        """
        if self._path_checks:
            self._check_path(path, writing=False)

    def check_readable(self, path: str) -> None:
        """Check the file or directory that a path leads to."""
        if self._path_checks:
            with syscalls.opened(path, os.O_PATH) as descriptor:
                self.check_opened(descriptor, writing=False)

    def _check_path(self, path: str, *, writing: bool) -> None:
        for check in self._path_checks:
            _raise_if(check(path, writing))

    @contextmanager
    def creating(self, path: str) -> Iterator[tuple[int, str]]:
        """The open parent directory and the name of an entry to create, after its check."""
        with _parent_of(path) as (directory, name):
            self.check_creation(directory, name)
            yield directory, name

    @contextmanager
    def removing(self, path: str) -> Iterator[tuple[int, str]]:
        """The open parent directory and the name of an entry to remove, after its check."""
        with _parent_of(path) as (directory, name):
            self.check_removal(directory, name)
            yield directory, name


def _raise_if(number: int) -> None:
    if number:
        raise OSError(number, os.strerror(number))


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


@contextmanager
def _parent_of(path: str) -> Iterator[tuple[int, str]]:
    parent, name = os.path.split(path)
    with syscalls.opened(parent, os.O_PATH | os.O_DIRECTORY) as directory:
        yield directory, name


# The guard of this process. A worker serves one policy, adds its rules once, and ends with it.
GUARD: Final = PathGuard()


def read_all(fd: int, size: int) -> bytes:
    """Read a file to its end; `size` is its reported size, which is 0 for procfs and the like."""
    # One byte more than reported, so that one call reaches the end, too.
    data = os.read(fd, size + 1)
    if data and len(data) == size:
        return data
    blocks = [data]
    total = len(data)
    while blocks[-1]:
        if total > READ_LIMIT:
            raise too_large_error()
        blocks.append(os.read(fd, _BLOCK))
        total += len(blocks[-1])
    return b"".join(blocks)


def too_large_error() -> InvalidRequest:
    """The error for a file beyond READ_LIMIT."""
    return InvalidRequest(f"file is too large to read: limit is {READ_LIMIT} bytes")


class Content(Protocol):
    """New content of a file."""

    size: int

    def write_range(self, fd: int, start: int, end: int) -> None:
        """Write this range of the content to the same range of the file."""

    def blocks(self) -> Iterator[bytes | memoryview]:
        """The whole content in blocks."""


class BytesContent:
    """Content in memory."""

    def __init__(self, data: bytes) -> None:
        self.size = len(data)
        self._view = memoryview(data)

    def write_range(self, fd: int, start: int, end: int) -> None:
        while start < end:
            start += _write_at(fd, self._view[start:end], start)

    def blocks(self) -> Iterator[memoryview]:
        yield self._view


class DescriptorContent:
    """The first `size` bytes of another file, copied by the kernel if possible."""

    def __init__(self, source: int, size: int) -> None:
        self.size = size
        self._source = source

    def write_range(self, fd: int, start: int, end: int) -> None:
        while start < end:
            try:
                count = os.copy_file_range(self._source, fd, end - start, start, start)
            except OSError as error:
                if error.errno not in _CANNOT_COPY_RANGE:
                    raise
                count = 0
            # Zero means the end of the file or an unsupported kind of file: a read tells which.
            if count == 0:
                count = _write_at(fd, self._read(start, end), start)
            start += count

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
    # Many files of procfs accept only write(2) at offset 0, not pwrite(2); the descriptors passed
    # here have their position at 0.
    return os.pwrite(fd, block, offset) if offset else os.write(fd, block)


class _InodeLock:
    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0


class InodeLocks:
    """One lock per inode in use by a reader or writer of this server."""

    def __init__(self) -> None:
        self.acquisitions = 0  # ever begun: unchanged means that no other thread has interfered
        self._mutex = threading.Lock()
        self._locks: dict[tuple[int, int], _InodeLock] = {}

    def __len__(self) -> int:
        return len(self._locks)

    @contextmanager
    def acquire(self, info: os.stat_result) -> Iterator[None]:
        """Hold the lock of this inode inside the `with`."""
        key = (info.st_dev, info.st_ino)
        with self._mutex:
            self.acquisitions += 1
            lock = self._locks.get(key)
            if lock is None:
                lock = self._locks[key] = _InodeLock()
            lock.users += 1
        try:
            with lock.lock:
                yield
        finally:
            self._leave(key, lock)

    def acquire_now(self, info: os.stat_result) -> bool:
        """Take the lock of this inode if that needs no waiting; call `release` then."""
        key = (info.st_dev, info.st_ino)
        with self._mutex:
            if key in self._locks:
                return False
            self.acquisitions += 1
            lock = self._locks[key] = _InodeLock()
            lock.users = 1
            lock.lock.acquire()
        return True

    def release(self, info: os.stat_result) -> None:
        """Give back the lock that `acquire_now` has taken."""
        key = (info.st_dev, info.st_ino)
        lock = self._locks[key]
        lock.lock.release()
        self._leave(key, lock)

    def _leave(self, key: tuple[int, int], lock: _InodeLock) -> None:
        with self._mutex:
            lock.users -= 1
            if lock.users == 0:
                del self._locks[key]

    def is_held(self, info: os.stat_result) -> bool:
        """Whether a thread holds, or waits for, the lock of this inode."""
        return bool(self._locks) and (info.st_dev, info.st_ino) in self._locks


# Inodes belong to the machine, so all connections share their locks.
INODE_LOCKS: Final = InodeLocks()


def write(path: str, content: Content, *, mode: int | None = None) -> None:
    """Create or overwrite the file at `path`, following links; `mode` sets its permissions."""
    try:
        fd = os.open(path, _OPEN_EXISTING)
    except FileNotFoundError:
        if create(path, content, mode):
            return
        fd = open_or_create(path, 0o666 if mode is None else mode)
    try:
        overwrite(fd, content, mode=mode)
    finally:
        os.close(fd)


def open_or_create(path: str, permissions: int) -> int:
    """Open the file that the path leads to for writing; a missing one is created."""
    for _ in range(MAX_LINKS):
        try:
            return os.open(path, _OPEN_EXISTING)
        except FileNotFoundError:
            pass
        with GUARD.creating(path) as (directory, name):
            flags = _OPEN_EXISTING | os.O_CREAT | os.O_NOFOLLOW
            try:
                return os.open(name, flags, permissions, dir_fd=directory)
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                path = os.path.join(os.path.dirname(path), os.readlink(name, dir_fd=directory))
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def create(path: str, content: Content, mode: int | None = None) -> bool:
    """Create the complete file; False if the name exists, even as a dangling link."""
    if content.size <= PAGE_BYTES and not GUARD.has_rules:
        return create_named(None, path, content, mode)
    with GUARD.creating(path) as (directory, name):
        return _create(directory, name, content, mode)


def write_entry(directory: int, name: str, content: Content) -> None:
    """Create or overwrite an entry of a directory without following links: a link is ELOOP."""
    flags = _OPEN_EXISTING | os.O_NOFOLLOW
    try:
        fd = os.open(name, flags, dir_fd=directory)
    except FileNotFoundError:
        GUARD.check_creation(directory, name)
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
    """Replace the content of an open file; raises before any change where possible."""
    GUARD.check_opened(fd, writing=True)
    info = os.fstat(fd)
    if stat.S_ISREG(info.st_mode):
        with INODE_LOCKS.acquire(info):
            info = os.fstat(fd)
            if mode is not None and stat.S_IMODE(info.st_mode) != mode:
                os.fchmod(fd, mode)
            overwrite_locked(fd, content, info)
            if mode is not None and mode & (stat.S_ISUID | stat.S_ISGID):
                os.fchmod(fd, mode)  # writing clears these bits
    elif only_regular:
        raise InvalidRequest("path is not a regular file")
    else:
        _write_stream(fd, content)


def overwrite_locked(fd: int, content: Content, info: os.stat_result) -> None:
    """Replace the content of a regular file, locked by the caller since `info` was read."""
    old, new = info.st_size, content.size
    if info.st_blocks * 512 < old and new:
        syscalls.allocate(fd, min(old, new))
    if new > old:
        try:
            content.write_range(fd, old, new)
        except OSError:
            with suppress(OSError):
                os.ftruncate(fd, old)
            raise
    content.write_range(fd, 0, min(old, new))
    # Writing nothing to an empty file still sets its modification time.
    if new < old or new == 0:
        os.ftruncate(fd, new)


def _create(directory: int, name: str, content: Content, mode: int | None) -> bool:
    """Create the complete file; False if the name exists by now, even as a dangling link."""
    permissions = 0o666 if mode is None else mode
    flags = os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC
    try:
        fd = os.open(".", flags, permissions, dir_fd=directory)
    except OSError as error:
        if error.errno not in _NO_UNNAMED_FILES:
            raise
        return create_named(directory, name, content, mode)
    try:
        content.write_range(fd, 0, content.size)
        if mode is not None:
            os.fchmod(fd, mode)
        # With both directory arguments Python calls linkat, which follows the magic link.
        os.link(f"/proc/self/fd/{fd}", name, src_dir_fd=directory, dst_dir_fd=directory)
    except FileExistsError:
        return False
    except FileNotFoundError:
        return create_named(directory, name, content, mode)  # there is no /proc
    finally:
        os.close(fd)
    return True


def create_named(
    directory: int | None, name: str, content: Content, mode: int | None = None
) -> bool:
    """Create a file under its name, for content of at most PAGE_BYTES; False if it exists."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    acquisitions = INODE_LOCKS.acquisitions
    try:
        fd = os.open(name, flags, 0o666 if mode is None else mode, dir_fd=directory)
    except FileExistsError:
        return False
    fill_new(fd, directory, name, content, mode, acquisitions=acquisitions)
    return True


def fill_new(
    fd: int,
    directory: int | None,
    name: str,
    content: Content,
    mode: int | None = None,
    *,
    acquisitions: int | None = None,
) -> None:
    """Write and close a file that was just created; a failure removes it.

    The inode is not locked, so another writer may have begun to overwrite the empty file. If there
    are more `acquisitions` of locks than before the creation, it is written once more. Without
    them, that is left to the caller.
    """
    try:
        content.write_range(fd, 0, content.size)
        if acquisitions is not None and acquisitions != INODE_LOCKS.acquisitions:
            with INODE_LOCKS.acquire(os.fstat(fd)):
                os.lseek(fd, 0, os.SEEK_SET)
                overwrite_locked(fd, content, os.fstat(fd))
        if mode is not None:
            os.fchmod(fd, mode)
    except BaseException:
        with suppress(OSError):
            os.unlink(name, dir_fd=directory)
        raise
    finally:
        os.close(fd)


def _write_stream(fd: int, content: Content) -> None:
    """Write to a FIFO or device through a non-blocking descriptor."""
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    deadline = time.monotonic() + STREAM_SECONDS
    for block in content.blocks():
        view = memoryview(block)
        while view:
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:
                timeout = min(STALL_SECONDS, deadline - time.monotonic())
                if timeout <= 0 or not poller.poll(timeout * 1000):
                    raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from None
