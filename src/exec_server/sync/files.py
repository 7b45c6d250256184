"""Files without `async`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, Literal, overload

from exec_server.client import file_watch, files
from exec_server.client.arguments import AnyPath, AnySandbox
from exec_server.client.results import Entry, FileChange
from exec_server.client.transfer import open_file
from exec_server.errors import RpcError
from exec_server.sync.thread import Attribute, Blocking, BlockingHandle, blocking, iterate, wrapped

# Entries of a walk that are passed to the caller at a time: each batch costs two thread switches.
WALK_BATCH: Final = 512
# The same for the chunks of an archive, which have up to some hundred KiB.
TAR_BATCH: Final = 8


class FileReader(BlockingHandle[open_file.FileReader]):
    """An open file to read, for `with` or `close`; iterating gives its blocks."""

    def __iter__(self) -> Iterator[bytes]:
        return iterate(self._thread, self._inner)

    size = Attribute[int]()
    read = blocking(open_file.FileReader.read)
    is_changed = blocking(open_file.FileReader.is_changed)


class FileWriter(BlockingHandle[open_file.FileWriter]):
    """An open file to replace, for `with` or `close`, which put the new content in place."""

    def __exit__(self, *error: object) -> None:
        if not self._thread.is_forked:
            self._thread.call(self._inner.__aexit__, *error)

    def _abandon(self) -> None:
        """Leave the file as it was."""
        self.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)

    def close(self) -> None:
        """Put the new content in place; SessionLost if the environment was closed before."""
        if self.is_open and not self._thread.is_forked:
            self._thread.call(self._inner.aclose)

    written = Attribute[int]()
    write = blocking(open_file.FileWriter.write)
    flush = blocking(open_file.FileWriter.flush)


class FileWatch(BlockingHandle[file_watch.FileWatch]):
    """The changes below a directory since `watch`, for `with` or `close`; iterating waits."""

    def __iter__(self) -> Iterator[FileChange]:
        return iterate(self._thread, self._inner)


class Files(Blocking[files.Files]):
    """The files of an environment; `progress` is called in the thread of the connection."""

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
    read_many = blocking(files.Files.read_many)
    write_many = blocking(files.Files.write_many)
    write_tar = blocking(files.Files.write_tar)
    read_text = blocking(files.Files.read_text)
    write_text = blocking(files.Files.write_text)
    append = blocking(files.Files.append)
    rename = blocking(files.Files.rename)
    chmod = blocking(files.Files.chmod)
    symlink = blocking(files.Files.symlink)
    touch = blocking(files.Files.touch)
    glob = blocking(files.Files.glob)
    grep = blocking(files.Files.grep)
    grep_count = blocking(files.Files.grep_count)
    watch = wrapped(files.Files.watch, FileWatch)
    edit = blocking(files.Files.edit)
    apply_patch = blocking(files.Files.apply_patch)
    disk_usage = blocking(files.Files.disk_usage)

    def sandboxed(self, sandbox: AnySandbox, *, cwd: AnyPath | None = None) -> Files:
        return Files(self._thread, self._inner.sandboxed(sandbox, cwd=cwd))

    def as_user(self, user: str | int) -> Files:
        return Files(self._thread, self._inner.as_user(user))

    @overload
    def open(self, path: AnyPath, mode: Literal["rb"] = "rb", *, offset: int = 0) -> FileReader: ...

    @overload
    def open(self, path: AnyPath, mode: Literal["wb"], *, in_place: bool = False) -> FileWriter: ...

    def open(
        self,
        path: AnyPath,
        mode: Literal["rb", "wb"] = "rb",
        *,
        offset: int = 0,
        in_place: bool = False,
    ) -> FileReader | FileWriter:
        """Open a file of any size, to read (`rb`) or to replace (`wb`), for `with` or `close`."""
        if mode == "wb":
            return FileWriter(self._thread, self._inner.open(path, mode, in_place=in_place))
        return FileReader(self._thread, self._inner.open(path, mode, offset=offset))

    def walk(
        self,
        path: AnyPath = ".",
        *,
        follow_links: bool = False,
        on_error: Callable[[RpcError], None] | None = None,
    ) -> Iterator[Entry]:
        """Everything below a directory, each directory before its entries.

        `on_error` gets the errors of unreadable entries, in the thread of the connection.
        """
        entries = self._inner.walk(path, follow_links=follow_links, on_error=on_error)
        return iterate(self._thread, entries, WALK_BATCH)

    def read_tar(self, path: AnyPath, *, exclude: Iterable[str] = ()) -> Iterator[bytes]:
        """A directory or file as a tar archive, in pieces; see `Files.read_tar`."""
        chunks = self._inner.read_tar(path, exclude=exclude)
        try:
            yield from iterate(self._thread, chunks, TAR_BATCH)
        finally:
            self._thread.call(chunks.aclose)  # ends the command, if there is more
