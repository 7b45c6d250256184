"""Changes of files that the reference lacks: append, rename, edit and others; like `operations`."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, Self

from exec_server.errors import InvalidParams, PatchDoesNotApply
from exec_server.filesystem import safe_write, syscalls
from exec_server.filesystem.operations import check_regular, not_a_file, open_regular
from exec_server.filesystem.safe_write import GUARD
from exec_server.filesystem.syscalls import opened
from exec_server.patching.edits import Edit, apply_edits
from exec_server.patching.hunks import Effort
from exec_server.patching.patch import PatchedFile, parse_patch, plan
from exec_server.protocol import files as wire
from exec_server.protocol.decoding import Base64
from exec_server.protocol.files import Done

# New directories of one patch: a descriptor for each one stays open until the end, and descriptors
# are shared by all clients of the server.
PATCH_DIRECTORIES: Final = 256

_DIRECTORY: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_ENTRY: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC

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


class PatchWriter:
    """The changes of one patch, for `with`; leaving without `keep` undoes them.

    Confined commands may rename directories and put links in their place at any moment. So entries
    are made and removed through descriptors of their directories, and removed only if still the
    same.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._descriptors: list[int] = []
        self._modes: dict[str, int] = {}  # of the files that were removed
        self._new_directories = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for undo in reversed(self._undo):
            with suppress(OSError):
                undo()
        for descriptor in self._descriptors:
            os.close(descriptor)

    def keep(self) -> None:
        """Keep all changes."""
        self._undo.clear()

    def write(self, change: PatchedFile) -> None:
        """Change one file."""
        if change.new is None:
            self._remove(change)
            return
        mode, origin = change.mode, change.renamed_from
        if mode is None and origin is not None:
            mode = self._modes[origin] if origin in self._modes else _permissions(origin)
        if change.old is None:
            self._add(change.path, change.new, mode)
        else:
            self._overwrite(change.path, change.old, change.new, mode)

    def _overwrite(self, path: str, old: bytes, new: bytes, mode: int | None) -> None:
        old_mode = stat.S_IMODE(os.stat(path).st_mode)
        content = safe_write.BytesContent(old)
        self._undo.append(lambda: safe_write.write(path, content, mode=old_mode))
        safe_write.write(path, safe_write.BytesContent(new), mode=mode)

    def _remove(self, change: PatchedFile) -> None:
        path, old = change.path, change.old
        assert old is not None
        info = os.lstat(path)
        target = os.readlink(path) if stat.S_ISLNK(info.st_mode) else None
        self._modes[path] = _permissions(path)
        with GUARD.removing(path) as (directory, name):
            os.unlink(name, dir_fd=directory)
        mode = stat.S_IMODE(info.st_mode)
        if target is None:
            content = safe_write.BytesContent(old)
            self._undo.append(lambda: safe_write.write(path, content, mode=mode))
        else:
            self._undo.append(lambda: _symlink(path, target))

    def _add(self, path: str, new: bytes, mode: int | None) -> None:
        parent, name = os.path.split(path)
        self._make_directories(parent)
        directory = self._open(parent)
        if _status(directory, name) is not None:
            raise PatchDoesNotApply(
                f"{path} is a link that leads nowhere, or was created meanwhile"
            )
        safe_write.write_entry(directory, name, safe_write.BytesContent(new))
        self._undo_creation(directory, name)
        if mode is not None:
            _set_mode(directory, name, mode)

    def _make_directories(self, path: str) -> None:
        missing: list[str] = []
        while not os.path.lexists(path):
            missing.append(path)
            self._new_directories += 1
            if self._new_directories > PATCH_DIRECTORIES:
                raise PatchDoesNotApply(
                    f"a patch may create at most {PATCH_DIRECTORIES} directories: "
                    "create them first, or split the patch"
                )
            path = os.path.dirname(path)
        for each in reversed(missing):
            parent, name = os.path.split(each)
            directory = self._open(parent)
            GUARD.check_creation(directory, name)
            os.mkdir(name, dir_fd=directory)
            self._undo_creation(directory, name)

    def _undo_creation(self, directory: int, name: str) -> None:
        """Let `__exit__` remove an entry, if it is still the one that was made."""
        created = _status(directory, name)
        if created is not None:
            self._undo.append(lambda: _remove_created(directory, name, created))

    def _open(self, path: str) -> int:
        descriptor = os.open(path, _DIRECTORY)
        self._descriptors.append(descriptor)
        return descriptor


def _permissions(path: str) -> int:
    """The bits that a renamed file keeps: its owner may be another one, so not set-user-ID."""
    return stat.S_IMODE(os.stat(path).st_mode) & 0o777


def _status(directory: int, name: str) -> os.stat_result | None:
    try:
        return os.lstat(name, dir_fd=directory)
    except FileNotFoundError:
        return None


def _remove_created(directory: int, name: str, created: os.stat_result) -> None:
    status = _status(directory, name)
    if status is None or not os.path.samestat(status, created):
        return
    GUARD.check_removal(directory, name)
    if stat.S_ISDIR(status.st_mode):
        os.rmdir(name, dir_fd=directory)
    else:
        os.unlink(name, dir_fd=directory)


def _symlink(path: str, target: str) -> None:
    with GUARD.creating(path) as (directory, name):
        os.symlink(target, name, dir_fd=directory)


def _set_mode(directory: int, name: str, mode: int) -> None:
    with opened(name, _ENTRY, directory) as descriptor:
        GUARD.check_opened(descriptor, writing=True)
        os.fchmod(descriptor, mode)


def append(params: wire.AppendParams) -> wire.AppendResult:
    """Write at the end of a file, which is created if it is missing; other data is never lost."""
    path = params.path.native()
    data = Base64.from_wire(params.data_base64)
    with (
        _opened_or_created(path, _OPEN_APPEND) as fd,
        safe_write.INODE_LOCKS.acquire(check_regular(fd, path, writing=True)),
    ):
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
    with _existing(params.path.native()) as path:
        os.chmod(path, params.mode)
    return _DONE


def symlink(params: wire.SymlinkParams) -> Done:
    """Create a symbolic link; an existing entry is not replaced."""
    if not params.target or "\0" in params.target:
        raise InvalidParams("the target of a link must be a path")
    _symlink(params.path.native(), params.target)
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
    with _existing(path) as opened_path:
        os.utime(opened_path, ns=(accessed, modified))
    return _DONE


def edit(params: wire.EditParams) -> wire.EditResult:
    """Replace texts of a file: all of them, or none if one does not occur exactly once."""
    path = params.path.native()
    edits = [Edit(each.old_text, each.new_text, each.all) for each in params.edits]
    if not edits:
        raise InvalidParams("edits must not be empty")
    with (
        opened(path, _OPEN_CHANGE) as fd,
        safe_write.INODE_LOCKS.acquire(check_regular(fd, path, writing=True)),
    ):
        old = _read_text(fd, path).decode("utf-8", "surrogateescape")
        new, replacements = apply_edits(old, edits, Effort(time.thread_time))
        content = safe_write.BytesContent(new.encode("utf-8", "surrogateescape"))
        os.lseek(fd, 0, os.SEEK_SET)
        safe_write.overwrite_locked(fd, content, os.fstat(fd))
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


def _kind(change: PatchedFile) -> wire.ChangeKind:
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
def _existing(path: str) -> Iterator[str]:
    """A path of the opened file or directory, which the guard allows to change."""
    with opened(path, os.O_PATH) as fd:
        GUARD.check_opened(fd, writing=True)
        magic_path = f"/proc/self/fd/{fd}"
        yield magic_path if os.path.exists(magic_path) else path


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
        yield fd
    finally:
        os.close(fd)
