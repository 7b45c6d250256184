"""fs/list, fs/create and fs/resolve: details of entries, new files, and paths that need not exist.

Every function blocks, takes the params of its call, and asks the guard like those in `operations`.
"""

from __future__ import annotations

import errno
import os
import stat

from exec_server.errors import InternalError
from exec_server.filesystem import safe_write
from exec_server.filesystem.operations import READ_DIRECTORY_LIMIT
from exec_server.filesystem.path_guard import GUARD
from exec_server.printable import lossy
from exec_server.protocol import files as wire
from exec_server.protocol.decoding import Base64
from exec_server.protocol.files import CanonicalizeResult, Done
from exec_server.protocol.paths import path_to_uri


def list_(params: wire.ListParams) -> wire.ListResult:
    """The entries of a directory, unordered, also links that lead nowhere."""
    path = params.path.native()
    GUARD.check_readable(path)
    entries: list[wire.ListedEntry] = []
    with os.scandir(path) as scan:
        for entry in scan:
            listed = _listed(entry)
            if listed is None:
                continue
            if len(entries) == READ_DIRECTORY_LIMIT:
                raise InternalError(f"fs/list: more than {READ_DIRECTORY_LIMIT} entries")
            entries.append(listed)
    return wire.ListResult(entries)


def _listed(entry: os.DirEntry[str]) -> wire.ListedEntry | None:
    """The details of an entry; None if it was removed meanwhile."""
    try:
        info = entry.stat(follow_symlinks=False)
        target = None
        if stat.S_ISLNK(info.st_mode):
            target = lossy(os.readlink(entry.path))
            info = _target(entry.path) or info
    except FileNotFoundError:
        return None
    kind = stat.S_IFMT(info.st_mode)
    return wire.ListedEntry(
        lossy(entry.name),
        kind == stat.S_IFDIR,
        kind == stat.S_IFREG,
        info.st_size,
        info.st_mtime_ns // 1_000_000,
        stat.S_IMODE(info.st_mode),
        target,
    )


def _target(path: str) -> os.stat_result | None:
    """The metadata of the target of a link; None if it is missing, or may not be seen."""
    try:
        GUARD.check_readable(path)
        return os.stat(path)
    except OSError:
        return None


def create(params: wire.CreateParams) -> Done:
    """Create a file that must not exist, complete or not at all; links are not followed."""
    content = safe_write.BytesContent(Base64.from_wire(params.data_base64))
    if not safe_write.create(params.path.native(), content):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    return Done()


def resolve(params: wire.ResolveParams) -> CanonicalizeResult:
    """The path with all links resolved as far as it exists; a loop stays as it is."""
    return CanonicalizeResult(path_to_uri(os.path.realpath(params.path.native())))
