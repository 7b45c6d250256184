"""One blocking function per fs operation of the reference; `operation_table` lists all of them.

A function takes the params and returns the result, or raises RpcError or OSError. All of them
block, so none may be called on the event loop. Directory trees are in `tree`, operations that
follow no link in `nofollow`, reading and writing of content in `safe_write`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from typing import Final

from exec_server.errors import InternalError, InvalidParams, InvalidRequest
from exec_server.filesystem import nofollow, safe_write, tree
from exec_server.filesystem.path_guard import GUARD
from exec_server.printable import lossy
from exec_server.protocol import files
from exec_server.protocol.decoding import decode_base64
from exec_server.protocol.paths import path_to_uri

# The reference's limit: above it the request fails, because the response would be
# too large for a client.
READ_DIRECTORY_LIMIT: Final = 50_000

_OPEN_READ: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_DONE: Final = files.Done()


def read_file(params: files.ReadFileParams) -> files.ReadFileResult:
    """The content of a regular file; `open_for_read` needs less memory for a large one."""
    fd, size = open_for_read(params)
    try:
        with safe_write.INODE_LOCKS.acquire(os.fstat(fd)):
            return files.ReadFileResult(safe_write.read_all(fd, size))
    finally:
        os.close(fd)


def open_for_read(params: files.ReadFileParams) -> tuple[int, int]:
    """A descriptor of the file, which the caller closes, and its reported size.

    Files of procfs and the like report 0; only reading to the end finds their size.
    """
    path = params.path.native()
    if params.follow_symlinks is False:
        fd, info = nofollow.open_regular(path)
    else:
        fd, info = open_regular(path)
    if info.st_size > safe_write.READ_LIMIT:
        os.close(fd)
        raise safe_write.too_large_error()
    return fd, info.st_size


def open_regular(path: str) -> tuple[int, os.stat_result]:
    """Open a regular file for reading, refusing every other type; the caller closes it."""
    fd = os.open(path, _OPEN_READ)
    try:
        GUARD.check_opened(fd, writing=False)
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise not_a_file(path)
    except BaseException:
        os.close(fd)
        raise
    return fd, info


def not_a_file(path: str) -> InvalidRequest:
    """The error for a path that is not a regular file."""
    return InvalidRequest(f"path `{lossy(path)}` is not a file")


def write_file(params: files.WriteFileParams) -> files.Done:
    """Create a file or replace its content."""
    data = content_to_write(params)
    path = params.path.native()
    if params.follow_symlinks is False:
        nofollow.write(path, data)
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
        nofollow.create_directory(path, recursive=recursive)
    elif recursive:
        tree.make_directories(path)
    else:
        tree.make_directory(path)
    return _DONE


def get_metadata(params: files.GetMetadataParams) -> files.GetMetadataResult:
    """Type, size and times of the file or directory that the path leads to."""
    path = params.path.native()
    if params.follow_symlinks is False:
        return nofollow.metadata(path)
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
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        resolved = path_of(fd)
    finally:
        os.close(fd)
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
            nofollow.remove(path, recursive=recursive)
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
