"""Files without `async`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Literal, overload

from exec_server.client import files, open_file
from exec_server.client.launch import AnySandbox
from exec_server.client.places import AnyPath
from exec_server.client.results import Entry
from exec_server.errors import RpcError
from exec_server.sync.thread import Blocking, BlockingContext, blocking, iterate

# Of a walk: as many at a time, so that the threads do not take turns for each.
BATCH: Final = 512


class FileReader(BlockingContext[open_file.FileReader]):
    """A file to read, for `with`; iterating gives its blocks from where it is."""

    def __iter__(self) -> Iterator[bytes]:
        return iterate(self._thread, self._inner)

    @property
    def size(self) -> int:
        return self._inner.size

    read = blocking(open_file.FileReader.read)
    is_changed = blocking(open_file.FileReader.is_changed)


class FileWriter(BlockingContext[open_file.FileWriter]):
    """A file to write from its beginning, for `with`."""

    write = blocking(open_file.FileWriter.write)
    flush = blocking(open_file.FileWriter.flush)


class Files(Blocking[files.Files]):
    """The files of an environment; progress is told in the thread of the connection."""

    read = blocking(files.Files.read)
    write = blocking(files.Files.write)
    stat = blocking(files.Files.stat)
    exists = blocking(files.Files.exists)
    list = blocking(files.Files.list)
    realpath = blocking(files.Files.realpath)
    copy = blocking(files.Files.copy)
    remove = blocking(files.Files.remove)
    mkdir = blocking(files.Files.mkdir)
    upload = blocking(files.Files.upload)
    download = blocking(files.Files.download)

    def sandboxed(self, sandbox: AnySandbox) -> Files:
        return Files(self._thread, self._inner.sandboxed(sandbox))

    @overload
    def open(self, path: AnyPath, mode: Literal["rb"] = "rb", *, offset: int = 0) -> FileReader: ...

    @overload
    def open(self, path: AnyPath, mode: Literal["wb"]) -> FileWriter: ...

    def open(
        self, path: AnyPath, mode: Literal["rb", "wb"] = "rb", *, offset: int = 0
    ) -> FileReader | FileWriter:
        """A file of any size for `with`, to be read (`rb`) or written anew (`wb`)."""
        if mode == "wb":
            return FileWriter(self._thread, self._inner.open(path, mode))
        return FileReader(self._thread, self._inner.open(path, mode, offset=offset))

    def walk(
        self,
        path: AnyPath = ".",
        *,
        follow_links: bool = False,
        on_error: Callable[[RpcError], None] | None = None,
    ) -> Iterator[Entry]:
        """Everything below a directory, directories before what is in them.

        `on_error` is told of what cannot be read, in the thread of the connection.
        """
        entries = self._inner.walk(path, follow_links=follow_links, on_error=on_error)
        return iterate(self._thread, entries, BATCH)
