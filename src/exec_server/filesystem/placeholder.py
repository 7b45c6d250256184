"""A placeholder: an empty directory at a name that must stay missing while a command runs.

It is recognised by its modification time, or by its mode while it is changed. It is in use while a
process holds a shared lock on it, or a claim is in it; the last user removes it, and the next
server takes over that of a dead one. Every reader may lock it, so no lock is ever waited for: a
user that meets a foreign exclusive lock creates a claim, a locked directory in it,
because of which the kernel does not remove the placeholder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

# A modification time that no file has by chance: 2001-09-09 and this many nanoseconds.
MARK_NS: Final = 1_000_000_000 * 1_000_000_000 + 653_284_901
_MODE: Final = 0o555
# The mode until the modification time is set, and while there are claims: creating a claim changes
# the time. A directory is created with its mode, so it is never seen without any mark.
_UNSETTLED_MODE: Final = 0o1700
_CLAIM_PREFIX: Final = ".exec-server-"
_CLAIM_MODE: Final = 0o700
# More than the removals that one attempt can meet: each takes microseconds.
_ATTEMPTS: Final = 16
# A command has no more rights than the server: where the server cannot create a directory, the
# command cannot create anything either, unless it owns the directory and changes its mode.
_NOT_CREATABLE: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
# Errors for a directory that cannot be listed by its rights (EBADF: by its descriptor) and is
# covered like any other, or that was removed.
_CLOSED_OR_GONE: Final = frozenset({errno.EACCES, errno.EBADF, errno.ENOENT, errno.ENOTDIR})
_NOT_EMPTY: Final = frozenset({errno.ENOTEMPTY, errno.EEXIST})
_OPEN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_PATH: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Claim(NamedTuple):
    """A locked directory inside a placeholder."""

    name: str
    descriptor: int


class Use:
    """The use of a placeholder: its descriptor, and a claim if the lock was not available.

    A placeholder of another user that cannot be locked has neither a lock nor a claim. `is_own` is
    true for one that this process has created: some file systems give it another owner.
    """

    def __init__(self, descriptor: int, *, is_own: bool) -> None:
        self.descriptor = descriptor
        self.claim: Claim | None = None
        self.is_own = is_own


def is_placeholder(info: os.stat_result, path: str | int) -> bool:
    """Whether this is the status of a placeholder, of this server or another one.

    Raises OSError if a directory with the mode of a placeholder cannot be listed.
    """
    if not stat.S_ISDIR(info.st_mode):
        return False
    if info.st_mtime_ns == MARK_NS:
        return True
    return _is_unsettled(info) and _has_only_claims(path)


def _is_unsettled(info: os.stat_result) -> bool:
    # A new directory inherits the set-group-id bit.
    return stat.S_IMODE(info.st_mode) & ~stat.S_ISGID == _UNSETTLED_MODE


def _has_only_claims(path: str | int) -> bool:
    try:
        return all(name.startswith(_CLAIM_PREFIX) for name in os.listdir(path))
    except OSError as error:
        if error.errno in _CLOSED_OR_GONE:
            return False
        raise


def make(directory: int, name: str) -> Use | None:
    """Create or share a placeholder; None where a command could not create anything anyway.

    Raises FileExistsError if the name exists and is no placeholder, PermissionError if only the
    mode of a directory of the server's user forbids it, and other errors of the file system.
    """
    for attempt in range(_ATTEMPTS):
        is_new = _create(directory, name)
        if is_new is None:
            return None
        try:
            descriptor = _open(directory, name, is_new=is_new)
        except FileNotFoundError:
            continue  # its last user has just removed it
        try:
            may_claim = attempt == _ATTEMPTS - 1
            use = _take(directory, name, descriptor, is_new=is_new, may_claim=may_claim)
        except BaseException:
            _remove_unused(directory, name, descriptor, is_own=is_new)
            os.close(descriptor)
            raise
        if use is not None:
            return use
        os.close(descriptor)
    raise FileExistsError(f"{name} keeps changing")


def _create(directory: int, name: str) -> bool | None:
    """Create an unsettled directory; False if the name exists, None if no command could."""
    try:
        os.mkdir(name, _UNSETTLED_MODE, dir_fd=directory)
    except FileExistsError:
        return False
    except OSError as error:
        owner_could = error.errno == errno.EACCES and os.fstat(directory).st_uid == os.geteuid()
        if error.errno in _NOT_CREATABLE and not owner_could:
            return None
        raise
    return True


def _open(directory: int, name: str, *, is_new: bool) -> int:
    """A descriptor of the placeholder at the name; raises FileExistsError for anything else."""
    try:
        try:
            descriptor = os.open(name, _OPEN, dir_fd=directory)
        except PermissionError:
            descriptor = _open_closed(directory, name)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise FileExistsError(f"{name} exists") from error
        raise
    try:
        # The umask may have reduced the mode of a new directory.
        if not is_new and not is_placeholder(os.fstat(descriptor), descriptor):
            raise FileExistsError(f"{name} exists")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open_closed(directory: int, name: str) -> int:
    """Open a placeholder without rights: O_PATH suffices to cover that of another user."""
    descriptor = os.open(name, _OPEN_PATH, dir_fd=directory)
    info = os.fstat(descriptor)
    if info.st_uid != os.geteuid() or info.st_mtime_ns != MARK_NS:
        return descriptor
    try:
        os.chmod(f"/proc/self/fd/{descriptor}", _MODE)
        return os.open(name, _OPEN, dir_fd=directory)
    finally:
        os.close(descriptor)


def _take(
    directory: int, name: str, descriptor: int, *, is_new: bool, may_claim: bool
) -> Use | None:
    """Use an open placeholder; None if it is locked, or no longer at its name."""
    info = os.fstat(descriptor)
    use = Use(descriptor, is_own=is_new or info.st_uid == os.geteuid())
    if _lock(descriptor, fcntl.LOCK_SH):
        if use.is_own and (_is_unsettled(info) or info.st_mtime_ns != MARK_NS):
            _settle(descriptor)
    elif not may_claim:
        return None
    elif use.is_own:
        use.claim = _create_claim(descriptor)
    if is_at(directory, name, descriptor):
        return use
    if use.claim is not None:
        _remove_claim(descriptor, use.claim)
    return None


def is_at(directory: int, name: str | bytes, descriptor: int) -> bool:
    """Whether the name leads to the open directory."""
    try:
        return os.path.samestat(os.lstat(name, dir_fd=directory), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _lock(descriptor: int, operation: int) -> bool:
    """Lock without waiting; False if another process holds a lock, or locks are not supported."""
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _settle(placeholder: int) -> None:
    """Set the modification time of a placeholder without claims, then its mode."""
    if _has_claims(placeholder):
        return
    os.utime(placeholder, ns=(MARK_NS, MARK_NS))
    os.fchmod(placeholder, _MODE)
    if os.fstat(placeholder).st_mtime_ns != MARK_NS:
        os.fchmod(placeholder, _UNSETTLED_MODE)
        if not _has_claims(placeholder):  # created meanwhile
            raise OSError(errno.ENOTSUP, "the file system does not keep modification times exactly")


def _has_claims(placeholder: int) -> bool:
    names = os.listdir(placeholder)
    if not all(name.startswith(_CLAIM_PREFIX) for name in names):
        raise FileExistsError("it is not empty")
    return bool(names)


def _create_claim(placeholder: int) -> Claim:
    """A locked directory in a placeholder of this user; FileNotFoundError if that was removed."""
    _has_claims(placeholder)  # raises if it is filled
    os.fchmod(placeholder, _UNSETTLED_MODE)
    for _ in range(_ATTEMPTS):
        name = _CLAIM_PREFIX + os.urandom(8).hex()
        os.mkdir(name, _CLAIM_MODE, dir_fd=placeholder)
        claim = Claim(name, os.open(name, _OPEN, dir_fd=placeholder))
        if _lock(claim.descriptor, fcntl.LOCK_SH) and is_at(placeholder, name, claim.descriptor):
            return claim
        _remove_claim(placeholder, claim)
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def release(directory: int, name: str, use: Use, close: Callable[[int], None] = os.close) -> bool:
    """End the use of a placeholder, and remove the placeholder if it was the last use.

    A placeholder that was filled or replaced stays, and one of another user may. False if it has
    to be removed later: another process has locked it, or its directory cannot be changed.
    """
    if use.claim is not None:
        _remove_claim(use.descriptor, use.claim)
    try:
        is_done = _remove_unused(directory, name, use.descriptor, is_own=use.is_own)
        return is_done or not use.is_own
    finally:
        close(use.descriptor)


def remove_left_behind(directory: int, name: str | bytes) -> bool:
    """Remove a placeholder without users; the result is that of `release`."""

    def remove() -> bool:
        try:
            descriptor = os.open(name, _OPEN, dir_fd=directory)
        except PermissionError:
            raise
        except OSError as error:
            return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
        try:
            return _remove_unused(directory, name, descriptor)
        finally:
            os.close(descriptor)

    return _with_rights(directory, remove)


def _remove_unused(
    directory: int, name: str | bytes, descriptor: int, *, is_own: bool = False
) -> bool:
    # This call first releases the shared lock, so the last one of several users succeeds.
    if not _lock(descriptor, fcntl.LOCK_EX):
        return False

    def remove() -> bool:
        try:
            if is_at(directory, name, descriptor) and _is_removable(
                directory, descriptor, is_own=is_own
            ):
                _remove_with_dead_claims(directory, name, descriptor)
        except PermissionError:
            raise
        except OSError as error:
            # A filled placeholder is left to the program that filled it.
            return error.errno == errno.ENOENT or error.errno in _NOT_EMPTY
        return True

    return _with_rights(directory, remove)


def _is_removable(directory: int, descriptor: int, *, is_own: bool) -> bool:
    """Whether this is a placeholder, and neither another user's nor forged by one.

    The owner of the directory is trusted: that user could remove it, too.
    """
    info = os.fstat(descriptor)
    trusted = is_own or info.st_uid in (os.geteuid(), 0, os.fstat(directory).st_uid)
    return trusted and is_placeholder(info, descriptor)


def _remove_with_dead_claims(directory: int, name: str | bytes, placeholder: int) -> None:
    """Remove a placeholder and the claims of servers that have ended; other claims keep it."""
    try:
        os.rmdir(name, dir_fd=directory)
    except OSError as error:
        if error.errno not in _NOT_EMPTY:
            raise
        for claim in os.listdir(placeholder):
            if claim.startswith(_CLAIM_PREFIX):
                descriptor = os.open(claim, _OPEN, dir_fd=placeholder)
                if _lock(descriptor, fcntl.LOCK_EX):
                    _remove_claim(placeholder, Claim(claim, descriptor))
                else:
                    os.close(descriptor)
        os.rmdir(name, dir_fd=directory)


def _remove_claim(placeholder: int, claim: Claim) -> None:
    with suppress(OSError):  # removed or filled by another program; the placeholder then stays
        os.rmdir(claim.name, dir_fd=placeholder)
    os.close(claim.descriptor)


def _with_rights(directory: int, act: Callable[[], bool]) -> bool:
    """Call `act`, with a closed directory opened meanwhile; False without the owner's rights."""
    try:
        return act()
    except PermissionError:
        pass
    for _ in range(_ATTEMPTS):  # another thread may close the directory again
        with _owner_rights(directory) as is_open:
            try:
                return act()
            except PermissionError:
                if not is_open:
                    break
    return False


@contextmanager
def _owner_rights(directory: int) -> Iterator[bool]:
    """Open a directory of this user to its owner meanwhile; False if that is not possible."""
    path = f"/proc/self/fd/{directory}"  # the descriptor may be O_PATH
    info = os.fstat(directory)
    mode = stat.S_IMODE(info.st_mode)
    open_mode = mode | stat.S_IRWXU
    is_open = info.st_uid == os.geteuid()
    if is_open and mode != open_mode:
        try:
            os.chmod(path, open_mode)
        except OSError:
            is_open = False  # no procfs, or a read-only file system
    try:
        yield is_open
    finally:
        if is_open and mode != open_mode == stat.S_IMODE(os.fstat(directory).st_mode):
            with suppress(OSError):  # an error of the disk
                os.chmod(path, mode)
