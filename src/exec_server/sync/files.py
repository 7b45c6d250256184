"""Files without `async`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Literal, Self, TypeVar, overload

from exec_server.client import file_watch, files
from exec_server.client.arguments import AnyPath, AnySandbox
from exec_server.client.results import Entry, FileChange
from exec_server.client.transfer import open_file, text_file
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


class TextReader(BlockingHandle[text_file.TextReader]):
    """An open text file to read, for `with` or `close`; iterating gives its lines."""

    _lines: deque[str] | None = None  # taken together, because each call costs a thread switch

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        if not self._lines:
            self._lines = deque(self._thread.call(self._inner.take_lines))
        if not self._lines:
            raise StopIteration
        return self._lines.popleft()

    def _put_back(self) -> None:
        if self._lines:
            self._inner.put_back("".join(self._lines))
            self._lines = None

    def read(self, size: int | None = -1) -> str:
        """Read `size` characters, fewer only at the end of the file; all of them by default."""
        self._put_back()
        return self._thread.call(self._inner.read, size)

    def readline(self) -> str:
        """Read a line with its end; empty at the end of the file."""
        self._put_back()
        return self._thread.call(self._inner.readline)


W = TypeVar("W", open_file.FileWriter, open_file.FileAppender, text_file.TextWriter)


class _Writer(BlockingHandle[W]):
    """An open file to write: closing raises what prevents that its data is written."""

    def __exit__(self, *error: object) -> None:
        if not self._thread.is_forked:
            self._thread.call(self._inner.__aexit__, *error)

    def _abandon(self) -> None:
        """Leave the file as it was."""
        self.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)

    def close(self) -> None:
        """Write the rest, and put a new content in place.

        Raises SessionLost if the environment was closed before.
        """
        if (self.is_open or self._inner._is_without_loop) and not self._thread.is_forked:
            self._thread.call(self._inner.aclose)


class FileWriter(_Writer[open_file.FileWriter]):
    """An open file to replace, for `with` or `close`, which put the new content in place."""

    written = Attribute[int]()
    write = blocking(open_file.FileWriter.write)
    flush = blocking(open_file.FileWriter.flush)


class FileAppender(_Writer[open_file.FileAppender]):
    """An open file to write at its end, for `with` or `close`."""

    written = Attribute[int]()
    write = blocking(open_file.FileAppender.write)
    flush = blocking(open_file.FileAppender.flush)


class TextWriter(_Writer[text_file.TextWriter]):
    """An open text file to write, for `with` or `close`."""

    write = blocking(text_file.TextWriter.write)
    flush = blocking(text_file.TextWriter.flush)


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
    def open(self, path: AnyPath, mode: Literal["xb"]) -> FileWriter: ...

    @overload
    def open(self, path: AnyPath, mode: Literal["wb"], *, in_place: bool = False) -> FileWriter: ...

    @overload
    def open(self, path: AnyPath, mode: Literal["ab"]) -> FileAppender: ...

    @overload
    def open(
        self,
        path: AnyPath,
        mode: Literal["r", "rt"],
        *,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> TextReader: ...

    @overload
    def open(
        self,
        path: AnyPath,
        mode: Literal["w", "wt", "a", "at", "x", "xt"],
        *,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> TextWriter: ...

    @overload
    def open(
        self,
        path: AnyPath,
        mode: str,
        *,
        offset: int = 0,
        in_place: bool = False,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> Any: ...  # as of the built-in: which file it is depends on the value

    def open(
        self,
        path: AnyPath,
        mode: str = "rb",
        *,
        offset: int = 0,
        in_place: bool = False,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> FileReader | FileWriter | FileAppender | TextReader | TextWriter:
        """Open a file of any size, in a mode of the built-in `open`, for `with` or `close`."""
        opened = self._inner.open(
            path,
            mode,
            offset=offset,
            in_place=in_place,
            encoding=encoding,
            errors=errors,
            newline=newline,
        )
        if isinstance(opened, open_file.FileReader):
            return FileReader(self._thread, opened)
        if isinstance(opened, open_file.FileWriter):
            return FileWriter(self._thread, opened)
        if isinstance(opened, open_file.FileAppender):
            return FileAppender(self._thread, opened)
        if isinstance(opened, text_file.TextReader):
            return TextReader(self._thread, opened)
        return TextWriter(self._thread, opened)

    def walk(
        self,
        path: AnyPath = ".",
        *,
        follow_links: bool = False,
        on_error: Callable[[RpcError], None] | None = None,
        depth: int | None = None,
    ) -> Iterator[Entry]:
        """Everything below a directory, each directory before its entries.

        With a `depth` of 1 these are its entries alone, of 2 also those of the directories in it.
        `on_error` gets the errors of unreadable entries, in the thread of the connection.
        """
        entries = self._inner.walk(path, follow_links=follow_links, on_error=on_error, depth=depth)
        return iterate(self._thread, entries, WALK_BATCH)

    def read_tar(self, path: AnyPath, *, exclude: Iterable[str] = ()) -> Iterator[bytes]:
        """A directory or file as a tar archive, in pieces; see `Files.read_tar`."""
        chunks = self._inner.read_tar(path, exclude=exclude)
        try:
            yield from iterate(self._thread, chunks, TAR_BATCH)
        finally:
            self._thread.call(chunks.aclose)  # ends the command, if there is more
