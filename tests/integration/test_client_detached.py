"""Detached processes through the client: several clients, slow readers, cuts and relays."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator

import pytest
from tests.support.client_targets import ClientTarget, bounded, machine, through_cutting_proxy

from exec_server import DetachedProcess, Environment, RpcError, StdinClosed, Unsupported, sync
from exec_server.client.connect import connect


@pytest.fixture(scope="module", params=["websocket", "relay"])
def far(request: pytest.FixtureRequest) -> Iterator[ClientTarget]:
    """A server of ours that several clients reach."""
    with machine("ours", request.param) as running:
        yield running


async def _output(process: DetachedProcess) -> bytes:
    return b"".join([chunk.data async for chunk in process])


def test_it_outlives_its_client_and_others_attach(far: ClientTarget) -> None:
    async def scene() -> None:
        async with far.make() as first:
            script = "echo one; read x; echo $x; exit 3"
            async with first.start(["sh", "-c", script], stdin=True, detach=True) as process:
                name = process.name
                assert name is not None
                assert (await anext(process)).data == b"one\n"
        async with far.make() as second, far.make() as third:
            [listed] = [each for each in await second.detached_processes() if each.name == name]
            assert (listed.running, listed.argv[0], listed.attached) == (True, "sh", 0)
            one = await second.attach(name)
            two = await third.attach(name)
            await one.write(b"two\n")
            async with asyncio.TaskGroup() as tasks:
                outputs = [tasks.create_task(_output(each)) for each in (one, two)]
            assert [output.result() for output in outputs] == [b"one\ntwo\n"] * 2
            assert (await one.wait(), two.exit_code) == (3, 3)
            assert one.argv == ("sh", "-c", script)
            with pytest.raises(StdinClosed):
                await two.write(b"late")
            # It has ended; its output is there for those that come later.
            async with third.attach(name, after=1) as late:
                assert await _output(late) == b"two\n"

    bounded(scene())


def test_two_clients_write_signal_and_resize(far: ClientTarget) -> None:
    async def scene() -> None:
        async with far.make() as first, far.make() as second:
            words = ["sh", "-c", "stty -echo; echo ready; while read x; do stty size; done"]
            mine = await first.start(words, tty=True, detach=True)
            assert mine.name is not None
            theirs = await second.attach(mine.name)
            await _until(mine, b"ready")
            await mine.resize(30, 90)
            await mine.write(b"\n")
            await _until(theirs, b"30 90")
            await theirs.resize(31, 91)
            await theirs.write(b"\n")
            await _until(mine, b"31 91")
            await mine.aclose()
            assert theirs.exit_code is None
            await theirs.kill()
            assert await theirs.wait() == 137

    bounded(scene())


async def _until(process: object, text: bytes) -> None:
    seen = b""
    assert hasattr(process, "__anext__")
    while text not in seen:
        seen += (await anext(process)).data


def test_wrong_names(ours: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        with pytest.raises(RpcError, match="unknown detached process nothing"):
            await env.attach("nothing")
        with pytest.raises(RpcError, match="begins with a letter or digit"):
            await env.start(["true"], detach=True, name="a b")
        async with env.start(["sleep", "60"], detach=True, name="taken") as process:
            with pytest.raises(RpcError, match="the name taken is in use"):
                await env.start(["true"], detach=True, name="taken")
            await process.kill()

    ours.play(scene)


def test_the_reference_has_none(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        if there.is_ours:
            assert env.capabilities.process_detach
            return
        with pytest.raises(Unsupported, match="processDetach"):
            env.start(["true"], detach=True)
        with pytest.raises(Unsupported, match="processDetach"):
            env.attach("x")

    there.play(scene)


def test_a_slow_reader_loses_the_oldest_and_counts_it(ours: ClientTarget) -> None:
    size = 40_000_000

    async def scene(env: Environment) -> None:
        script = f"head -c {size} /dev/zero; read x"
        async with env.start(["sh", "-c", script], stdin=True, detach=True) as process:
            assert process.name is not None
            reader = aiter(process)
            received = len((await anext(reader)).data)
            # The process is not paused, although this client does not read: it waits for input.
            async with connect(ours.url) as other, other.attach(process.name) as observer:
                await observer.write(b"\n")
                assert await observer.wait() == 0
            async for chunk in reader:
                received += len(chunk.data)
                if chunk.lost_before:
                    await asyncio.sleep(0)
            assert received + process.lost_bytes == size
            assert process.lost_bytes > 0

    ours.play(scene)


# Prints a batch of numbered lines for each line that it reads.
_PRINTER = """
import sys
number = 0
for line in sys.stdin:
    for _ in range(100):
        print(number, flush=number % 10 == 0)
        number += 1
    sys.stdout.flush()
"""


def test_an_attachment_survives_cuts(ours: ClientTarget) -> None:
    async def scene() -> None:
        async with connect(ours.url) as env:
            words = [sys.executable, "-S", "-c", _PRINTER]
            async with env.start(words, stdin=True, detach=True) as process:
                assert process.name is not None
                async with through_cutting_proxy(ours.url, 7, 30_000) as (cutter, far):
                    attached = await far.attach(process.name)
                    expected, seen = 0, b""
                    while cutter.cuts < 10:
                        await process.write(b"\n")
                        expected += 100
                        while seen.count(b"\n") < expected:
                            seen += (await anext(attached)).data
                    assert seen.split() == [b"%d" % number for number in range(expected)]
                    assert attached.lost_bytes == 0
                    await attached.close_stdin()
                    assert await attached.wait() == 0

    bounded(scene())


def test_without_async(ours: ClientTarget) -> None:
    with sync.connect(ours.url) as env:
        with env.start(["sh", "-c", "echo one; read x"], stdin=True, detach=True) as process:
            name = process.name
            assert name is not None
        with env.attach(name) as again:
            assert next(iter(again)).data == b"one\n"
            assert name in [each.name for each in env.detached_processes()]
            again.close_stdin()
            assert again.wait() == 1
