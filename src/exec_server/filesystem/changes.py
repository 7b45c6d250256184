"""Changes of files and entries that the reference does not offer: append, rename, edit and others.

Every function blocks, takes the params of its call, and asks the guard like those in `operations`.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from exec_server.errors import InvalidParams
from exec_server.filesystem import safe_write, syscalls
from exec_server.filesystem.operations import not_a_file, open_regular
from exec_server.filesystem.patch_writer import PatchWriter
from exec_server.filesystem.path_guard import GUARD
from exec_server.patching.edits import Edit, apply_edits
from exec_server.patching.effort import Effort
from exec_server.patching.patch import FileChange, parse_patch, plan
from exec_server.protocol import files as wire
from exec_server.protocol.decoding import Base64
from exec_server.protocol.files import Done

# A text that is edited or patched is in memory many times: in several forms, of up to four bytes
# for each character.
TEXT_BYTES: Final = 8 * 1_048_576
# Files of one patch: a descriptor for each new one stays open until the end. Their old and new
# contents are in memory together.
PATCH_FILES: Final = 200
PATCH_BYTES: Final = 64 * 1_048_576

_PERMISSIONS: Final = 0o7777
_OPEN_APPEND: Final = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_OPEN_CHANGE: Final = os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_MILLISECOND_NS: Final = 1_000_000
_DONE: Final = Done()


def append(params: wire.AppendParams) -> wire.AppendResult:
    """Write at the end of a file, which is created if it is missing; other data is never lost."""
    path = params.path.native()
    data = Base64.from_wire(params.data_base64)
    with _opened_or_created(path, _OPEN_APPEND) as fd:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise not_a_file(path)
        with safe_write.INODE_LOCKS.acquire(info):
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            return wire.AppendResult(os.fstat(fd).st_size)


def rename(params: wire.RenameParams) -> Done:
    """Rename an entry within its file system, like rename(2); links are not followed."""
    source, destination = params.source_path.native(), params.destination_path.native()
    with (
        GUARD.removing(source) as (old_directory, old_name),
        GUARD.removing(destination) as (new_directory, new_name),
    ):
        if stat.S_ISDIR(os.lstat(old_name, dir_fd=old_directory).st_mode):
            GUARD.check_tree_rename(old_directory, old_name)
            GUARD.check_tree_rename(new_directory, new_name)
        if params.replace:
            os.rename(old_name, new_name, src_dir_fd=old_directory, dst_dir_fd=new_directory)
        else:
            syscalls.rename_without_replacing(old_directory, old_name, new_directory, new_name)
    return _DONE


def chmod(params: wire.ChmodParams) -> Done:
    """Set the permission bits of the file or directory that the path leads to."""
    if params.mode & ~_PERMISSIONS:
        raise InvalidParams(f"mode {params.mode:#o} has bits beyond {_PERMISSIONS:#o}")
    with _existing(params.path.native()) as (_, magic_path):
        os.chmod(magic_path, params.mode)
    return _DONE


def symlink(params: wire.SymlinkParams) -> Done:
    """Create a symbolic link; an existing entry is not replaced."""
    if not params.target or "\0" in params.target:
        raise InvalidParams("the target of a link must be a path")
    with GUARD.creating(params.path.native()) as (directory, name):
        os.symlink(params.target, name, dir_fd=directory)
    return _DONE


def set_times(params: wire.SetTimesParams) -> Done:
    """Set the times of a file or directory, as `touch` does."""
    path = params.path.native()
    if params.modified_ns >= _MILLISECOND_NS:
        raise InvalidParams(f"modifiedNs must be below {_MILLISECOND_NS}")
    if params.create and not os.path.exists(path):
        with suppress(FileExistsError, IsADirectoryError):
            os.close(safe_write.open_or_create(path, 0o666))
    now = time.time_ns()
    modified = now
    if params.modified_at_ms is not None:
        modified = params.modified_at_ms * _MILLISECOND_NS + params.modified_ns
    accessed = now if params.accessed_at_ms is None else params.accessed_at_ms * _MILLISECOND_NS
    with _existing(path) as (_, magic_path):
        os.utime(magic_path, ns=(accessed, modified))
    return _DONE


def edit(params: wire.EditParams) -> wire.EditResult:
    """Replace texts of a file: all of them, or none if one does not occur exactly once."""
    path = params.path.native()
    edits = [Edit(each.old_text, each.new_text, each.all) for each in params.edits]
    if not edits:
        raise InvalidParams("edits must not be empty")
    fd = os.open(path, _OPEN_CHANGE)
    try:
        GUARD.check_opened(fd, writing=True)
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise not_a_file(path)
        with safe_write.INODE_LOCKS.acquire(info):
            old = _read_text(fd, path).decode("utf-8", "surrogateescape")
            new, replacements = apply_edits(old, edits, Effort(time.thread_time))
            content = safe_write.BytesContent(new.encode("utf-8", "surrogateescape"))
            os.lseek(fd, 0, os.SEEK_SET)
            safe_write.overwrite_locked(fd, content, os.fstat(fd))
    finally:
        os.close(fd)
    return wire.EditResult(replacements)


def apply_patch(params: wire.ApplyPatchParams) -> wire.ApplyPatchResult:
    """Apply a patch to the files below a directory; if a write fails, earlier ones are undone."""
    root = params.path.native()
    if len(params.patch) > TEXT_BYTES:
        raise InvalidParams(f"the patch is larger than {TEXT_BYTES} characters: split it")
    files = parse_patch(params.patch)
    if len(files) > PATCH_FILES:
        raise InvalidParams(f"a patch may change at most {PATCH_FILES} files")
    os.close(os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))  # raises if it is missing
    changes = plan(files, root, _PatchReader().read, Effort(time.thread_time))
    with PatchWriter() as writer:
        for change in changes:
            writer.write(change)
        writer.keep()
    prefix = f"{os.path.normpath(root).rstrip('/')}/"
    return wire.ApplyPatchResult(
        [wire.ChangedFile(change.path.removeprefix(prefix), _kind(change)) for change in changes]
    )


class _PatchReader:
    """Reads the files that a patch changes, up to a limit for all of them."""

    def __init__(self) -> None:
        self._remaining = PATCH_BYTES

    def read(self, path: str) -> bytes | None:
        try:
            fd, _ = open_regular(path)
        except FileNotFoundError:
            return None
        try:
            data = _read_text(fd, path)
        finally:
            os.close(fd)
        self._remaining -= len(data)
        if self._remaining < 0:
            raise InvalidParams(f"the files of the patch are larger than {PATCH_BYTES} bytes")
        return data


def _kind(change: FileChange) -> wire.ChangeKind:
    if change.old is None:
        return "added"
    return "deleted" if change.new is None else "modified"


def _read_text(fd: int, path: str) -> bytes:
    size = os.fstat(fd).st_size
    if size > TEXT_BYTES:
        raise InvalidParams(
            f"{path} is larger than {TEXT_BYTES} bytes: too large to edit or patch; "
            "write the whole file, or append to it"
        )
    return safe_write.read_all(fd, size)


@contextmanager
def _existing(path: str) -> Iterator[tuple[int, str]]:
    """An O_PATH descriptor that may be changed, and a path for calls that take no descriptor."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        GUARD.check_opened(fd, writing=True)
        magic_path = f"/proc/self/fd/{fd}"
        yield fd, magic_path if os.path.exists(magic_path) else path
    finally:
        os.close(fd)


@contextmanager
def _opened_or_created(path: str, flags: int) -> Iterator[int]:
    """A descriptor of the file that the path leads to; a missing file is created."""
    try:
        fd = os.open(path, flags)
    except FileNotFoundError:
        os.close(safe_write.open_or_create(path, 0o666))
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a FIFO without a reader, a socket
            raise not_a_file(path) from None
        raise
    try:
        GUARD.check_opened(fd, writing=True)
        yield fd
    finally:
        os.close(fd)
