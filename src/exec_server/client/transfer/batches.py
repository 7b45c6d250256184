"""Many small files in one request, on servers with `fsBinary`.

A file that fails is copied again by itself, and that attempt has the error. So nothing here raises
because of a single file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from msgspec import Raw

from exec_server.client.engine.messages import decode_as
from exec_server.client.engine.session import ClientSession
from exec_server.client.transfer.plan import Item, join
from exec_server.errors import MalformedAnswer, RpcError
from exec_server.protocol.binary import Attached
from exec_server.protocol.binary_files import (
    READ_FILES,
    WRITE_FILES,
    NewFile,
    ReadFilesParams,
    ReadFilesResult,
    WriteFilesParams,
    WriteFilesResult,
)
from exec_server.protocol.method import Call
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
# Batches under way: one is read and one is written meanwhile.
BATCHES_AT_ONCE: Final = 3

_READ: Final[Call[ReadFilesParams, Attached[Raw]]] = Call(
    READ_FILES.name, ReadFilesParams, Attached
)
_WRITE: Final[Call[Attached[WriteFilesParams], WriteFilesResult]] = Call(
    WRITE_FILES.name, Attached, WriteFilesResult
)


class Batch(NamedTuple):
    """Small files of a tree, and where they are on the server."""

    items: list[Item]
    paths: list[PathUri]


def batches_of(items: Sequence[Item], top: str) -> Iterator[Batch]:
    """The files among `items` that are small, in batches; `top` is the tree on the server."""
    batch = Batch([], [])
    size = text = 0
    for item in items:
        path = PathUri.from_text(join(top, item.path))
        text_bytes = len(path.uri) + _FILE_TEXT_BYTES
        is_full = len(batch.items) == BATCH_FILES or size + item.size > BATCH_BYTES
        if batch.items and (is_full or text + text_bytes > BATCH_TEXT_BYTES):
            yield batch
            batch = Batch([], [])
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


async def write(session: ClientSession, batch: Batch, contents: list[bytes | None]) -> set[int]:
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


async def read(session: ClientSession, batch: Batch) -> list[memoryview | None]:
    """The contents of files; None for those that cannot be read so."""
    try:
        answer = await session.call(_READ, ReadFilesParams(batch.paths), is_retryable=True)
    except RpcError:
        return [None] * len(batch.paths)
    sizes = decode_as(ReadFilesResult, answer.value, "contents of files").sizes
    rest = memoryview(answer.data)
    if len(sizes) != len(batch.paths) or sum(size or 0 for size in sizes) != len(rest):
        raise MalformedAnswer("fs/readFiles: the sizes of files do not fit the data")
    contents: list[memoryview | None] = []
    for size in sizes:
        if size is not None and not 0 <= size <= len(rest):
            raise MalformedAnswer("fs/readFiles: a size is wrong")
        contents.append(None if size is None else rest[:size])
        rest = rest[size or 0 :]
    return contents
