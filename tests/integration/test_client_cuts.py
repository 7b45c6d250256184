"""Connections that are cut, reset and stalled all the time: nothing is lost, doubled or mixed."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop
from tests.support.client import DEFAULT_TIMEOUT, KINDS
from tests.support.client_targets import bounded, machine, through_cutting_proxy

from exec_server import Chunk, Environment, Process

# Bytes that a connection bears at most, and so about twice of what it bears: not much more than
# it takes to resume a session, so that many are cut in the middle of that.
BEARABLE = 30_000

# Prints a batch of numbered lines with checksums, on both streams, for each line that it reads:
# so it is never ahead by more than a server keeps, however slow the machine is.
BATCH = 200
PRINTER = """
import hashlib, sys
number = 0
for line in sys.stdin:
    if line == "end\\n": break
    for _ in range(int(line)):
        digest = hashlib.sha256(str(number).encode()).hexdigest()[:16]
        print(number, digest, file=sys.stderr if number % 3 == 0 else sys.stdout)
        number += 1
        if number % 10 == 0: sys.stdout.flush()
print("end", number, flush=True)
"""


def line(number: int) -> str:
    return f"{number} {hashlib.sha256(str(number).encode()).hexdigest()[:16]}"


async def read_all(process: Process, is_enough: Callable[[], bool]) -> dict[str, bytes]:
    """Have it print until it is enough; returns all of it."""
    output: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
    for _ in range(4):
        await process.write(f"{BATCH}\n".encode())
    lines = 0
    goes_on = True
    async for chunk in process:
        assert chunk.lost_before == 0
        output[chunk.stream].append(chunk.data)
        before = lines // BATCH
        lines += chunk.data.count(b"\n")
        for _ in range(before, lines // BATCH):
            if goes_on:
                goes_on = not is_enough()
                await process.write(f"{BATCH}\n".encode() if goes_on else b"end\n")
    return {stream: b"".join(parts) for stream, parts in output.items()}


async def print_under_cuts(url: str, seed: int, cuts: int) -> int:
    """One session and one process, until its connection was cut so many times."""
    async with through_cutting_proxy(url, seed, BEARABLE) as (cutter, env):
        words = [sys.executable, "-S", "-c", PRINTER]
        async with env.start(words, stdin=True) as process:
            output = await read_all(process, lambda: cutter.cuts >= cuts)
            assert await process.wait() == 0
            assert process.lost_bytes == 0
    *lines, end = output["stdout"].decode().splitlines()
    count = int(end.removeprefix("end "))
    assert lines == [line(number) for number in range(count) if number % 3]
    expected = [line(number) for number in range(0, count, 3)]
    assert output["stderr"].decode().splitlines() == expected
    return cutter.cuts


@pytest.mark.parametrize("kind", KINDS)
def test_output_survives_500_cuts(kind: str) -> None:
    async def scene(url: str) -> None:
        async with asyncio.TaskGroup() as tasks:
            sessions = [tasks.create_task(print_under_cuts(url, seed, 64)) for seed in range(8)]
        assert sum(session.result() for session in sessions) >= 500

    with machine(kind) as there:
        bounded(scene(there.url), uvloop.run, patience=50 / DEFAULT_TIMEOUT)


@pytest.mark.quick
@pytest.mark.parametrize("kind", KINDS)
def test_writes_arrive_once_and_in_order(kind: str) -> None:
    async def scene(url: str) -> None:
        async with through_cutting_proxy(url, 11, BEARABLE) as (cutter, env):
            async with env.start(["cat"], stdin=True) as process:
                expected = b""
                while cutter.cuts < 60:
                    for _ in range(20):
                        word = f"{len(expected)}\n".encode()
                        expected += word
                        await process.write(word)
                    await asyncio.sleep(0.005)
                received = b""
                while len(received) < len(expected):
                    received += (await anext(process)).data
            assert received == expected

    with machine(kind) as there:
        bounded(scene(there.url), uvloop.run)


@pytest.mark.parametrize("kind", KINDS)
def test_commands_are_started_once(kind: str, tmp_path: Path) -> None:
    """A start whose answer was lost is not made twice, and not forgotten."""
    log = tmp_path / "log"

    async def scene(url: str) -> None:
        async with through_cutting_proxy(url, 12, BEARABLE) as (cutter, env):
            number = 0
            while cutter.cuts < 40:
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(4):
                        tasks.create_task(append(env, number))
                        number += 1
        assert sorted(map(int, log.read_text().split())) == list(range(number))

    async def append(env: Environment, number: int) -> None:
        words = ["sh", "-c", f"echo {number} >> {log}; echo {number}"]
        assert (await env.run(words)).text == f"{number}\n"

    with machine(kind) as there:
        bounded(scene(there.url), uvloop.run)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_beyond_retention_is_declared(kind: str, tmp_path: Path) -> None:
    """Servers keep the last MiB while nobody is connected; the rest is counted."""
    total = 5_000_000
    flag = tmp_path / "flag"
    script = (
        f"echo first; while [ ! -e {flag} ]; do sleep 0.01; done; yes 0123456 | head -c {total}"
    )

    async def scene(url: str) -> None:
        async with through_cutting_proxy(url, 0, 2**40) as (cutter, env):
            words = ["sh", "-c", f"{script}; touch {flag}.done; exit 9"]
            async with env.start(words) as process:
                assert await anext(process) == Chunk("stdout", b"first\n")
                cutter.is_open = False
                cutter.cut()
                flag.touch()
                while not Path(f"{flag}.done").exists():
                    await asyncio.sleep(0.01)
                cutter.is_open = True
                chunks = [chunk async for chunk in process]
                assert await process.wait() == 9
        kept = b"".join(chunk.data for chunk in chunks)
        assert 1_000_000 < len(kept) <= 1_048_576
        assert kept == (b"0123456\n" * (total // 8))[-len(kept) :]
        assert [chunk.lost_before for chunk in chunks] == [process.lost_bytes] + [0] * (
            len(chunks) - 1
        )
        if kind == "ours":
            assert process.lost_bytes == total - len(kept)
        else:  # only how many chunks, which have 8192 bytes at most
            assert (total - len(kept)) / 8192 <= process.lost_bytes < total - len(kept)

    with machine(kind) as there:
        bounded(scene(there.url))
    assert os.listdir(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_runs_and_files_under_cuts(kind: str, tmp_path: Path) -> None:
    async def scene(url: str) -> None:
        async with through_cutting_proxy(url, 13, 30_000) as (cutter, env):
            number = 0
            while cutter.cuts < 40:
                data = os.urandom(3000)
                await env.files.write(tmp_path / "f", data)
                assert await env.files.read(tmp_path / "f") == data
                result = await env.run(["sh", "-c", f"cat; seq {number}; exit 3"], input=data)
                counted = "".join(f"{each}\n" for each in range(1, number + 1))
                assert (result.stdout, result.exit_code) == (data + counted.encode(), 3)
                number += 50

    with machine(kind) as there:
        bounded(scene(there.url), uvloop.run)
