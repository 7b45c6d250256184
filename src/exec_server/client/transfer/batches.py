"""Many small files in one request, on servers with `fsBinary`; those that fail are copied alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from msgspec import Raw

from exec_server.client.arguments import encoded
from exec_server.client.engine.messages import decode_as
from exec_server.client.engine.session import ClientSession
from exec_server.client.exceptions import SandboxDenied
from exec_server.client.results import NotCopied, Transfer
from exec_server.client.transfer.mirror import Item
from exec_server.client.transfer.open_file import too_large_error
from exec_server.client.transfer.plan import RemoteFiles, for_each, is_final, join
from exec_server.errors import ExecServerError, MalformedAnswer, RpcError
from exec_server.protocol.decoding import Call
from exec_server.protocol.files import (
    READ_FILES,
    WRITE_FILES,
    NewFile,
    ReadFilesParams,
    ReadFilesResult,
    WriteFilesParams,
    WriteFilesResult,
)
from exec_server.protocol.jsonrpc import Attached
from exec_server.protocol.paths import PathUri

# A file of this size takes longer to copy than its request.
FILE_BYTES: Final = 65_536
# One batch: enough that its request and the change of threads take no time by comparison, and
# little enough that progress is seen. Servers accept 256 files, 2 MiB, and 32 KiB of JSON text
# with all paths.
BATCH_FILES: Final = 256
BATCH_BYTES: Final = 1_048_576
BATCH_TEXT_BYTES: Final = 24_576
# Of the JSON text of a file, beside its path.
_FILE_TEXT_BYTES: Final = 64
# The size that a file is assumed to have before it is read: so many files are in one request that
# the contents of most of them fit into its answer. The others are read one by one.
ASSUMED_BYTES: Final = 16_384
# Batches under way: one is read and one is written meanwhile.
BATCHES_AT_ONCE: Final = 3

_READ: Final[Call[ReadFilesParams, Attached[Raw]]] = Call(
    READ_FILES.name, ReadFilesParams, Attached
)
_WRITE: Final[Call[Attached[WriteFilesParams], WriteFilesResult]] = Call(
    WRITE_FILES.name, Attached, WriteFilesResult
)


class FileBatch(NamedTuple):
    """Small files of a tree, and where they are on the server."""

    items: list[Item]
    paths: list[PathUri]


def batches_of(items: Sequence[Item], top: str) -> Iterator[FileBatch]:
    """The files among `items` that are small, in batches; `top` is the tree on the server."""
    batch = FileBatch([], [])
    size = text = 0
    for item in items:
        path = PathUri.from_text(join(top, item.path))
        text_bytes = len(path.uri) + _FILE_TEXT_BYTES
        is_full = len(batch.items) == BATCH_FILES or size + item.size > BATCH_BYTES
        if batch.items and (is_full or text + text_bytes > BATCH_TEXT_BYTES):
            yield batch
            batch = FileBatch([], [])
            size = text = 0
        batch.items.append(item)
        batch.paths.append(path)
        size += item.size
        text += text_bytes
    if batch.items:
        yield batch


def is_small(item: Item) -> bool:
    """Whether an item is a file for a batch."""
    return item.kind == "f" and item.size <= FILE_BYTES and len(item.path) < BATCH_TEXT_BYTES // 8


async def for_each_batch(
    items: Iterable[Item], top: str, work: Callable[[FileBatch], Awaitable[None]]
) -> None:
    """Copy the files among `items` that are small, if there are several, in batches."""
    small = [item for item in items if is_small(item)]
    if len(small) > 1:
        await for_each(batches_of(small, top), work, BATCHES_AT_ONCE)


async def write(session: ClientSession, batch: FileBatch, contents: list[bytes | None]) -> set[int]:
    """Write files that have a content; returns the positions of those that are written."""
    sent = [position for position, content in enumerate(contents) if content is not None]
    data = b"".join(content for content in contents if content is not None)
    files = [
        NewFile(batch.paths[position], len(contents[position] or b""), batch.items[position].mode)
        for position in sent
    ]
    try:
        answer = await session.call(
            _WRITE, Attached(WriteFilesParams(files), data), is_retryable=True
        )
    except RpcError:
        return set()
    failed = set(answer.failed)
    return {position for number, position in enumerate(sent) if number not in failed}


async def read(session: ClientSession, batch: FileBatch) -> list[memoryview | None]:
    """The contents of files; None for those that cannot be read so."""
    try:
        answer = await session.call(_READ, ReadFilesParams(batch.paths), is_retryable=True)
    except RpcError:
        return [None] * len(batch.paths)
    sizes = decode_as(ReadFilesResult, answer.value, "contents of files").sizes
    remaining = memoryview(answer.data)
    if len(sizes) != len(batch.paths) or sum(size or 0 for size in sizes) != len(remaining):
        raise MalformedAnswer("fs/readFiles: the sizes of files do not fit the data")
    contents: list[memoryview | None] = []
    for size in sizes:
        if size is not None and not 0 <= size <= len(remaining):
            raise MalformedAnswer("fs/readFiles: a size is wrong")
        contents.append(None if size is None else remaining[:size])
        remaining = remaining[size or 0 :]
    return contents


async def read_many(
    files: RemoteFiles,
    session: ClientSession | None,
    names: Mapping[str, str],
    limit: int,
    *,
    check: bool,
) -> tuple[dict[str, bytes], dict[str, ExecServerError]]:
    """Read files, whose `names` are in error texts; returns contents and errors by their paths.

    Without a session each file takes requests of its own. With `check` the first error is raised.
    """
    contents: dict[str, bytes] = {}
    if session is not None and len(names) > 1:
        contents = await _read_batches(session, names)
    errors: dict[str, ExecServerError] = {}

    async def read_one(path: str) -> None:
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

    await for_each(names, read_one)
    return contents, errors


async def write_many(
    files: RemoteFiles,
    session: ClientSession | None,
    names: Mapping[str, str],
    contents: Mapping[str, bytes],
    *,
    parents: bool,
) -> Transfer:
    """Write files, with `parents` also missing directories; raises the error of a full disk."""
    if parents:
        await _make_parents(files, names)
    written: set[str] = set()
    if session is not None and len(contents) > 1:
        written = await _write_batches(session, contents)
    failed: list[NotCopied] = []

    async def write_one(path: str) -> None:
        try:
            await files.write(names[path], contents[path])
            written.add(path)
        except (RpcError, SandboxDenied) as error:
            if is_final(error):
                raise
            failed.append(NotCopied(names[path], error.with_traceback(None)))

    await for_each([path for path in contents if path not in written], write_one)
    size = sum(len(contents[path]) for path in written)
    return Transfer(len(written), 0, 0, size, 0, (), tuple(failed))


async def _make_parents(files: RemoteFiles, paths: Iterable[str]) -> None:
    """Make the directories of files; an error is left to the write that needs them."""
    directories = {path.rpartition("/")[0] for path in paths}
    inner = {directory.rpartition("/")[0] for directory in directories}

    async def make(directory: str) -> None:
        try:
            await files.mkdir(directory, parents=True, exist_ok=True)
        except (RpcError, SandboxDenied) as error:
            if is_final(error):
                raise

    await for_each(sorted(directories - inner - {""}), make)


async def _read_batches(session: ClientSession, paths: Iterable[str]) -> dict[str, bytes]:
    """Read files together; returns the contents of those that could be read so."""
    by_path: dict[str, bytes] = {}

    async def read_batch(batch: FileBatch) -> None:
        contents = await read(session, batch)
        for item, content in zip(batch.items, contents, strict=True):
            if content is not None:
                by_path[f"/{item.path}"] = bytes(content)

    await for_each_batch((_item(path, ASSUMED_BYTES) for path in paths), "/", read_batch)
    return by_path


async def _write_batches(session: ClientSession, contents: Mapping[str, bytes]) -> set[str]:
    """Write small files together; returns the paths of those that are written."""
    written: set[str] = set()

    async def write_batch(batch: FileBatch) -> None:
        paths = [f"/{item.path}" for item in batch.items]
        data: list[bytes | None] = [contents[path] for path in paths]
        written.update(paths[each] for each in await write(session, batch, data))

    items = (_item(path, len(data)) for path, data in contents.items())
    await for_each_batch(items, "/", write_batch)
    return written


def _item(path: str, size: int) -> Item:
    """A file for a batch, unless its path is one that would make the whole batch fail."""
    is_plain = path.startswith("/") and not path.startswith("//")
    return Item(path[1:], "f" if is_plain and _is_possible(path) else "?", None, size, "")


def _is_possible(path: str) -> bool:
    try:
        return b"\0" not in encoded(path)
    except UnicodeEncodeError:  # a surrogate that stands for no byte
        return False
