"""Stdin and output of a command without blocking the loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import uvloop

from exec_server.cli.streams import READ_BYTES, OutputWriter, StdinReader, is_null_device, write_all
from exec_server.client.process import Process
from exec_server.client.results import Chunk


@pytest.fixture
def pipe() -> tuple[int, int]:
    return os.pipe()


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def test_bytes_are_read_as_they_arrive(pipe: tuple[int, int]) -> None:
    reader, writer = pipe

    async def main() -> None:
        stdin = StdinReader(reader)
        loop = asyncio.get_running_loop()
        loop.call_soon(os.write, writer, b"one")
        assert await stdin.read() == b"one"
        loop.call_soon(os.write, writer, b"two")
        assert await stdin.read() == b"two"
        loop.call_soon(os.close, writer)
        assert await stdin.read() == b""

    uvloop.run(main())
    os.close(reader)


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run])
def test_files_and_devices_are_read_too(run: object, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * (READ_BYTES + 1))

    async def lengths(path: str, count: int) -> list[int]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            stdin = StdinReader(descriptor)
            return [len(await stdin.read()) for _ in range(count)]
        finally:
            os.close(descriptor)

    assert run(lengths(str(tmp_path / "file"), 3)) == [READ_BYTES, 1, 0]  # type: ignore[operator]
    assert run(lengths("/dev/zero", 2)) == [READ_BYTES, READ_BYTES]  # type: ignore[operator]


def test_a_cancelled_read_consumes_nothing(pipe: tuple[int, int]) -> None:
    reader, writer = pipe

    async def main() -> None:
        stdin = StdinReader(reader)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await stdin.read()
        os.write(writer, b"kept")
        assert await stdin.read() == b"kept"

    uvloop.run(main())
    _close(reader, writer)


def test_a_slow_reader_does_not_block_the_loop(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    data = os.urandom(300_000)  # more than a pipe holds

    async def main() -> None:
        output = OutputWriter()
        got = bytearray()
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(output.write(writer, data))
            await asyncio.sleep(0.01)
            assert not writing.done()  # but the loop runs
            while len(got) < len(data):
                got += await asyncio.to_thread(os.read, reader, 65_536)
        assert got == data

    asyncio.run(main())
    _close(reader, writer)


def test_writing_to_a_closed_pipe_is_an_error(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.close(reader)

    async def main() -> None:
        with pytest.raises(BrokenPipeError):
            await OutputWriter().write(writer, b"x")

    asyncio.run(main())
    os.close(writer)


class _Printed:
    """A process whose chunks are ready."""

    def __init__(self, *batches: list[Chunk]) -> None:
        self._batches = [*batches, []]

    async def read_some(self) -> list[Chunk]:
        return self._batches.pop(0)


def test_chunks_of_one_stream_are_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = [Chunk("stdout", b"a"), Chunk("stdout", b"b"), Chunk("stderr", b"c")]
    process = cast(Process, _Printed(first, [Chunk("pty", b"d")]))
    calls: list[object] = []

    async def main() -> None:
        writer = OutputWriter()

        async def write(descriptor: int, data: bytes) -> None:
            calls.append((descriptor, data))

        @contextlib.contextmanager
        def inspect(data: bytes) -> Iterator[None]:
            calls.append(data)
            yield
            calls.append("written")

        monkeypatch.setattr(writer, "write", write)
        await writer.write_output(process, inspect)

    asyncio.run(main())
    pieces = ((1, b"ab"), (2, b"c"), (1, b"d"))
    assert calls == [each for piece in pieces for each in (piece[1], piece, "written")]


def test_a_descriptor_that_does_not_block_is_written_whole(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.set_blocking(writer, False)
    data = os.urandom(300_000)
    got = bytearray()

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.to_thread(write_all, writer, data))
            while len(got) < len(data):
                got.extend(await asyncio.to_thread(os.read, reader, 65_536))

    asyncio.run(main())
    assert got == data
    _close(reader, writer)


def test_null_devices() -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    assert is_null_device(null)
    os.close(null)
    assert is_null_device(null)  # closed
    reader, writer = os.pipe()
    assert not is_null_device(reader)
    os.close(reader)
    os.close(writer)


def test_a_flood_of_input_lets_others_run_and_enlarges_the_pipe(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.set_blocking(writer, False)
    filled = os.write(writer, bytes(1_000_000))

    async def main() -> None:
        ran: list[bool] = []
        asyncio.get_running_loop().call_soon(ran.append, True)
        assert len(await StdinReader(reader).read()) == filled
        assert ran

    uvloop.run(main())
    assert os.write(writer, bytes(READ_BYTES)) in (filled, READ_BYTES)
    _close(reader, writer)
