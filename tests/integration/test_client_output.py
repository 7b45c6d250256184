"""Output that is seen while a command runs: lines, dialogues, ports, callbacks and files."""

from __future__ import annotations

import asyncio
import io
import re
import sys
from pathlib import Path

import pytest
from tests.support.client import scaled
from tests.support.client_targets import ClientTarget

from exec_server import Chunk, Environment, PatternNotFound, sync
from exec_server.client.output import Pattern

PATIENCE = scaled(20)
# A web server that takes a moment to start, and then prints much that nobody reads.
SERVER = """
import socket, sys, time
time.sleep(0.1)
with socket.create_server(("127.0.0.1", 0)) as listening:
    print("listening on", listening.getsockname()[1], flush=True)
    sys.stdin.read()
"""


@pytest.mark.quick
def test_lines(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        script = "echo one; echo two >&2; printf 'three\\n\\nlast'"
        async with env.start(["sh", "-c", script]) as process:
            lines = [(line.stream, str(line)) async for line in process.lines()]
        of = {name: [text for stream, text in lines if stream == name] for name, _ in lines}
        assert of == {"stdout": ["one", "three", "", "last"], "stderr": ["two"]}

    there.play(scene)


def test_a_dialogue(there: ClientTarget) -> None:
    """With a terminal, as a person has it."""

    async def scene(env: Environment) -> None:
        words = [sys.executable, "-q", "-i", "-c", "import sys; sys.ps1 = 'PROMPT> '"]
        variables = {"PYTHON_BASIC_REPL": "1", "TERM": "dumb"}
        async with env.start(words, tty=True, env=variables) as repl:
            await repl.read_until(b"PROMPT> ", PATIENCE)
            for number in range(3):
                await repl.write(b"print('<%d>' * 2)\n" % number)
                answer = await repl.read_until(re.compile(rb"\r\n(.*)\r\nPROMPT> "), PATIENCE)
                assert answer.endswith(b"<%d><%d>\r\nPROMPT> " % (number, number))
            await repl.write(b"exit(4)\n")
            with pytest.raises(PatternNotFound, match="the output ended without b'PROMPT> '"):
                await repl.read_until(b"PROMPT> ", PATIENCE)
            assert await repl.wait() == 4

    there.play(scene)


def test_whichever_comes_first(there: ClientTarget) -> None:
    """A program that asks, or does not."""

    async def scene(env: Environment) -> None:
        script = "printf 'user: '; read u; echo hello $u; printf 'port %d ' 80; exit 3"
        async with env.start(["sh", "-c", script], tty=True) as program:
            patterns: list[Pattern] = ["password: ", "user: ", re.compile(rb"port (\d+)")]
            assert (await program.expect(patterns, PATIENCE)).index == 1
            await program.write(b"me\n")
            found = await program.expect(patterns, PATIENCE)
            assert (found.index, found.group(1)) == (2, b"80")
            assert found.before.endswith(b"hello me\r\n")
            with pytest.raises(PatternNotFound, match="the output ended without"):
                await program.expect(patterns, PATIENCE)
            with pytest.raises(TypeError, match="takes a list of patterns"):
                await program.expect("user: ")

    there.play(scene)


def test_a_server_in_the_background(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        words = [sys.executable, "-c", SERVER]
        async with env.start(words, stdin=True) as process:
            with pytest.raises(TimeoutError, match="no b'never' in the output after"):
                await process.wait_for_output(b"never", timeout=0.01)
            found = await process.wait_for_output(re.compile(rb"on (\d+)\n"), PATIENCE)
            port = int(found.split()[1])
            await env.wait_for_port(port, timeout=PATIENCE)
            assert await process.read_until(b"\n") == b"listening on %d\n" % port
        with pytest.raises(TimeoutError, match=f"no program listens at port {port} after"):
            await env.wait_for_port(port, timeout=0.05)

    there.play(scene)


def test_output_is_seen_and_had(there: ClientTarget, tmp_path: Path) -> None:
    async def scene(env: Environment) -> None:
        seen: list[Chunk] = []
        text = io.StringIO()
        script = "yes out | head -n 100000; echo err >&2"
        result = await env.run(
            ["sh", "-c", script], on_output=seen.append, stdout=tmp_path / "out", stderr=text
        )
        expected = b"out\n" * 100_000
        assert (result.stdout, result.stderr) == (expected, b"err\n")
        assert (tmp_path / "out").read_bytes() == expected
        assert text.getvalue() == "err\n"
        assert b"".join(each.data for each in seen if each.stream == "stdout") == expected
        assert len(repr(result)) < 500
        assert len(result.head_and_tail(1000)) < 1100

    there.play(scene)


def test_a_callback_that_is_slow_loses_nothing(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        size = 0

        async def count(chunk: Chunk) -> None:
            nonlocal size
            size += len(chunk.data)
            await asyncio.sleep(0.001)

        result = await env.run(["head", "-c", "3000000", "/dev/zero"], on_output=count)
        assert (size, len(result.stdout), result.lost_bytes) == (3_000_000, 3_000_000, 0)
        # The connection was free all the time.
        assert await env.run(["true"])

    there.play(scene)


def test_an_error_of_a_callback_is_raised(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        def fail(chunk: Chunk) -> None:
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            await env.run(["sh", "-c", "echo x; sleep 1000"], on_output=fail)

    there.play(scene)


def test_without_async(there: ClientTarget, tmp_path: Path) -> None:
    with sync.connect(there.url) as env:
        with env.start(["sh", "-c", "echo one; echo two; echo three"]) as process:
            assert process.wait_for_output("two", timeout=PATIENCE) == b"two"
            lines = process.lines()
            assert next(lines) == "one"
            assert process.read_until(b"o\n", timeout=PATIENCE) == b"two\n"
            assert list(lines) == ["three"]
        seen: list[Chunk] = []
        result = env.run(["echo", "x"], on_output=seen.append, stdout=tmp_path / "out")
        assert result.stdout == seen[0].data == (tmp_path / "out").read_bytes() == b"x\n"
        with pytest.raises(TimeoutError, match="no program listens at port 1 after"):
            env.wait_for_port(1, timeout=0.01)
