"""One blocking function per fs operation; OPERATIONS lists those that threads and workers perform.

A function takes the params and returns the result, or raises RpcError or OSError.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, Final

from exec_server.errors import InternalError, InvalidParams, InvalidRequest, RpcError, lossy
from exec_server.filesystem import safe_write, syscalls, tree, walk
from exec_server.filesystem.safe_write import GUARD
from exec_server.filesystem.syscalls import opened
from exec_server.protocol import files
from exec_server.protocol.decoding import Base64, Call, decode_base64
from exec_server.protocol.paths import path_to_uri

# The reference's limit: above it the request fails, because the response would be
# too large for a client.
READ_DIRECTORY_LIMIT: Final = 50_000
# One request takes some milliseconds of a thread. The bytes are those of one message of a client
# that reads slowly.
MAX_FILES: Final = 256
MAX_BYTES: Final = 2 * 1_048_576

_READ: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_DIRECTORY: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_DONE: Final = files.Done()

Operation = Callable[[Any], Any]


def read_file(params: files.ReadFileParams) -> files.ReadFileResult:
    """The content of a regular file; `open_for_read` needs less memory for a large one."""
    fd, size = open_for_read(params)
    try:
        with safe_write.INODE_LOCKS.acquire(os.fstat(fd)):
            return files.ReadFileResult(safe_write.read_all(fd, size))
    finally:
        os.close(fd)


def open_for_read(params: files.ReadFileParams) -> tuple[int, int]:
    """A descriptor, which the caller closes, and the reported size, 0 for procfs and the like."""
    path = params.path.native()
    opener = _open_regular_nofollow if params.follow_symlinks is False else open_regular
    fd, info = opener(path)
    if info.st_size > safe_write.READ_LIMIT:
        os.close(fd)
        raise safe_write.too_large_error()
    return fd, info.st_size


def open_regular(path: str) -> tuple[int, os.stat_result]:
    """Open a regular file for reading, refusing every other type; the caller closes it."""
    fd = os.open(path, _READ)
    try:
        return fd, check_regular(fd, path, writing=False)
    except BaseException:
        os.close(fd)
        raise


def check_regular(fd: int, path: str, *, writing: bool) -> os.stat_result:
    """The status of an open file; raises unless it is a regular file that the guard allows."""
    GUARD.check_opened(fd, writing=writing)
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        raise not_a_file(path)
    return info


def not_a_file(path: str) -> InvalidRequest:
    """The error for a path that is not a regular file."""
    return InvalidRequest(f"path `{lossy(path)}` is not a file")


def write_file(params: files.WriteFileParams) -> files.Done:
    """Create a file or replace its content."""
    data = content_to_write(params)
    path = params.path.native()
    if params.follow_symlinks is False:
        with _parent(path) as (directory, name):
            safe_write.write_entry(directory, name, data)
    else:
        safe_write.write(path, data)
    return _DONE


def content_to_write(params: files.WriteFileParams) -> safe_write.BytesContent:
    """The content that a request brings; raises InvalidRequest if it is not base64."""
    try:
        return safe_write.BytesContent(decode_base64(params.data_base64))
    except InvalidParams as error:
        reason = f"fs/writeFile requires valid base64 dataBase64: {error}"
        raise InvalidRequest(reason) from None


def create_directory(params: files.CreateDirectoryParams) -> files.Done:
    """Create a directory, with its parents if `recursive`."""
    path = params.path.native()
    recursive = params.recursive is not False
    if params.follow_symlinks is False:
        _create_directory_nofollow(path, recursive=recursive)
    elif recursive:
        tree.make_directories(path)
    else:
        tree.make_directory(path)
    return _DONE


def get_metadata(params: files.GetMetadataParams) -> files.GetMetadataResult:
    """Type, size and times of the file or directory that the path leads to."""
    path = params.path.native()
    if params.follow_symlinks is False:
        return _metadata_nofollow(path)
    GUARD.check_readable(path)
    info = os.lstat(path)
    if stat.S_ISLNK(info.st_mode):
        return metadata_result(os.stat(path), is_symlink=True)
    return metadata_result(info, is_symlink=False)


def metadata_result(info: os.stat_result, *, is_symlink: bool) -> files.GetMetadataResult:
    """The result for a path whose links are followed; like the reference, without a birth time."""
    kind = info.st_mode & 0o170000
    return files.GetMetadataResult(
        kind == stat.S_IFDIR,
        kind == stat.S_IFREG,
        is_symlink,
        info.st_size,
        0,
        max(info.st_mtime_ns // 1_000_000, 0),
    )


def canonicalize(params: files.CanonicalizeParams) -> files.CanonicalizeResult:
    """The path with all links resolved."""
    path = params.path.native()
    with opened(path, os.O_PATH) as fd:
        resolved = path_of(fd)
    return files.CanonicalizeResult(path_to_uri(resolved or os.path.realpath(path, strict=True)))


def path_of(fd: int) -> str | None:
    """The path of an open file according to the kernel; None if that is not certain."""
    try:
        path = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return None
    # The kernel appends this to the path of a removed file, but a name may end so as well.
    return path if path[:1] == "/" and not path.endswith(" (deleted)") else None


def read_directory(params: files.ReadDirectoryParams) -> files.ReadDirectoryResult:
    """The entries of a directory, unordered; a link has the type of its target."""
    path = params.path.native()
    GUARD.check_readable(path)
    with os.scandir(path) as scan:
        return listing(scan, _target_mode)


def _target_mode(entry: os.DirEntry[str]) -> int | None:
    try:
        return entry.stat().st_mode
    except OSError:
        return None


def listing(
    scan: Iterable[os.DirEntry[str]], target_mode: Callable[[os.DirEntry[str]], int | None]
) -> files.ReadDirectoryResult:
    """The result for these entries; `target_mode` follows a link and returns None if it dangles."""
    entries = []
    count = 0
    for entry in scan:
        if entry.is_symlink():
            mode = target_mode(entry)
            if mode is None:
                continue  # dangling links are not listed
            is_directory, is_file = stat.S_ISDIR(mode), stat.S_ISREG(mode)
        else:
            is_directory = entry.is_dir(follow_symlinks=False)
            is_file = not is_directory and entry.is_file(follow_symlinks=False)
        count += 1
        if count <= READ_DIRECTORY_LIMIT:
            entries.append(files.DirectoryEntry(lossy(entry.name), is_directory, is_file))
    if count > READ_DIRECTORY_LIMIT:
        raise InternalError(
            f"fs/readDirectory returned {count} entries; limit is {READ_DIRECTORY_LIMIT}"
        )
    return files.ReadDirectoryResult(entries)


def remove(params: files.RemoveParams) -> files.Done:
    """Remove a file, a link or a directory; with `force` a missing path is no error."""
    path = params.path.native()
    recursive = params.recursive is not False
    try:
        if params.follow_symlinks is False:
            _remove_nofollow(path, recursive=recursive)
        elif path == "/":
            # The reference would begin to delete everything.
            raise InvalidRequest("path must name an entry")
        elif not stat.S_ISDIR(os.lstat(path).st_mode):
            with GUARD.removing(path) as (directory, name):
                os.unlink(name, dir_fd=directory)
        elif recursive:
            tree.remove_tree(path)
        else:
            with GUARD.removing(path) as (directory, name):
                os.rmdir(name, dir_fd=directory)
    except FileNotFoundError:
        if params.force is False:
            raise
    return _DONE


# `followSymlinks: false`: paths are opened component by component, so a link that is put in the way
# meanwhile is refused as well. A link before the last component is ENOTDIR.
def _open_regular_nofollow(path: str) -> tuple[int, os.stat_result]:
    with _parent(path) as (directory, name):
        fd = os.open(name, _READ | os.O_NOFOLLOW, dir_fd=directory)
    try:
        GUARD.check_opened(fd, writing=False)
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise InvalidRequest("path is not a regular file")
    except BaseException:
        os.close(fd)
        raise
    return fd, info


def _create_directory_nofollow(path: str, *, recursive: bool) -> None:
    if not recursive:
        if path == "/":
            raise InternalError("directory already exists")
        with _parent(path) as (directory, name):
            GUARD.check_creation(directory, name)
            os.mkdir(name, dir_fd=directory)
        return
    with _descend(path.split("/")[1:] if path != "/" else [], create=True):
        pass


def _metadata_nofollow(path: str) -> files.GetMetadataResult:
    """The result with the birth time, where the file system keeps it."""
    if path == "/":
        with opened("/", _DIRECTORY) as directory:
            status = syscalls.statx(directory, "")
    else:
        with _parent(path) as (directory, name):
            GUARD.check_opened(directory, writing=False)
            status = syscalls.statx(directory, name)
    if stat.S_ISLNK(status.mode):
        raise InvalidRequest("path contains a symbolic link")
    return files.GetMetadataResult(
        stat.S_ISDIR(status.mode),
        stat.S_ISREG(status.mode),
        False,
        status.size,
        status.created_ms,
        status.modified_ms,
    )


def _remove_nofollow(path: str, *, recursive: bool) -> None:
    if recursive:
        raise InternalError("recursive no-follow removal is unsupported")
    with _parent(path) as (directory, name):
        GUARD.check_removal(directory, name)
        mode = os.lstat(name, dir_fd=directory).st_mode
        if stat.S_ISLNK(mode):
            raise InvalidRequest("path contains a symbolic link")
        if stat.S_ISDIR(mode):
            os.rmdir(name, dir_fd=directory)
        else:
            os.unlink(name, dir_fd=directory)


@contextmanager
def _parent(path: str) -> Iterator[tuple[int, str]]:
    """The open directory of the path's last component, and that component."""
    if path == "/":
        raise InvalidRequest("path must name an entry")
    *parents, last = path.split("/")[1:]
    with _descend(parents) as directory:
        yield directory, last


@contextmanager
def _descend(names: Sequence[str], *, create: bool = False) -> Iterator[int]:
    """The open directory below `/` with these names; with `create` missing ones are created."""
    directory = os.open("/", _DIRECTORY)
    try:
        for name in names:
            try:
                child = os.open(name, _DIRECTORY, dir_fd=directory)
            except FileNotFoundError:
                if not create:
                    raise
                GUARD.check_creation(directory, name)
                with suppress(FileExistsError):  # the next call tells whether it is a directory
                    os.mkdir(name, dir_fd=directory)
                child = os.open(name, _DIRECTORY, dir_fd=directory)
            os.close(directory)
            directory = child
        yield directory
    finally:
        os.close(directory)


# Further operations, which the reference does not offer.
def list_(params: files.ListParams) -> files.ListResult:
    """The entries of a directory, unordered, also links that lead nowhere."""
    path = params.path.native()
    GUARD.check_readable(path)
    entries: list[files.ListedEntry] = []
    owners = _Owners() if params.owners else None
    with os.scandir(path) as scan:
        for entry in scan:
            listed = _listed(entry, owners)
            if listed is None:
                continue
            if len(entries) == READ_DIRECTORY_LIMIT:
                raise InternalError(f"fs/list: more than {READ_DIRECTORY_LIMIT} entries")
            entries.append(listed)
    return files.ListResult(entries)


class _Owners:
    """The names of users and groups, each looked up once for a listing."""

    def __init__(self) -> None:
        self._users: dict[int, str] = {}
        self._groups: dict[int, str] = {}

    def names(self, info: os.stat_result) -> tuple[str, str]:
        """The names of owner and group, or their numbers."""
        if (user := self._users.get(info.st_uid)) is None:
            try:
                user = lossy(pwd.getpwuid(info.st_uid).pw_name)
            except KeyError:
                user = str(info.st_uid)
            self._users[info.st_uid] = user
        if (group := self._groups.get(info.st_gid)) is None:
            try:
                group = lossy(grp.getgrgid(info.st_gid).gr_name)
            except KeyError:
                group = str(info.st_gid)
            self._groups[info.st_gid] = group
        return user, group


def _listed(entry: os.DirEntry[str], owners: _Owners | None) -> files.ListedEntry | None:
    try:
        info = entry.stat(follow_symlinks=False)
        names = (None, None) if owners is None else owners.names(info)
        target = None
        if stat.S_ISLNK(info.st_mode):
            target = lossy(os.readlink(entry.path))
            info = _target(entry.path) or info
    except FileNotFoundError:
        return None
    kind = stat.S_IFMT(info.st_mode)
    return files.ListedEntry(
        lossy(entry.name),
        kind == stat.S_IFDIR,
        kind == stat.S_IFREG,
        info.st_size,
        info.st_mtime_ns // 1_000_000,
        stat.S_IMODE(info.st_mode),
        target,
        *names,
    )


def _target(path: str) -> os.stat_result | None:
    """The metadata of the target of a link; None if it is missing, or may not be seen."""
    try:
        GUARD.check_readable(path)
        return os.stat(path)
    except OSError:
        return None


def create(params: files.CreateParams) -> files.Done:
    """Create a file that must not exist, complete or not at all; links are not followed."""
    content = safe_write.BytesContent(Base64.from_wire(params.data_base64))
    if not safe_write.create(params.path.native(), content):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    return _DONE


def resolve(params: files.ResolveParams) -> files.CanonicalizeResult:
    """The path with all links resolved as far as it exists; a loop stays as it is."""
    return files.CanonicalizeResult(path_to_uri(os.path.realpath(params.path.native())))


# A file that fails is only marked: the client repeats it with the method for one, which has the
# error.
def read_files(params: files.ReadFilesParams) -> tuple[files.ReadFilesResult, bytes]:
    """The contents of regular files, as far as they fit into MAX_BYTES."""
    _check_count(len(params.paths))
    sizes: list[int | None] = []
    contents = []
    space = MAX_BYTES
    for path in params.paths:
        try:
            data = _read(path.native(), space)
        except (OSError, RpcError):
            data = None
        sizes.append(None if data is None else len(data))
        if data is not None:
            contents.append(data)
            space -= len(data)
    return files.ReadFilesResult(sizes), b"".join(contents)


def _read(path: str, limit: int) -> bytes | None:
    descriptor, info = open_regular(path)
    try:
        if info.st_size > limit:
            return None
        with safe_write.INODE_LOCKS.acquire(info):
            # A buffer of `limit` bytes for each file would be mapped and unmapped by the kernel.
            data = os.read(descriptor, info.st_size + 1)
            # Files of procfs and the like report 0, and one read may return a part of them.
            return data if len(data) == info.st_size else None
    finally:
        os.close(descriptor)


def write_files(params: files.WriteFilesParams, data: bytes | memoryview) -> files.WriteFilesResult:
    """Create files, or replace their contents."""
    _check_count(len(params.files))
    if sum(file.size for file in params.files) != len(data) or len(data) > MAX_BYTES:
        raise InvalidParams(
            f"the sizes of files must add up to the data, {MAX_BYTES} bytes at most"
        )
    view = memoryview(data)
    failed = []
    for position, file in enumerate(params.files):
        content, view = view[: file.size], view[file.size :]
        try:
            path = file.path.native()
            mode = None if file.mode is None else file.mode & 0o7777
            safe_write.write(path, safe_write.BytesContent(bytes(content)), mode=mode)
        except (OSError, RpcError):
            failed.append(position)
    return files.WriteFilesResult(failed)


def _check_count(count: int) -> None:
    if count > MAX_FILES:
        raise InvalidParams(f"a request names at most {MAX_FILES} files, not {count}")


# Handles and watches are not listed, because they belong to a connection. Large extensions are
# imported by the thread that first needs them, or by `load_all`.
class OnDemand:
    """A function of a module of this package, which is imported by the first call."""

    def __init__(self, module: str, name: str) -> None:
        self._module = f"exec_server.filesystem.{module}"
        self._name = name

    def load(self) -> Operation:
        function: Operation = getattr(import_module(self._module), self._name)
        return function

    def __call__(self, params: object) -> object:
        return self.load()(params)


OPERATIONS: Final[dict[Call[Any, Any], Operation]] = {
    files.READ_FILE: read_file,
    files.WRITE_FILE: write_file,
    files.CREATE_DIRECTORY: create_directory,
    files.GET_METADATA: get_metadata,
    files.CANONICALIZE: canonicalize,
    files.READ_DIRECTORY: read_directory,
    files.WALK: walk.walk,
    files.REMOVE: remove,
    files.COPY: tree.copy,
    files.APPEND: OnDemand("changes", "append"),
    files.RENAME: OnDemand("changes", "rename"),
    files.CHMOD: OnDemand("changes", "chmod"),
    files.SYMLINK: OnDemand("changes", "symlink"),
    files.SET_TIMES: OnDemand("changes", "set_times"),
    files.EDIT: OnDemand("changes", "edit"),
    files.APPLY_PATCH: OnDemand("changes", "apply_patch"),
    files.GLOB: OnDemand("search", "glob"),
    files.GREP: OnDemand("search", "grep"),
    files.DISK_USAGE: OnDemand("search", "disk_usage"),
    files.LIST: list_,
    files.CREATE: create,
    files.RESOLVE: resolve,
}


def load_all() -> None:
    """Import the modules of all operations: processes that are forked later share them."""
    for operation in OPERATIONS.values():
        if isinstance(operation, OnDemand):
            operation.load()
