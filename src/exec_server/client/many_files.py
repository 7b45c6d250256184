"""ManyFiles: the methods of `Files` for many files at a time.

Small files travel together in a few requests, on servers with `fsBinary`. On other servers, under a
sandbox and as another user each file takes requests of its own, some of them at a time. Archives
are in `transfer.archive_upload` and `transfer.archive_download`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Final, TypeVar

from exec_server.client.engine.session import ClientSession
from exec_server.client.exceptions import NotAllCopied, SandboxDenied
from exec_server.client.file_changes import check_bytes
from exec_server.client.file_searches import FileSearches
from exec_server.client.paths import AnyPath, encoded, path_text
from exec_server.client.results import FileContent, NotCopied, Progress, Transfer
from exec_server.client.transfer import batches
from exec_server.client.transfer.open_file import READ_BYTES, too_large_error
from exec_server.client.transfer.plan import Item, RemoteFiles, for_each, is_final
from exec_server.errors import ExecServerError, RpcError

if TYPE_CHECKING:
    from exec_server.client.transfer.archive_download import ArchivedFiles
    from exec_server.client.transfer.archive_source import AnyArchive

T = TypeVar("T")

# The size that a file is assumed to have before it is read: so many files are in one request that
# the contents of most of them fit into its answer. The others are read one by one.
ASSUMED_BYTES: Final = 16_384
# The files of an archive: more than most disks should get by accident, because a small archive can
# stand for any number of zeros.
TAR_BYTES: Final = 16 * 1024**3


class ManyFiles(FileSearches):
    """Reads and writes many files."""

    async def read_many(
        self, paths: Iterable[AnyPath], *, limit: int = READ_BYTES, check: bool = True
    ) -> list[FileContent]:
        """Read files, each of at most `limit` bytes; the results have the order of the paths.

        Raises the error of the first file that cannot be read. Without `check`, its result has
        the `error`, and the others are read.
        """
        paths = _listed(paths, "paths")
        names = {self._absolute(path): path_text(path) for path in paths}
        contents: dict[str, bytes] = {}
        if (session := self._batch_session()) is not None and len(names) > 1:
            contents = await _read_batches(session, names)
        errors: dict[str, ExecServerError] = {}
        files = self._remote_files()

        async def read(path: str) -> None:
            try:
                if path not in contents:
                    contents[path] = await files.read(names[path], limit=limit)
                elif len(contents[path]) > limit:
                    raise too_large_error(names[path], limit)
            except (RpcError, SandboxDenied) as error:
                if check:
                    raise
                errors[path] = error.with_traceback(None)
                contents[path] = b""

        await for_each(names, read)
        return [
            FileContent(path_text(path), contents[whole], errors.get(whole))
            for path, whole in ((path, self._absolute(path)) for path in paths)
        ]

    async def write_many(
        self,
        files: Mapping[str, bytes] | Iterable[tuple[AnyPath, bytes]],
        *,
        parents: bool = False,
        check: bool = True,
    ) -> Transfer:
        """Write files, with `parents` also missing directories; of equal paths the last one counts.

        If a file cannot be written, the others are. Then NotAllCopied is raised or, without
        `check`, the file is only named in `failed`. RpcError is raised at once if a disk is full.
        """
        pairs = files.items() if isinstance(files, Mapping) else files
        names: dict[str, str] = {}
        contents: dict[str, bytes] = {}
        for path, data in pairs:
            check_bytes(data, f"encode the text of {path_text(path)}")
            names[self._absolute(path)] = path_text(path)
            contents[self._absolute(path)] = data
        if parents:
            await self._make_parents(names)
        written: set[str] = set()
        if (session := self._batch_session()) is not None and len(contents) > 1:
            written = await _write_batches(session, contents)
        failed: list[NotCopied] = []
        remote = self._remote_files()

        async def write(path: str) -> None:
            try:
                await remote.write(names[path], contents[path])
                written.add(path)
            except (RpcError, SandboxDenied) as error:
                if is_final(error):
                    raise
                failed.append(NotCopied(names[path], error.with_traceback(None)))

        await for_each([path for path in contents if path not in written], write)
        size = sum(len(contents[path]) for path in written)
        done = Transfer(len(written), 0, 0, size, 0, (), tuple(failed))
        if failed and check:
            raise NotAllCopied(done)
        return done

    async def read_tar(
        self, path: AnyPath, *, exclude: Iterable[str] = ()
    ) -> AsyncGenerator[bytes, None]:
        """A directory or file as a tar archive, in pieces; names begin with `./`.

        `exclude` has paths, relative to the directory, that are left out with everything below;
        they are not patterns.
        """
        from exec_server.client.transfer.archive_download import ArchiveDownload

        files: ArchivedFiles = self  # type: ignore[assignment]  # `Files` implements it
        skipped = _listed(exclude, "exclude")
        archive = ArchiveDownload(files, self._commands, self._sandbox, skipped)
        async with aclosing(archive.chunks(self._absolute(path))) as chunks:
            async for chunk in chunks:
                yield chunk

    async def write_tar(
        self,
        archive: AnyArchive,
        directory: AnyPath,
        *,
        limit: int = TAR_BYTES,
        progress: Callable[[Progress], None] | None = None,
        check: bool = True,
    ) -> Transfer:
        """Unpack a tar archive into a directory, which is made if it is missing.

        The archive is bytes, a binary file, or an iterable of bytes, async or not, and may be
        compressed. Its files have at most `limit` bytes together. InvalidRequest is raised at the
        first member that leads out of the directory, as a path or link, or is no file, directory
        or link; the members before it stay. If a member cannot be written, the others are, and
        NotAllCopied is raised at the end or, without `check`, the member is named in `failed`.
        """
        from exec_server.client.transfer.archive_upload import ArchiveUpload

        upload = ArchiveUpload(
            self._remote_files(),
            self._commands,
            progress,
            self._sandbox,
            session=self._batch_session(),
        )
        done = await upload.unpack(archive, self._absolute(directory, "directory"), limit)
        if done.failed and check:
            raise NotAllCopied(done)
        return done

    async def _make_parents(self, paths: Iterable[str]) -> None:
        """Make the directories of files; an error is left to the write that needs them."""
        directories = {path.rpartition("/")[0] for path in paths}
        inner = {directory.rpartition("/")[0] for directory in directories}

        async def make(directory: str) -> None:
            try:
                await self._remote_files().mkdir(directory, parents=True, exist_ok=True)
            except (RpcError, SandboxDenied) as error:
                if is_final(error):
                    raise

        await for_each(sorted(directories - inner - {""}), make)

    def _batch_session(self) -> ClientSession | None:
        """The session, if many files can travel in one request, which no sandbox confines."""
        is_plain = self._sandbox is None and self._user is None
        return self._session if is_plain and self._capabilities.fs_binary else None

    def _remote_files(self) -> RemoteFiles:
        return self  # type: ignore[return-value]  # `Files` implements it


def _listed(values: Iterable[T], name: str) -> list[T]:
    """The values as a list; a text alone would be taken for its letters."""
    if isinstance(values, str | bytes):
        raise TypeError(f"{name} must be a list of paths, not {type(values).__name__}")
    return list(values)


async def _read_batches(session: ClientSession, paths: Iterable[str]) -> dict[str, bytes]:
    """Read files together; returns the contents of those that could be read so."""
    found: dict[str, bytes] = {}

    async def read(batch: batches.Batch) -> None:
        contents = await batches.read(session, batch)
        for item, content in zip(batch.items, contents, strict=True):
            if content is not None:
                found[f"/{item.path}"] = bytes(content)

    items = [_item(path, ASSUMED_BYTES) for path in paths]
    small = [item for item in items if batches.is_small(item)]
    await for_each(batches.batches_of(small, "/"), read, batches.BATCHES_AT_ONCE)
    return found


async def _write_batches(session: ClientSession, contents: Mapping[str, bytes]) -> set[str]:
    """Write small files together; returns the paths of those that are written."""
    written: set[str] = set()

    async def write(batch: batches.Batch) -> None:
        paths = [f"/{item.path}" for item in batch.items]
        data: list[bytes | None] = [contents[path] for path in paths]
        written.update(paths[each] for each in await batches.write(session, batch, data))

    items = [_item(path, len(data)) for path, data in contents.items()]
    small = [item for item in items if batches.is_small(item)]
    await for_each(batches.batches_of(small, "/"), write, batches.BATCHES_AT_ONCE)
    return written


def _item(path: str, size: int) -> Item:
    """A file that may be copied together with others, unless it has another form of path.

    A path that no request can contain would be an error of the whole batch.
    """
    is_plain = path.startswith("/") and not path.startswith("//")
    return Item(path[1:], "f" if is_plain and _is_possible(path) else "?", None, size, "")


def _is_possible(path: str) -> bool:
    try:
        return b"\0" not in encoded(path)
    except UnicodeEncodeError:  # a surrogate that stands for no byte
        return False
