"""Many small files in one request: read or written one after another, without a sandbox.

A file that fails is only marked: the client repeats it with the method for one file, which has the
error. Blocking.
"""

from __future__ import annotations

import os
from typing import Final

from exec_server.errors import InvalidParams, RpcError
from exec_server.filesystem import safe_write
from exec_server.filesystem.operations import open_regular
from exec_server.protocol.files import (
    ReadFilesParams,
    ReadFilesResult,
    WriteFilesParams,
    WriteFilesResult,
)

# One request takes some milliseconds of a thread. The bytes are those of one message of a client
# that reads slowly.
MAX_FILES: Final = 256
MAX_BYTES: Final = 2 * 1_048_576


def read_files(params: ReadFilesParams) -> tuple[ReadFilesResult, bytes]:
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
    return ReadFilesResult(sizes), b"".join(contents)


def _read(path: str, limit: int) -> bytes | None:
    """The content of a file; None if it has more than `limit` bytes."""
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


def write_files(params: WriteFilesParams, data: bytes | memoryview) -> WriteFilesResult:
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
    return WriteFilesResult(failed)


def _check_count(count: int) -> None:
    if count > MAX_FILES:
        raise InvalidParams(f"a request names at most {MAX_FILES} files, not {count}")
