"""A shell session with a scripted process: marks, limits, time limits and ends."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import subprocess
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from exec_server.client import shell_session
from exec_server.client.commands import CollectedOutput, OutputLimit
from exec_server.client.exceptions import Timeout
from exec_server.client.process import Process
from exec_server.client.results import Chunk, ShellResult
from exec_server.client.shell_session import ShellSession, _Left, _MarkedOutput, shell_words
from exec_server.errors import SessionLost, StartupError, StdinClosed, Unsupported

Answer = Callable[[bytes], list[bytes]]
ENDS = b"the end of the output"


class FakeProcess:
    """A shell with one stream, which prints what `answer` makes of the mark of each command."""

    def __init__(self, answer: Answer, *, exit_code: int | None = None) -> None:
        self._answer = answer
        self._exit_code = exit_code
        self.exit_code: int | None = None
        self.closed = 0
        self.interrupts = 0
        self.is_shell = True
        self.is_silent = False  # the server does not answer
        self.commands: list[bytes] = []
        self.failure: BaseException | None = None
        self._chunks: list[bytes] = []

    def __await__(self) -> Any:
        return asyncio.sleep(0).__await__()

    def __aiter__(self) -> FakeProcess:
        return self

    async def __anext__(self) -> Chunk:
        raise AssertionError

    async def write(self, data: bytes) -> None:
        if self.failure is not None:
            raise self.failure
        words = re.search(rb"(\w{32}) (\w{32})", data)
        assert words is not None
        mark = b"%b-%b:" % words.groups()
        if not self.is_shell:
            return
        if b"unset HISTFILE" in data:
            self._chunks = [mark + b"0:\n"]
            return
        self.commands.append(data)
        self._chunks += self._answer(mark)
        self.exit_code = self._exit_code

    async def read_some(self) -> list[Chunk]:
        if self._chunks:
            data = self._chunks.pop(0)
            lost = 7 if data == b"after a gap" else 0
            return [] if data == ENDS else [Chunk("stdout", data, lost)]
        await asyncio.Event().wait()
        raise AssertionError

    async def interrupt(self) -> None:
        self.interrupts += 1
        if self.is_silent:
            await asyncio.Event().wait()

    async def wait(self, timeout: float) -> int:
        if self.exit_code is None:
            raise TimeoutError
        return self.exit_code

    async def aclose(self) -> None:
        self.closed += 1
        if self.is_silent:
            await asyncio.Event().wait()
        if self.exit_code is None:
            self.exit_code = 137


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_session, "QUIET_SECONDS", 0.001)
    monkeypatch.setattr(shell_session, "INTERRUPT_SECONDS", 0.002)


async def connected() -> None:
    """There is a connection."""


def session_of(
    *processes: FakeProcess, wait_connected: Callable[[], Awaitable[None]] = connected
) -> ShellSession:
    waiting = iter(processes)

    def start(words: list[str]) -> Process:
        assert words[-2:] == ["sh", "-i"]
        return cast(Process, next(waiting))

    return ShellSession(start, ["sh", "-i"], is_merged=True, wait_connected=wait_connected)


def run(process: FakeProcess, *commands: str, **options: Any) -> list[ShellResult]:
    async def scene() -> list[ShellResult]:
        async with session_of(process, FakeProcess(lambda _: [])) as shell:
            return [await shell.run(command, **options) for command in commands]

    return asyncio.run(scene())


def parts(result: ShellResult) -> tuple[bytes, int, bool]:
    return result.stdout, result.exit_code, result.shell_ended


def test_output_ends_at_the_mark_and_the_rest_is_that_of_the_next_command() -> None:
    process = FakeProcess(lambda mark: [b"out", mark, b"3:\nlate"])
    first, second = run(process, "it's", "next")
    assert (parts(first), parts(second)) == ((b"out", 3, False), (b"lateout", 3, False))
    redirections = b" </dev/null >&7 2>&8 7>&- 8>&-\n"
    assert b"""command eval 'it'"'"'s'""" + redirections in process.commands[0]
    assert first.argv == ("sh", "-c", "it's")
    assert rb"(\command exit 3) || \command eval next" + redirections in process.commands[1]
    assert process.closed == 1


def test_output_is_bounded_and_losses_are_counted() -> None:
    process = FakeProcess(lambda mark: [b"x" * 1000, b"after a gap", b"y" * 95 + mark + b"0:\n"])
    (done,) = run(process, "command", output_limit=OutputLimit(tail=100))
    assert done.stdout == b"a gap" + b"y" * 95
    assert (done.lost_bytes, done.lost_stdout) == (1006 + 7, 1006)


def test_a_mark_of_another_command_is_output() -> None:
    (done,) = run(FakeProcess(lambda mark: [b"ab-cd:0:\n" + mark + b"1:\n"]), "command")
    assert parts(done) == (b"ab-cd:0:\n", 1, False)


def test_a_mark_with_more_than_an_exit_code_is_output() -> None:
    digits = b"9" * 5000
    process = FakeProcess(lambda mark: [mark + digits + b":\n" + mark + b"1:\n"])
    (done,) = run(process, "command")
    assert (done.stdout.endswith(digits + b":\n"), done.exit_code) == (True, 1)


def test_a_late_command_is_interrupted() -> None:
    marks: list[bytes] = []

    def answer(mark: bytes) -> list[bytes]:
        marks.append(mark)
        if len(marks) == 1:
            return [b"begun"]
        # bash prints the mark that was sent with the command as well.
        return [] if len(marks) == 2 else [b"more", *(each + b"130:\n" for each in marks[:3])]

    process = FakeProcess(answer)
    with pytest.raises(Timeout, match=r"command of sh did not end .* and was interrupted") as late:
        run(process, "command", timeout=0.001)
    assert isinstance(late.value.result, ShellResult)
    assert parts(late.value.result) == (b"begunmore", 130, False)
    assert (process.interrupts, process.closed) == (2, 1)


def test_a_command_that_cannot_be_interrupted_is_killed_with_the_shell() -> None:
    process = FakeProcess(lambda _: [b"begun"])
    with pytest.raises(Timeout, match="killed with its shell") as late:
        run(process, "command", timeout=0.001)
    assert isinstance(late.value.result, ShellResult)
    assert parts(late.value.result)[1:] == (137, True)
    assert (process.interrupts, process.closed) == (3, 1)
    assert late.value.is_killed
    assert "shell_ended=True" in repr(late.value.result)

    async def refuse() -> None:
        raise Unsupported("processSignals", "not here")

    process = FakeProcess(lambda _: [b"begun"])
    process.interrupt = refuse  # type: ignore[method-assign]
    with pytest.raises(Timeout, match="killed with its shell"):
        run(process, "command", timeout=0.001)


def test_a_server_that_does_not_answer_is_not_waited_for() -> None:
    process = FakeProcess(lambda _: [b"begun"])
    process.is_silent = True
    with pytest.raises(Timeout, match="did not report its end") as late:
        run(process, "command", timeout=0.001)
    assert not late.value.is_killed
    assert str(late.value).endswith(": the next command gets a new shell with none of its state")
    assert (process.interrupts, process.closed) == (1, 1)


def test_a_command_is_not_sent_without_a_connection() -> None:
    process = FakeProcess(lambda mark: [b"out", mark + b"0:\n"])
    is_connected = asyncio.Event()

    async def wait_connected() -> None:
        await is_connected.wait()

    async def scene() -> None:
        async with session_of(process, wait_connected=wait_connected) as shell:
            with pytest.raises(Timeout, match=r"^the command of sh was not sent within") as late:
                await shell.run("command", timeout=0.001)
            assert not late.value.was_sent
            assert late.value.is_killed
            assert isinstance(late.value.result, ShellResult)
            assert parts(late.value.result) == (b"", 137, False)
            assert (process.commands, process.interrupts, process.closed) == ([], 0, 0)
            is_connected.set()
            assert parts(await shell.run("command", timeout=10)) == (b"out", 0, False)

    asyncio.run(scene())


def test_the_start_of_a_new_shell_has_the_time_of_its_command() -> None:
    ended = FakeProcess(lambda mark: [mark + b"0:\n", ENDS], exit_code=0)
    silent = FakeProcess(lambda _: [])
    silent.is_shell = False

    async def scene() -> None:
        async with session_of(ended, silent) as shell:
            await shell._kill()
            with pytest.raises(Timeout, match="was not sent") as late:
                await shell.run("command", timeout=0.001)
            assert not late.value.was_sent
            assert silent.closed == 1

    asyncio.run(scene())


def test_a_mark_that_a_shell_has_discarded_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_session, "MARK_SECONDS", 0.001)
    marks: list[bytes] = []

    def answer(mark: bytes) -> list[bytes]:
        marks.append(mark)
        return [mark + b"130:\n"] if len(marks) == 3 else []

    (done,) = run(FakeProcess(answer), "kill -INT $$")
    assert parts(done) == (b"", 130, False)


def test_complaints_of_bash_about_its_terminal_are_no_output() -> None:
    text = b"bash: [%d: 2 (255)] tcsetattr: Inappropriate ioctl for device\n"
    outputs = b"a" + b" b: [c] tcsetattr: d\n" + text % 12 + b"e\n" + text % 3
    (done,) = run(FakeProcess(lambda mark: [outputs + mark + b"0:\n"]), "c")
    assert done.stdout == b"a b: [c] tcsetattr: d\ne\n"


def test_a_shell_that_ends_is_replaced() -> None:
    async def scene() -> None:
        processes = [
            FakeProcess(lambda _: [b"last", ENDS], exit_code=3),
            FakeProcess(lambda _: [b"last"], exit_code=4),  # its children hold the pipe
            FakeProcess(lambda mark: [b"anew", mark + b"0:\n"]),
        ]
        async with session_of(*processes) as shell:
            assert parts(await shell.run("c")) == (b"last", 3, True)
            assert parts(await shell.run("c")) == (b"last", 4, True)
            assert parts(await shell.run("c")) == (b"anew", 0, False)
            assert [each.closed for each in processes] == [1, 1, 0]
            processes[2].failure = StdinClosed("the process has ended")
            processes[2]._chunks = [ENDS]
            assert parts(await shell.run("c")) == (b"", 137, True)

    asyncio.run(scene())


def test_a_program_that_is_no_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_session, "START_SECONDS", 0.001)
    process = FakeProcess(lambda mark: [])
    process.is_shell = False
    with pytest.raises(StartupError, match=r"sh is no POSIX shell .* did not answer"):
        run(process)
    assert process.closed == 1


def test_a_session_that_is_lost() -> None:
    async def scene() -> None:
        process = FakeProcess(lambda mark: [mark + b"0:\n"])
        other = FakeProcess(lambda mark: [mark + b"5:\n"])
        async with session_of(process, other) as shell:
            process.failure = SessionLost("gone")
            with pytest.raises(SessionLost):
                await shell.run("c")
            assert (process.interrupts, process.closed) == (0, 1)
            assert (await shell.run("c")).exit_code == 5  # after `reconnect`
        process = FakeProcess(lambda mark: [])
        process.failure = SessionLost("gone")
        with pytest.raises(SessionLost):
            await session_of(process)

    asyncio.run(scene())


def test_a_call_that_is_cancelled_twice_kills_the_shell() -> None:
    async def scene() -> None:
        process = FakeProcess(lambda _: [b"begun"])
        async with session_of(process) as shell:
            running = asyncio.get_running_loop().create_task(shell.run("c"))
            while not process.commands:
                await asyncio.sleep(0)
            running.cancel()
            while not process.interrupts:
                await asyncio.sleep(0)
            running.cancel()
            await asyncio.wait([running])
            assert (running.cancelled(), process.closed) == (True, 1)

    asyncio.run(scene())


def test_what_is_left_of_a_stream_that_has_its_mark_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shell_session, "LEFT_BYTES", 4)
    left = _Left(("stdout", "stderr"))
    output = _MarkedOutput(left, CollectedOutput(100))
    words = re.search(rb"(\w{32}) (\w{32})", output.next_mark())
    assert words is not None
    mark = b"%b-%b:2:\n" % words.groups()
    output.add(Chunk("stdout", b"out" + mark + b"background"))
    assert not output.is_over
    output.add(Chunk("stderr", b"err" + mark))
    assert (output.is_over, output.exit_code, output.lost_bytes) == (True, 2, 6)
    assert (output.collected.stdout, output.collected.stderr) == (b"out", b"err")
    assert left.streams == {"stdout": b"ound", "stderr": b""}


@pytest.mark.parametrize("program", ["sh", "bash", "dash", "zsh", "ksh", "busybox"])
def test_a_shell_prints_a_mark_at_once(program: str) -> None:
    """Otherwise a background job may print in the middle of it."""
    if shutil.which(program) is None:
        pytest.skip("not installed")
    output = _MarkedOutput(_Left(("stdout", "stderr")), CollectedOutput(100))
    text = b"exec 7>&1 8>&2\n(exit 7)\n" + output.next_mark()
    words = ["busybox", "sh"] if program == "busybox" else [program]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # one message per write
    printed = theirs.fileno()
    with ours, theirs:
        subprocess.run(words, input=text, stdout=printed, stderr=printed, check=True)
        output.add(Chunk("stdout", ours.recv(1000)))
        output.add(Chunk("stderr", ours.recv(1000)))
    assert (output.is_over, output.exit_code) == (True, 7)
    assert (output.collected.stdout, output.collected.stderr) == (b"", b"")


def test_bash_reads_no_start_files() -> None:
    assert shell_words("/bin/sh") == ["/bin/sh", "-i"]
    words = shell_words("/usr/bin/bash")
    assert (words[0], words[-1], "--norc" in words) == ("/usr/bin/bash", "-i", True)


@pytest.mark.parametrize("program", ["/bin/rbash", "python3.13", "python", "fish", "tcsh"])
def test_programs_that_would_not_answer_are_refused(program: str) -> None:
    with pytest.raises(StartupError, match=f"^{program} is no POSIX shell .* such as bash"):
        shell_words(program)
