"""Output that is not read, or slowly: it stops no other process, and is lost only if unwanted."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest
from tests.support.client_targets import ClientTarget

from exec_server import sync
from exec_server.client.engine import flow_control
from exec_server.client.environment import Environment
from exec_server.client.results import Chunk

MEGABYTE = 1_000_000
LINE = b"0123456\n"


def verbose(megabytes: int, marker: Path) -> list[str]:
    """A server that prints so much, leaves a marker, and goes on."""
    size = megabytes * MEGABYTE
    return ["sh", "-c", f"yes 0123456 | head -c {size}; echo > {marker}; sleep 100"]


def until_exists(marker: Path) -> list[str]:
    return ["sh", "-c", f"until test -e {marker}; do sleep 0.01; done; echo done"]


def numbers(count: int) -> bytes:
    return b"".join(b"%d\n" % number for number in range(1, count + 1))


def check(read: list[tuple[bytes, int]], lost: int, megabytes: int, *, is_exact: bool) -> None:
    """All output is there, or declared as lost."""
    size = sum(len(data) for data, _ in read)
    assert lost == sum(gap for _, gap in read)
    if megabytes * MEGABYTE < flow_control.OVERFLOW_BYTES // 2:
        assert (size, lost) == (megabytes * MEGABYTE, 0)
    elif is_exact:
        assert size + lost == megabytes * MEGABYTE
    else:
        assert lost > 0


@pytest.mark.parametrize("megabytes", [3, 50])
def test_a_server_in_the_background(there: ClientTarget, tmp_path: Path, megabytes: int) -> None:
    marker = tmp_path / "marker"

    async def scene(env: Environment) -> None:
        async with env.start(verbose(megabytes, marker)) as server:
            async with env.start(["seq", "200000"]) as other:
                seen = [chunk.data async for chunk in other]
            assert b"".join(seen) == numbers(200_000)
            assert (await env.run(until_exists(marker))).stdout == b"done\n"
            assert server._output.weight < flow_control.OVERFLOW_BYTES + MEGABYTE
            read = []
            async for chunk in server:
                read.append((chunk.data, chunk.lost_before))
                size = sum(len(data) for data, _ in read) + server.lost_bytes
                if size >= megabytes * MEGABYTE or not (server.lost_bytes == 0 or there.is_ours):
                    break
            check(read, server.lost_bytes, megabytes, is_exact=there.is_ours)

    there.play(scene)


@pytest.mark.parametrize("megabytes", [3, 50])
def test_the_same_in_threads(there: ClientTarget, tmp_path: Path, megabytes: int) -> None:
    marker = tmp_path / "marker"
    with sync.Environment(there.make) as env, env.start(verbose(megabytes, marker)) as server:
        with env.start(["seq", "200000"]) as other:
            assert b"".join(chunk.data for chunk in other) == numbers(200_000)
        assert env.run(until_exists(marker)).stdout == b"done\n"
        read = []
        for chunk in itertools.islice(server, 1000):
            read.append((chunk.data, chunk.lost_before))
            if sum(len(data) for data, _ in read) >= 3 * MEGABYTE:
                break
        assert sum(len(data) for data, _ in read) >= 3 * MEGABYTE
        assert not any(gap for _, gap in read)  # it is behind the queued output


def test_a_slow_reader_loses_nothing_and_stops_nobody(ours: ClientTarget) -> None:
    """Even if it waits for other commands all the time."""
    size = 40 * MEGABYTE

    async def scene(env: Environment) -> None:
        async with env.start(["sh", "-c", f"yes 0123456 | head -c {size}"]) as process:
            read = []
            async for chunk in process:
                read.append(chunk.data)
                if len(read) in (1, 20, 2000):
                    async with env.start(["seq", "200000"]) as other:
                        seen = [chunk.data async for chunk in other]
                    assert b"".join(seen) == numbers(200_000)
                    await env.run(["sleep", "0.3"])
                    assert process._output.weight < flow_control.PAUSED_BYTES // 2
            assert process.exit_code == 0
        assert b"".join(read) == LINE * (size // len(LINE))
        assert process.lost_bytes == 0

    ours.play(scene)


def test_a_paused_process_survives_a_lost_connection(ours: ClientTarget) -> None:
    size = 20 * MEGABYTE

    async def scene(env: Environment) -> None:
        async with env.start(["sh", "-c", f"yes 0123456 | head -c {size}"]) as process:
            first = await anext(process)
            while process._output._requests._current != "pause":
                await asyncio.sleep(0.01)
            connection = env.session._connection
            assert connection is not None
            connection.stream.close(1001, "test")
            read = [first.data] + [chunk.data async for chunk in process]
        assert b"".join(read) == LINE * (size // len(LINE))
        assert process.lost_bytes == 0

    ours.play(scene)


def test_a_reader_that_has_left_does_not_stop_the_process(
    there: ClientTarget, tmp_path: Path
) -> None:
    """The dev server whose first lines are read, and then no more."""
    marker = tmp_path / "marker"

    async def scene(env: Environment) -> None:
        async with env.start(verbose(40, marker)) as server:
            async for chunk in server:
                assert chunk.data.startswith(LINE)
                break
            assert (await env.run(until_exists(marker))).stdout == b"done\n"

    there.play(scene)
    marker.unlink()
    with sync.Environment(there.make) as env, env.start(verbose(40, marker)) as server:
        for chunk in server:
            assert chunk.data.startswith(LINE)
            break
        assert env.run(until_exists(marker)).stdout == b"done\n"


def test_the_end_of_unread_output_is_kept_when_the_process_has_ended(ours: ClientTarget) -> None:
    """The server forgets it soon; the client reads the rest at once."""

    async def scene(env: Environment) -> None:
        script = f"yes 0123456 | head -c {40 * MEGABYTE}; echo end; exit 3"
        async with env.start(["sh", "-c", script]) as process:
            assert await process.wait() == 3
            while not process.is_over:
                await asyncio.sleep(0.01)
            chunks = [chunk async for chunk in process]
        size = sum(len(chunk.data) for chunk in chunks)
        assert size + process.lost_bytes == 40 * MEGABYTE + 4
        assert chunks[-1].data.endswith(b"end\n")

    ours.play(scene)


def test_a_run_with_a_slow_receiver_loses_nothing(there: ClientTarget) -> None:
    """Slower than a queue may be untouched while other tasks wait for an answer."""
    size = 24 * MEGABYTE
    command = ["sh", "-c", f"yes 0123456 | head -c {size}"]
    received: list[int] = []

    def receive(chunk: Chunk) -> None:
        received.append(len(chunk.data))

    async def receive_slowly(chunk: Chunk) -> None:
        if not received:
            await asyncio.sleep(2 * flow_control.STALL_SECONDS)
        receive(chunk)

    async def scene(env: Environment) -> None:
        result = await env.run(command, on_output=receive_slowly)
        assert (sum(received), len(result.stdout), result.lost_bytes) == (size, size, 0)

    there.play(scene)
    received.clear()
    with sync.Environment(there.make) as env:  # the thread of the caller is one consumer
        result = env.run(command, on_output=receive_slowly)
        assert (sum(received), len(result.stdout), result.lost_bytes) == (size, size, 0)
