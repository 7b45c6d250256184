"""ExecServerFileSystem: files of a machine for fsspec, with the protocol `exec-server://`.

`exec-server:///path` is on the machine of the storage options, `exec-server://HOST:PORT/path` on
`ws://HOST:PORT`.
"""

from __future__ import annotations

import errno
import os
import threading
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlsplit

from exec_server.adapters.target import (
    configured_files,
    framework_missing,
    open_environment,
    unreachable_as,
)
from exec_server.client.arguments import AnySandbox
from exec_server.client.connect import ConnectOptions
from exec_server.client.exceptions import CrossDevice
from exec_server.client.results import Entry
from exec_server.sync import Environment
from exec_server.sync.files import Files, FileWriter

try:
    from fsspec.callbacks import DEFAULT_CALLBACK
    from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
    from fsspec.utils import isfilelike
except ImportError as error:
    raise framework_missing("fsspec", "fsspec", error) from error

_PROTOCOL: Final = "exec-server"
# The options that fsspec itself gives a file system; any other one is a mistake, and a misspelled
# `target` or `sandbox` must not end in files of the wrong machine, or in unconfined ones.
_FSSPEC_OPTIONS: Final = frozenset(
    {
        "asynchronous",
        "batch_size",
        "listings_expiry_time",
        "loop",
        "max_paths",
        "skip_instance_cache",
        "use_listings_cache",
    }
)


# Users of fsspec expect an OSError.
_reaching = unreachable_as(ConnectionError)


class ExecServerFileSystem(AbstractFileSystem):
    """The files of a machine; it connects at first use, and `close` ends the connection.

    Without `target` and `registry` it is this machine, through a server of its own.
    """

    protocol = _PROTOCOL
    root_marker = "/"

    def __init__(
        self,
        target: str | None = None,
        *,
        sandbox: AnySandbox | None = None,
        user: str | None = None,
        storage_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """`sandbox` confines every operation, `user` is the user of the files.

        The rest are options of fsspec and of `connect`; others raise TypeError.
        """
        if sandbox is not None and user is not None:
            raise ValueError("user and sandbox exclude each other")
        names = ConnectOptions.__annotations__
        connecting: Any = {"reconnect": True}
        connecting |= {name: options.pop(name) for name in list(options) if name in names}
        options |= storage_options or {}
        if unknown := sorted(options.keys() - _FSSPEC_OPTIONS):
            raise TypeError(f"exec-server has no option {', '.join(unknown)}")
        super().__init__(**options)
        self._target = target
        self._sandbox = sandbox
        self._user = user
        self._connecting: ConnectOptions = connecting
        self._lock = threading.Lock()  # guards the environment
        self._environment: Environment | None = None

    @property
    def files(self) -> Files:
        """The files of the client; connects at first use."""
        with self._lock:
            if self._environment is None:
                self._environment = open_environment(self._target, self._connecting)
            return configured_files(self._environment.files, self._user, self._sandbox)

    def close(self) -> None:
        """End the connection; the next use makes a new one."""
        with self._lock:
            environment, self._environment = self._environment, None
        if environment is not None:
            environment.close()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        text = os.fspath(path)
        if text.startswith(f"{_PROTOCOL}://"):
            text = "/" + text.removeprefix(f"{_PROTOCOL}://").partition("/")[2]
        return text.rstrip("/") or cls.root_marker

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        place = urlsplit(path).netloc if path.startswith(f"{_PROTOCOL}://") else ""
        return {"target": f"ws://{place}"} if place else {}

    @_reaching
    def info(self, path: Any, **_: Any) -> dict[str, Any]:
        name = self._strip_protocol(path)
        found = self.files.stat(name)
        kind = "directory" if found.is_directory else "file" if found.is_file else "other"
        return {
            "name": name,
            "size": found.size,
            "type": kind,
            "mtime": found.modified,
            "islink": found.is_symlink,
        }

    @_reaching
    def ls(self, path: Any, detail: bool = True, **_: Any) -> list[Any]:
        name = self._strip_protocol(path)
        try:
            entries = [_details(entry) for entry in self.files.list(name)]
        except NotADirectoryError:
            entries = [self.info(name)]
        return entries if detail else [entry["name"] for entry in entries]

    @_reaching
    def modified(self, path: Any) -> datetime:
        return datetime.fromtimestamp(self.files.stat(self._strip_protocol(path)).modified, UTC)

    @_reaching
    def created(self, path: Any) -> datetime:
        name = self.files.realpath(self._strip_protocol(path))
        created = self.files.stat(name, follow_links=False).created
        if created is None:
            raise NotImplementedError("the file system keeps no time of creation")
        return datetime.fromtimestamp(created, UTC)

    @_reaching
    def mkdir(self, path: Any, create_parents: bool = True, **_: Any) -> None:
        self.files.mkdir(self._strip_protocol(path), parents=create_parents)

    @_reaching
    def makedirs(self, path: Any, exist_ok: bool = False) -> None:
        self.files.mkdir(self._strip_protocol(path), parents=True, exist_ok=exist_ok)

    @_reaching
    def rmdir(self, path: Any) -> None:
        name = self._strip_protocol(path)
        if not self.files.stat(name).is_directory:
            raise NotADirectoryError(name)
        self.files.remove(name)

    @_reaching
    def rm_file(self, path: Any) -> None:
        self.files.remove(self._strip_protocol(path))

    def _rm(self, path: Any) -> None:
        self.rm_file(path)

    @_reaching
    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        if maxdepth is not None:
            super().rm(path, recursive=recursive, maxdepth=maxdepth)
            return
        for each in self.expand_path(path):
            self.files.remove(each, recursive=recursive)

    @_reaching
    def cp_file(self, path1: Any, path2: Any, **_: Any) -> None:
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        if self.files.stat(source).is_directory:
            self.makedirs(target, exist_ok=True)
            return
        self.makedirs(self._parent(target), exist_ok=True)
        self.files.copy(self.files.realpath(source), target)

    @_reaching
    def mv(self, path1: Any, path2: Any, *arguments: Any, **options: Any) -> None:
        if isinstance(path1, str) and isinstance(path2, str) and self.exists(path1):
            source, target = self._strip_protocol(path1), self._strip_protocol(path2)
            if path2.endswith("/") or self.isdir(target):
                target = f"{target.rstrip('/')}/{source.rpartition('/')[2]}"
            try:
                self._rename(source, target)
            except CrossDevice:
                path2 = target
            else:
                return
        super().mv(path1, path2, *arguments, **options)

    def _rename(self, source: str, target: str) -> None:
        """Rename, and make the directory of the target if it is missing, as a copy would."""
        try:
            self.files.rename(source, target)
        except FileNotFoundError:
            self.makedirs(self._parent(target), exist_ok=True)
            self.files.rename(source, target)

    @_reaching
    def touch(self, path: Any, truncate: bool = True, **_: Any) -> None:
        name = self._strip_protocol(path)
        if truncate:
            self.files.write(name, b"", parents=True)
        else:
            self.files.touch(name)

    @_reaching
    def cat_file(
        self, path: Any, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        name = self._strip_protocol(path)
        if start is None and end is None:
            return self.files.read(name)
        size = self.files.stat(name).size
        first = _position(start, 0, size)
        return _read_range(self.files, name, first, _position(end, size, size))

    @_reaching
    def pipe_file(self, path: Any, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        self.files.write(
            self._strip_protocol(path), value, parents=True, exclusive=mode == "create"
        )

    @_reaching
    def get_file(
        self,
        rpath: Any,
        lpath: Any = None,
        callback: Any = DEFAULT_CALLBACK,
        outfile: Any = None,
        **_: Any,
    ) -> None:
        name = self._strip_protocol(rpath)
        if outfile is None and not isfilelike(lpath):
            if self.isdir(name):
                os.makedirs(lpath, exist_ok=True)
                return
            os.makedirs(os.path.dirname(os.path.abspath(lpath)), exist_ok=True)
            with open(lpath, "wb") as opened:
                self._copy_to(name, opened, callback)
            return
        self._copy_to(name, lpath if outfile is None else outfile, callback)

    def _copy_to(self, name: str, file: Any, callback: Any) -> None:
        with self.files.open(name) as source:
            callback.set_size(source.size)
            for block in source:
                file.write(block)
                callback.relative_update(len(block))

    @_reaching
    def _open(self, path: Any, mode: str = "rb", **options: Any) -> ExecServerFile:
        name = self._strip_protocol(path)
        if mode == "xb":  # at once, not with the first block
            self.files.write(name, b"", exclusive=True)
        if mode == "rb":
            found = self.info(name)
            if found["type"] == "directory":
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
            if not found["size"] and (data := self.files.read(name)):
                # A file of /proc or /sys, which has no size before it is read.
                options |= {"size": len(data), "cache_type": "all"}
            else:
                options.setdefault("size", found["size"])
        return ExecServerFile(self, name, mode, **options)


class ExecServerFile(AbstractBufferedFile):
    """An open file; a new content takes the place of the old one when it is complete."""

    _writer: FileWriter | None = None

    @_reaching
    def _fetch_range(self, start: int, end: int) -> bytes:
        return _read_range(self.fs.files, self.path, start, end)

    @_reaching
    def _initiate_upload(self) -> None:
        if self.mode != "ab":
            is_new = self.mode == "xb"  # the empty file is ours
            self._writer = self.fs.files.open(self.path, "wb", in_place=is_new)

    @_reaching
    def _upload_chunk(self, final: bool = False) -> bool:
        data = self.buffer.getvalue()
        if self._writer is None:
            self.fs.files.append(self.path, data)
            return True
        self._writer.write(data)
        if final and self.autocommit:
            self.commit()
        return True

    @_reaching
    def commit(self) -> None:
        """Put the new content in place."""
        if self._writer is not None:
            self._writer.close()

    def discard(self) -> None:
        """Leave the file as it was."""
        if self._writer is not None:
            reason = OSError("the file is discarded")
            self._writer.__exit__(type(reason), reason, None)


def _details(entry: Entry) -> dict[str, Any]:
    kind = "directory" if entry.is_directory else "file" if entry.is_file else "other"
    size = entry.size
    if entry.is_symlink:
        # As the local file system has it: a link is no directory, so that walks do not follow it,
        # and it has the size of the file that it leads to.
        size = 0 if kind == "other" else size
        kind = "other"
    return {
        "name": entry.path,
        "size": size,
        "type": kind,
        "mtime": entry.modified,
        "mode": entry.mode,
        "islink": entry.is_symlink,
        "destination": entry.link_target,
    }


def _position(place: int | None, default: int, size: int) -> int:
    """A place in a file, from the end if it is negative."""
    if place is None:
        return default
    return max(0, size + place) if place < 0 else place


def _read_range(files: Files, path: str, start: int, end: int) -> bytes:
    if end <= start:
        return b""
    with files.open(path, offset=start) as file:
        return file.read(end - start)
