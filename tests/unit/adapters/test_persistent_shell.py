"""The shell of an adapter with a scripted process: marks, limits and ends."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any, cast

import pytest

from exec_server.adapters import persistent_shell
from exec_server.adapters.persistent_shell import PersistentShell, ShellResult
from exec_server.client.environment import Environment
from exec_server.client.results import Chunk
from exec_server.errors import SessionLost, StdinClosed

Answer = Callable[[bytes], list[bytes]]


class FakeProcess:
    """A bash that prints what `answer` makes of the mark of each command."""

    def __init__(self, answer: Answer, *, exit_code: int | None = None) -> None:
        self._answer = answer
        self._exit_code = exit_code
        self.exit_code: int | None = None
        self.is_over = False
        self.closed = 0
        self.written: list[bytes] = []
        self.failure: Exception | None = None
        self._chunks: list[bytes] | None = []

    def __await__(self) -> Any:
        return asyncio.sleep(0).__await__()

    async def write(self, data: bytes) -> None:
        if self.failure is not None:
            raise self.failure
        self.written.append(data)
        if words := re.search(rb"(\w{32}) (\w{32})", data):
            self._chunks = self._answer(b"\n%b-%b:" % words.groups())
            self.exit_code = self._exit_code

    async def read_some(self) -> list[Chunk]:
        if self._chunks:
            data = self._chunks.pop(0)
            return [Chunk("stdout", data, 7 if data == b"after a gap" else 0)] if data else []
        await asyncio.Event().wait()
        raise AssertionError

    async def aclose(self) -> None:
        self.closed += 1
        if self.failure is not None:
            raise self.failure


def shell_of(process: FakeProcess, output_bytes: int = 100) -> PersistentShell:
    class FakeEnvironment:
        def start(self, argv: list[str], **options: Any) -> FakeProcess:
            assert argv[-1].startswith('unset "${!SECRET_@}"; exec /bin/bash')
            assert options["env"] == {"A": "b", "TERM": "dumb"}
            return process

    return PersistentShell(
        cast(Environment, FakeEnvironment()),
        cwd="/",
        env={"A": "b"},
        clean_env=False,
        without="SECRET_",
        output_bytes=output_bytes,
        sandbox=None,
        user=None,
    )


def run(process: FakeProcess, *commands: str, **options: Any) -> list[ShellResult]:
    async def scene() -> list[ShellResult]:
        shell = shell_of(process, **options)
        await shell.start()
        results = [await shell.run(command, 0.01, lambda: None) for command in commands]
        await shell.close()
        return results

    return asyncio.run(scene())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent_shell, "TICK_SECONDS", 0.001)


def test_output_ends_at_the_mark_and_the_rest_is_that_of_the_next_command() -> None:
    process = FakeProcess(lambda mark: [b"out", mark, b"3:\nlate"])
    first, second = run(process, "it's", "next")
    assert first == ShellResult(b"out", 3, 0)
    assert second == ShellResult(b"lateout", 3, 0)
    assert process.written[0] == b"exec 187>&1\n"
    assert b"""eval 'it'"'"'s'\n}""" in process.written[1]
    assert process.closed == 1


def test_the_end_of_long_output_is_kept() -> None:
    pieces = [b"x" * 1000, b"after a gap", b"y" * 95]
    (done,) = run(FakeProcess(lambda mark: [*pieces, mark + b"0:\n"]), "command")
    assert done == ShellResult(b"a gap" + b"y" * 95, 0, 1000 + 6 + 7)


def test_a_mark_in_the_output_of_another_command_is_output() -> None:
    (done,) = run(FakeProcess(lambda mark: [b"\nab-cd:0:\n" + mark + b"1:\n"]), "command")
    assert done == ShellResult(b"\nab-cd:0:\n", 1, 0)


def test_a_late_command_gives_its_output() -> None:
    assert run(FakeProcess(lambda _: [b"begun"]), "c") == [ShellResult(b"begun", None, 0, True)]


def test_a_shell_that_ends() -> None:
    assert run(FakeProcess(lambda _: [b"last", b""]), "c") == [ShellResult(b"last", None, 0)]
    # Its children hold the pipe.
    process = FakeProcess(lambda _: [b"last"], exit_code=3)
    assert run(process, "c") == [ShellResult(b"last", None, 0)]
    assert shell_of(process).is_over


def test_a_shell_without_stdin_has_ended() -> None:
    async def scene() -> None:
        process = FakeProcess(lambda _: [])
        shell = shell_of(process)
        process.failure = StdinClosed("the process has ended")
        assert await shell.run("c", 1, lambda: None) == ShellResult(b"", None, 0)
        process.failure = SessionLost("gone")
        with pytest.raises(SessionLost):
            await shell.run("c", 1, lambda: None)
        await shell.close()

    asyncio.run(scene())


def test_the_caller_can_stop_a_command() -> None:
    def check() -> None:
        raise LookupError("stop")

    async def scene() -> None:
        with pytest.raises(LookupError):
            await shell_of(FakeProcess(lambda _: [])).run("c", 1, check)

    asyncio.run(scene())
