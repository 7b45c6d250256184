"""Processes of the async client while they run, whether somebody reads or not; on both servers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.client import scaled
from tests.support.client_targets import ClientTarget, bounded
from tests.support.server_internals import eventually, is_running

from exec_server import (
    Chunk,
    Environment,
    Process,
    ProcessLost,
    ProgramNotFound,
    SessionLost,
    StdinClosed,
    Unsupported,
)
from exec_server.client.engine import flow_control as queue_module
from exec_server.errors import InvalidParams


async def read_until(process: Process, end: bytes) -> bytes:
    """The output up to a mark, which a terminal may deliver in several chunks."""
    output = b""
    while not output.endswith(end):
        output += (await anext(process)).data
    return output


async def collect(process: Process) -> dict[str, bytes]:
    output: dict[str, list[bytes]] = {}
    async for chunk in process:
        output.setdefault(chunk.stream, []).append(chunk.data)
    return {stream: b"".join(parts) for stream, parts in output.items()}


@pytest.mark.quick
def test_a_process_as_it_runs(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        script = 'echo ready; while read a; do echo "<$a>"; echo e >&2; done'
        async with env.start(["sh", "-c", script], stdin=True) as process:
            assert await anext(process) == Chunk("stdout", b"ready\n")
            assert (process.exit_code, len(process.id)) == (None, 32)
            for word in (b"one\n", b"t", b"wo\n"):
                await process.write(word)
            seen: dict[str, bytes] = {"stdout": b"", "stderr": b""}
            while seen != {"stdout": b"<one>\n<two>\n", "stderr": b"e\ne\n"}:
                chunk = await anext(process)
                seen[chunk.stream] += chunk.data
            await process.interrupt()
            assert await process.wait() == 130
            assert await collect(process) == {}
        with pytest.raises(StdinClosed, match="the process has ended"):
            await process.write(b"late")

    there.play(scene)


def test_leaving_kills_with_all_descendants(there: ClientTarget) -> None:
    word = f"33{os.getpid()}"

    async def scene(env: Environment) -> None:
        async with env.start(["sh", "-c", f"sleep {word} & sleep {word}"]):
            while not is_running(word):
                await asyncio.sleep(0.01)
        eventually("they are gone", lambda: not is_running(word))
        with pytest.raises(ZeroDivisionError):
            async with env.start(["sleep", word]):
                raise ZeroDivisionError
        eventually("it is gone", lambda: not is_running(word))

    there.play(scene)


def test_leaving_the_environment_kills_what_is_left(there: ClientTarget) -> None:
    word = f"34{os.getpid()}"

    async def scene(env: Environment) -> None:
        await env.start(["sleep", word]).__aenter__()  # and nobody leaves it
        while not is_running(word):
            await asyncio.sleep(0.01)

    there.play(scene)
    eventually("it is gone", lambda: not is_running(word))


def test_leaving_the_environment_ends_what_is_under_way(there: ClientTarget) -> None:
    """With the reason, not with the exit code of having been killed."""
    words = [f"36{os.getpid()}{number}" for number in range(4)]

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        async with there.make() as env:
            process = await env.start(["sleep", words[0]], stdin=True).__aenter__()
            waiting = [
                loop.create_task(work)
                for work in (
                    env.run(["sleep", words[1]]),
                    env.run(["sleep", words[2]], timeout=100),
                    env.run(["sleep", words[3]], input=bytes(3_000_000)),
                    process.wait(),
                    process.read_some(),
                    process.write(bytes(9_000_000)),
                )
            ]
            while not all(map(is_running, words)):
                await asyncio.sleep(0.01)
        done, late = await asyncio.wait(waiting, timeout=scaled(8))
        assert late == set()
        for each in done:
            with pytest.raises(SessionLost, match="the environment was closed"):
                each.result()
        with pytest.raises(SessionLost):
            await env.run(["true"])
        with pytest.raises(SessionLost):
            async with env.start(["true"]):
                raise AssertionError

    bounded(scene())
    eventually("they are gone", lambda: not any(map(is_running, words)))


def test_a_process_is_used_inside_of_its_block(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        process = env.start(["cat"], stdin=True)
        for use in (
            process.wait,
            process.read_some,
            process.__anext__,
            lambda: process.write(b"x"),
            process.close_stdin,
            process.interrupt,
            process.terminate,
            process.kill,
            lambda: process.signal("INT"),
        ):
            with pytest.raises(RuntimeError, match="is not started: await it, or use it"):
                await use()
        with pytest.raises(RuntimeError, match="is not started"):
            process.id  # noqa: B018
        async with process:
            with pytest.raises(RuntimeError, match="opened only once"):
                await process.__aenter__()
            await process.write(b"x")
            assert (await anext(process)).data == b"x"
        with pytest.raises(RuntimeError, match="opened only once"):
            await process.__aenter__()
        assert await process.wait() == 137
        assert await process.read_some() == []

    there.play(scene)


def test_what_was_not_started_has_no_end(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        process = env.start(["no-such-program"])
        with pytest.raises(ProgramNotFound):
            await process.__aenter__()
        for use in (process.wait, process.read_some):
            with pytest.raises(ProcessLost, match="abandoned"):
                await use()

    there.play(scene)


def test_no_input_without_asking_for_it(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        async with env.start(["sleep", "100"]) as process:
            with pytest.raises(StdinClosed, match="use start"):
                await process.write(b"x")

    there.play(scene)


def test_the_end_of_input(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        async with env.start(["sort"], stdin=True) as process:
            await process.write(b"b\na\n")
            if not env.capabilities.process_close_stdin:
                with pytest.raises(Unsupported, match=r"processCloseStdin: .*use run\(input="):
                    await process.close_stdin()
                return
            await process.close_stdin()
            assert await collect(process) == {"stdout": b"a\nb\n"}
            assert await process.wait() == 0
            with pytest.raises(StdinClosed):
                await process.write(b"c\n")

    there.play(scene)


def test_a_terminal(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        words = ["sh", "-c", "stty size; echo $TERM; cat"]
        async with env.start(words, tty=True, size=(33, 99)) as process:
            assert await read_until(process, b"color\r\n") == b"33 99\r\nxterm-256color\r\n"
            await process.write(b"typed\n")
            await process.close_stdin()  # Ctrl-D
            assert (await collect(process))["pty"].replace(b"^D\b\b", b"") == b"typed\r\n" * 2
            assert await process.wait() == 0

    there.play(scene)


@pytest.mark.parametrize("size", [(1,), (1, 2, 3), (-1, 5), (0, 5), (70_000, 5), ("3", "4"), "ab"])
def test_a_size_that_is_none_is_refused(there: ClientTarget, size: Any) -> None:
    async def scene(env: Environment) -> None:
        with pytest.raises(
            InvalidParams, match="size must be rows and columns, each from 1 to 65535"
        ):
            env.start(["true"], tty=True, size=size)

    there.play(scene)


@pytest.mark.parametrize("begun", [b"", b"a line\n", b"no newline"])
def test_the_end_of_input_of_a_terminal(there: ClientTarget, begun: bytes) -> None:
    """After it was written in pieces; and no end is left for who reads next."""

    async def scene(env: Environment) -> None:
        words = ["sh", "-c", "stty -echo; echo ready; cat; read line; echo next $line"]
        async with env.start(words, tty=True) as process:
            await read_until(process, b"ready\r\n")
            for byte in begun:
                await process.write(bytes([byte]))
            await process.close_stdin()
            await process.write(b"one\n")
            output = (await collect(process))["pty"]
            assert output == begun.replace(b"\n", b"\r\n") + b"next one\r\n"

    there.play(scene)


def test_another_size(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        script = "trap 'stty size; exit 0' WINCH; echo ready; while :; do sleep 0.05; done"
        async with env.start(["sh", "-c", script], tty=True) as process:
            await read_until(process, b"ready\r\n")
            if not env.capabilities.process_resize:
                with pytest.raises(Unsupported, match="processResize"):
                    await process.resize(44, 55)
                return
            await process.resize(44, 55)
            assert (await collect(process))["pty"] == b"44 55\r\n"

    there.play(scene)


@pytest.mark.parametrize(("name", "code"), [("INT", 130), ("SIGKILL", 137), ("term", 143)])
def test_signals_by_name(there: ClientTarget, name: str, code: int) -> None:
    async def scene(env: Environment) -> None:
        async with env.start(["sleep", "100"]) as process:
            if name == "term" and not env.capabilities.process_signals:
                with pytest.raises(Unsupported, match="SIGTERM cannot be sent, only INT and KILL"):
                    await process.signal(name)
                return
            await process.signal(name)
            assert await process.wait() == code

    there.play(scene)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (9, 137), (15, 143)])
def test_signals_by_number(there: ClientTarget, number: int, code: int) -> None:
    async def scene(env: Environment) -> None:
        async with env.start(["sleep", "100"]) as process:
            with pytest.raises(InvalidParams, match="unknown signal number 12345"):
                await process.signal(12345)
            with pytest.raises(TypeError, match="a signal is a name or a number, not float"):
                await process.signal(1.5)  # type: ignore[arg-type]
            if number == 15 and not env.capabilities.process_signals:
                with pytest.raises(Unsupported, match="SIGTERM cannot be sent, only INT and KILL"):
                    await process.signal(number)
                return
            await process.signal(number)
            assert await process.wait() == code

    there.play(scene)


def test_what_runs(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        if not env.capabilities.process_list:
            with pytest.raises(Unsupported, match="processList"):
                await env.processes()
            return
        async with env.start(["sleep", "100"]) as process:
            [listed] = await env.processes()
            assert (listed.process_id, listed.argv, listed.running) == (
                process.id,
                ["sleep", "100"],
                True,
            )
            assert await env.processes(running=True) == [listed]
            assert await env.processes(running=False) == []
            await process.kill(wait=True)
            assert process.exit_code == 137
            assert await env.processes(running=True) == []
            assert [each.exit_code for each in await env.processes(running=False)] == [137]

    there.play(scene)


# ---- nobody reads ---------------------------------------------------------------------


def test_a_process_that_nobody_reads_is_slowed_down(there: ClientTarget) -> None:
    """Its output waits, in no more room than there may be, and all of it is there later."""
    total = 40_000_000

    async def scene(env: Environment) -> None:
        script = f"yes 0123456 | head -c {total}"
        async with env.start(["sh", "-c", script]) as process:
            first = await anext(process)
            while process._output.weight < queue_module.FULL_BYTES:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)  # what comes now would be too much
            # Some of it was under way when the process was paused.
            assert process._output.weight < queue_module.OVERFLOW_BYTES
            assert process.exit_code is None
            rest = (await collect(process))["stdout"]
            assert first.data + rest == b"0123456\n" * (total // 8)
            assert process.lost_bytes == 0

    there.play(scene)


def test_calls_are_answered_while_output_waits(there: ClientTarget) -> None:
    """Whoever takes output and makes calls in between must not wait for themselves."""

    async def scene(env: Environment) -> None:
        async with env.start(["sh", "-c", "yes 0123456 | head -c 4000000"]) as process:
            output = []
            async for chunk in process:
                output.append(chunk.data)
                if len(output) < 25:
                    assert await env.files.exists("/")
                    assert await env.run(["true"])
            assert b"".join(output) == b"0123456\n" * 500_000
            assert process.lost_bytes == 0

    there.play(scene)


def test_waiting_without_reading_ends(there: ClientTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for some output; then the process goes on, and what is lost is declared."""
    monkeypatch.setattr(queue_module, "OVERFLOW_BYTES", 3_000_000)
    total = 60_000_000

    async def scene(env: Environment) -> None:
        async with env.start(["sh", "-c", f"yes 0123456 | head -c {total}; exit 5"]) as process:
            assert await process.wait() == 5
            chunks = [chunk async for chunk in process]
        output = b"".join(chunk.data for chunk in chunks)
        gaps = [chunk.lost_before for chunk in chunks if chunk.lost_before]
        # Our server keeps up to 16 MiB of recent output, the reference 1 MiB.
        assert len(output) < (24_000_000 if there.is_ours else 6_000_000)
        assert gaps == [process.lost_bytes]
        if there.is_ours:
            assert len(output) + process.lost_bytes == total
        else:  # it does not say; each lost chunk has at least a byte
            assert process.lost_bytes >= (total - len(output)) / 8192

    there.play(scene)


# ---- Ctrl-C on a terminal ---------------------------------------------------------------

_RAW = """
import os, tty
tty.setraw(0)
os.write(1, b"raw;")
print(os.read(0, 9), end=";", flush=True)
"""


def test_an_interrupt_on_a_terminal_ends_the_foreground_program(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        shell = ["bash", "--norc", "--noprofile", "-i"]
        async with env.start(shell, tty=True, env={"PS1": "> "}) as process:
            await process.write(b"(echo run''ning; exec sleep 1000)\n")
            await process.read_until(b"running\r\n")
            await process.interrupt()
            await process.write(b"echo code $?; exit 7\n")
            await process.read_until(b"code 130\r\n")
            assert await process.wait() == 7
        await process.interrupt()  # nothing is left to interrupt

    there.play(scene)


def test_a_program_that_reads_keys_gets_an_interrupt_as_one(
    there: ClientTarget, python: Callable[[str], list[str]]
) -> None:
    async def scene(env: Environment) -> None:
        async with env.start(python(_RAW), tty=True) as process:
            await process.read_until(b"raw;")
            await process.interrupt()
            await process.read_until(rb"b'\x03';")
            assert await process.wait() == 0

    there.play(scene)
