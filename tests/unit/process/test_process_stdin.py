"""StdinQueue on a real pipe: order, space, cancelled writes, and a reader that closes."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import pytest

from exec_server.host.pipes import ENLARGED_BYTES, PIPE_BYTES
from exec_server.process import process
from exec_server.process.process import QUEUED_BYTES, QUEUED_CHUNKS, StdinQueue

T = TypeVar("T")
# A pipe that is not enlarged any more.
_PIPE_BYTES = ENLARGED_BYTES


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Read end and non-blocking write end of a pipe of known size."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    os.set_blocking(writer, False)
    yield reader, writer
    for descriptor in (reader, writer):
        try:
            os.close(descriptor)
        except OSError:
            pass  # closed by the test


def _never() -> None:
    raise AssertionError("the input has not been ended")


def _run(test: Callable[[], Awaitable[T]]) -> T:
    async def limited() -> T:
        async with asyncio.timeout(10):
            return await test()

    return asyncio.run(limited())


async def _read(descriptor: int, size: int) -> bytes:
    """Reads this many bytes in a thread, while the loop writes."""
    data = b""
    while len(data) < size:
        data += await asyncio.to_thread(os.read, descriptor, size - len(data))
    return data


def test_chunk_is_written_at_once(pipe: tuple[int, int]) -> None:
    async def test() -> None:
        queue = StdinQueue(pipe[1], _never)
        assert queue.write(b"one") is None
        assert queue.write(b"") is None
        assert queue.write(b"two") is None
        assert os.read(pipe[0], 100) == b"onetwo"
        queue.close()

    _run(test)


def test_chunks_beyond_the_pipe_are_queued_and_written_later(pipe: tuple[int, int]) -> None:
    async def test() -> None:
        queue = StdinQueue(pipe[1], _never)
        data = os.urandom(300_000)
        assert queue.write(data[:200_000]) is None
        assert queue.write(data[200_000:]) is None
        assert await _read(pipe[0], 300_000) == data
        assert queue.write(b"more") is None
        assert await _read(pipe[0], 4) == b"more"
        queue.close()

    _run(test)


def test_write_waits_for_room_by_number(pipe: tuple[int, int]) -> None:
    async def test() -> None:
        queue = StdinQueue(pipe[1], _never)
        assert queue.write(bytes(_PIPE_BYTES)) is None
        for _ in range(QUEUED_CHUNKS):
            assert queue.write(b"x") is None
        turns = [queue.write(b"a"), queue.write(b"b")]
        assert all(turn is not None and not turn.done() for turn in turns)
        expected = bytes(_PIPE_BYTES) + b"x" * QUEUED_CHUNKS + b"ab"
        assert await _read(pipe[0], len(expected)) == expected
        assert all(turn is not None and turn.done() for turn in turns)
        queue.close()

    _run(test)


def test_write_waits_for_room_by_bytes(pipe: tuple[int, int]) -> None:
    async def test() -> None:
        queue = StdinQueue(pipe[1], _never)
        assert queue.write(bytes(QUEUED_BYTES + _PIPE_BYTES)) is None
        turn = queue.write(b"waits")
        assert turn is not None
        await _read(pipe[0], QUEUED_BYTES + _PIPE_BYTES)
        await turn
        assert await _read(pipe[0], 5) == b"waits"
        queue.close()

    _run(test)


def test_cancelled_write_is_taken_back(pipe: tuple[int, int]) -> None:
    async def test() -> None:
        queue = StdinQueue(pipe[1], _never)
        size = QUEUED_BYTES + _PIPE_BYTES
        assert queue.write(bytes(size)) is None
        cancelled, kept = queue.write(b"no"), queue.write(b"yes")
        assert cancelled is not None
        assert kept is not None
        cancelled.cancel()
        assert (await _read(pipe[0], size + 3))[size:] == b"yes"
        await kept
        queue.close()

    _run(test)


def test_close_drops_everything_and_lets_waiters_go(pipe: tuple[int, int]) -> None:
    async def test() -> None:
        queue = StdinQueue(pipe[1], _never)
        queue.write(bytes(QUEUED_BYTES + _PIPE_BYTES))
        turns = [queue.write(b"a"), queue.write(b"b")]
        assert turns[1] is not None
        turns[1].cancel()
        queue.close()
        assert turns[0] is not None
        await turns[0]
        assert queue.write(b"vanishes") is None
        assert len(os.read(pipe[0], 1_000_000)) == _PIPE_BYTES
        queue.close()

    _run(test)


def test_reader_that_goes_away_is_no_error(pipe: tuple[int, int]) -> None:
    async def test() -> None:
        queue = StdinQueue(pipe[1], _never)
        queue.write(bytes(QUEUED_BYTES + _PIPE_BYTES))
        turn = queue.write(b"waits")
        assert turn is not None
        os.close(pipe[0])
        await turn
        assert queue.write(b"vanishes") is None
        queue.close()

    _run(test)


def test_end_without_anything_queued_is_due_at_once(pipe: tuple[int, int]) -> None:
    async def test() -> None:
        ends: list[str] = []
        queue = StdinQueue(pipe[1], lambda: ends.append("end"))
        queue.write(b"one")
        assert not queue.has_eof
        assert queue.write_eof() is None
        assert queue.has_eof
        assert queue.write_eof() is None
        assert ends == ["end"]
        queue.close()

    _run(test)


def test_end_is_due_when_all_is_written(pipe: tuple[int, int]) -> None:
    async def test() -> None:
        ended = asyncio.Event()

        def close() -> None:
            queue.close()
            os.close(pipe[1])
            ended.set()

        queue = StdinQueue(pipe[1], close)
        data = os.urandom(300_000)
        assert queue.write(data) is None
        assert queue.write_eof() is None
        assert not ended.is_set()
        assert await _read(pipe[0], 300_000) == data
        await ended.wait()
        assert os.read(pipe[0], 1) == b""

    _run(test)


def test_end_waits_behind_waiting_writes(pipe: tuple[int, int]) -> None:
    async def test() -> None:
        ended = asyncio.Event()
        queue = StdinQueue(pipe[1], ended.set)
        size = QUEUED_BYTES + _PIPE_BYTES
        assert queue.write(bytes(size)) is None
        write = queue.write(b"last")
        write_eof = queue.write_eof()
        assert write is not None
        assert write_eof is not None
        assert queue.write_eof() is write_eof
        assert (await _read(pipe[0], size + 4))[size:] == b"last"
        await write_eof
        assert write.done()
        await ended.wait()
        queue.close()

    _run(test)


def test_cancelled_end_is_taken_back(pipe: tuple[int, int]) -> None:
    async def test() -> None:
        ended = asyncio.Event()
        queue = StdinQueue(pipe[1], ended.set)
        size = QUEUED_BYTES + _PIPE_BYTES
        queue.write(bytes(size))
        write, write_eof = queue.write(b"no"), queue.write_eof()
        assert write is not None
        assert write_eof is not None
        write.cancel()
        write_eof.cancel()
        assert not queue.has_eof
        again = queue.write(b"yes")
        assert again is not None
        assert (await _read(pipe[0], size + 3))[size:] == b"yes"
        assert not ended.is_set()
        assert queue.write_eof() is None
        assert ended.is_set()
        queue.close()

    _run(test)


def test_end_is_due_when_the_reader_goes_away(pipe: tuple[int, int]) -> None:
    async def test() -> None:
        ended = asyncio.Event()
        queue = StdinQueue(pipe[1], ended.set)
        queue.write(bytes(QUEUED_BYTES + _PIPE_BYTES))
        write_eof = queue.write_eof()
        assert write_eof is not None
        os.close(pipe[0])
        await write_eof
        await ended.wait()
        queue.close()

    _run(test)


def test_end_after_close_is_due_at_once(pipe: tuple[int, int]) -> None:
    async def test() -> None:
        ended = asyncio.Event()
        queue = StdinQueue(pipe[1], ended.set)
        queue.close()
        assert queue.write_eof() is None
        assert ended.is_set()

    _run(test)


def test_limits_are_those_of_the_reference() -> None:
    assert process.QUEUED_CHUNKS == 128


def test_a_pipe_that_was_full_is_enlarged(pipe: tuple[int, int]) -> None:
    async def test() -> None:
        fcntl.fcntl(pipe[1], fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        queue = StdinQueue(pipe[1], _never)
        queue.write(bytes(2 * ENLARGED_BYTES))
        # An unprivileged user may have used up the pipe memory that the kernel allows.
        assert fcntl.fcntl(pipe[1], fcntl.F_GETPIPE_SZ) in (PIPE_BYTES, ENLARGED_BYTES)
        assert len(await _read(pipe[0], 2 * ENLARGED_BYTES)) == 2 * ENLARGED_BYTES
        queue.close()

    _run(test)
