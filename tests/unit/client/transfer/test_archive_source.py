"""The bytes of an archive from files and iterables."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from concurrent.futures import CancelledError
from typing import Any

import pytest

from exec_server.client.transfer.archive import ArchiveSource

pytestmark = pytest.mark.quick


def _read(source: ArchiveSource) -> bytes:
    return io.BufferedReader(source, 16).read()


@pytest.mark.parametrize(
    "archive",
    [
        b"abcdef",
        bytearray(b"abcdef"),
        memoryview(b"abcdef"),
        io.BytesIO(b"abcdef"),
        [b"ab", b"", b"cdef"],
        iter([b"abcdef"]),
    ],
)
def test_bytes_files_and_iterables(archive: Any) -> None:
    assert _read(ArchiveSource(archive)) == b"abcdef"


async def _pieces(*pieces: Any) -> AsyncIterator[Any]:
    for piece in pieces:
        await asyncio.sleep(0)
        yield piece


def test_an_async_iterable_is_read_on_its_loop() -> None:
    async def scene() -> bytes:
        source = ArchiveSource(_pieces(b"ab", b"", b"c" * 100))
        return await asyncio.to_thread(_read, source)

    assert asyncio.run(scene()) == b"ab" + b"c" * 100


def test_a_read_that_waits_is_cancelled() -> None:
    async def scene() -> None:
        waiting = asyncio.Event()

        async def never() -> AsyncIterator[bytes]:
            waiting.set()
            await asyncio.Event().wait()
            yield b""

        source = ArchiveSource(never())

        async def read() -> None:
            with pytest.raises(CancelledError):
                await asyncio.to_thread(_read, source)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(read())
            await waiting.wait()
            source.end()
        with pytest.raises(ValueError, match="closed"):
            await asyncio.to_thread(_read, source)

    asyncio.run(scene())


@pytest.mark.parametrize("archive", ["text", 5, None])
def test_anything_else_is_no_archive(archive: Any) -> None:
    with pytest.raises(TypeError, match="must be bytes, a binary file or an iterable"):
        ArchiveSource(archive)


def test_pieces_are_bytes() -> None:
    for archive in (io.StringIO("text"), ["text"]):
        with pytest.raises(TypeError, match="consists of bytes, not str"):
            _read(ArchiveSource(archive))  # type: ignore[arg-type]

    async def scene() -> None:
        with pytest.raises(TypeError, match="consists of bytes, not int"):
            await asyncio.to_thread(_read, ArchiveSource(_pieces(5)))

    asyncio.run(scene())
