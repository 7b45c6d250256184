"""ShellSession: a shell that runs one command after the other and keeps its state.

Theory of operation. The shell is an interactive one (`-i`), because only such a shell gives up a
list of commands on SIGINT and lives on; its streams are pipes, so it edits no lines. Its own stderr
is /dev/null, which hides prompts, traces and reports of jobs, and so is the stdout of bash, to
which PROMPT_COMMAND and traps (DEBUG, ERR) print for the lines of the session. Its commands have 7
and 8 as stdout and stderr. It reads them from stdin:

    \\command eval 'TEXT' </dev/null >&7 2>&8 7>&- 8>&-     restored afterwards, whatever TEXT does
    { \\command printf '%s-%s:%d:\\n' FIRST SECOND "$?" >&7; … }      the mark, on each stream

The output up to the mark is that of the command. A mark is one line, wherever it begins: bash
writes each line apart, and background jobs would print between two. FIRST and SECOND are random
words that are joined by printf alone, so no command can print the mark: not one that guesses, and
not one that shows the commands of its shell. One that reads the input of its shell can, and spoils
results of its own session. TEXT is one word, however many lines it has. `command` keeps a syntax
error from ending dash, and the backslash keeps it from being an alias. The redirections belong to
`eval`, because a group with them would trace it.

After SIGINT bash goes on with the mark, but dash has discarded it. So another one is sent after
each SIGINT by a timeout, and at growing intervals while a command runs, because it can send SIGINT
to its shell. The command has ended when the last one is printed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import uuid
from collections.abc import Awaitable, Callable
from typing import Final

from exec_server.client.arguments import AnyPath, check_seconds, encoded, path_text
from exec_server.client.commands import CollectedOutput, OutputLimit, checked_result
from exec_server.client.exceptions import Timeout
from exec_server.client.handle import Handle
from exec_server.client.process import KILLED, OUTPUT_BYTES, QUIET_SECONDS, REST_SECONDS, Process
from exec_server.client.results import Chunk, ShellResult
from exec_server.errors import ExecServerError, StartupError, StdinClosed
from exec_server.protocol.process import Stream

# Until the shell has started: it takes milliseconds because it reads no files, but the machine may
# be busy. A program that has not answered by then is refused as none.
START_SECONDS: Final = 10.0
# A command has this time to end after each SIGINT: one that cleans up at the first one takes
# milliseconds. Some end at the second one. After the last one the shell is killed.
INTERRUPT_SECONDS: Final = 1.0
INTERRUPTS: Final = 3
# After this time the mark is sent again, and then after twice the time, and so on: a command whose
# mark was lost ends by then, and one that runs for a day leaves 17 marks for its shell to read.
MARK_SECONDS: Final = 1.0
# The mark has two words of 32 characters and a number.
MARK_BYTES: Final = 96
# Output of background jobs that is received on one stream before the mark on the other one.
LEFT_BYTES: Final = 1_048_576

# The shell must not read the file that ENV names, which many programs use for other purposes. The
# first words are for those who list processes.
_START: Final = (
    ': shell session; [ "${ENV+x}" ] && export EXEC_SERVER_ENV="$ENV"; '
    'unset ENV PROMPT_COMMAND PS0 PS1 PS2 TMOUT; exec "$@"'
)
# dash has no hooks that print, but runs a trap on EXIT without the redirections of its command.
_REDIRECT: Final = b'exec 7>&1 8>&2 2>/dev/null; [ -z "${BASH_VERSION+x}" ] || exec >/dev/null\n'
_PREPARE: Final = (
    "unset HISTFILE MAILCHECK; PS1= PS2=; "
    '[ -z "${EXEC_SERVER_ENV+x}" ] || { export ENV="$EXEC_SERVER_ENV"; unset EXEC_SERVER_ENV; }'
)
# Without start files, a history, and what else is for people at a terminal.
_BASH_FLAGS: Final = ("--noprofile", "--norc", "--noediting", "+H", "+o", "history")

# Programs that are known not to be one, or that refuse redirections. They would not answer.
_OTHER_PROGRAMS: Final = re.compile(
    r"r(ba|k|z)sh|t?csh|fish|nu|pwsh|xonsh|i?python[0-9.]*|node|perl|ruby|irb"
)
_NO_SHELL: Final = "{program} is no POSIX shell for a session, such as bash: {reason}"

# `bash: [PID: LEVEL (DESCRIPTOR)] tcsetattr: Inappropriate ioctl for device`, in any language.
_COMPLAINT: Final = re.compile(rb"\b\w*sh: \[\d+: \d+ \(\d+\)\] tcsetattr: [^\n]*\n")

_STREAMS: Final[tuple[Stream, ...]] = ("stdout", "stderr")


def shell_words(program: AnyPath) -> list[str]:
    """The command that is a shell for a session; raises StartupError for other known programs."""
    path = path_text(program, "program")
    name = os.path.basename(path)
    if _OTHER_PROGRAMS.fullmatch(name):
        raise StartupError(_NO_SHELL.format(program=path, reason=f"{name} is another program"))
    flags = _BASH_FLAGS if name == "bash" else ()
    return [path, *flags, "-i"]


class ShellSession(Handle):
    """A shell with its state, which `await` or `async with` starts; see Environment.shell_session.

    `aclose`, or leaving the block, kills it with everything that its commands have started.
    """

    def __init__(
        self,
        start: Callable[[list[str]], Process],
        words: list[str],
        *,
        is_merged: bool,
        wait_connected: Callable[[], Awaitable[None]],
    ) -> None:
        """`start` makes a process with pipes, `words` are the command; both streams may be one."""
        super().__init__()
        self._start_process = start
        self._wait_connected = wait_connected
        self._words = words
        self._streams = _STREAMS[:1] if is_merged else _STREAMS
        self._process: Process | None = None
        self._exit_code = 0  # of the last command
        self._lock = asyncio.Lock()  # held by a command

    async def _open(self) -> None:
        await self._start()

    async def _close(self) -> None:
        await self._kill()

    async def run(
        self,
        command: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - Timeout carries the output
        check: bool = False,
        output_limit: int | OutputLimit = OUTPUT_BYTES,
    ) -> ShellResult:
        """Run a text of shell commands, after those that run already.

        Without stdin. After `timeout` seconds the command is interrupted, and Timeout is raised
        with its output; the same is done if the call is cancelled. A command that ignores SIGINT is
        killed with the shell. `shell_ended` of the result tells that, and that the command was an
        `exit`: the next command gets a new shell without the state. Output of background jobs is
        that of the command which runs at that time. `check` and `output_limit` are those of
        Environment.run.
        """
        if not isinstance(command, str):
            raise TypeError(f"command must be str, not {type(command).__name__}")
        if "\0" in command:
            raise ValueError("a command cannot contain a null character")
        encoded(command)  # an error now, before a shell could be lost by it
        check_seconds(timeout)
        collected = CollectedOutput(output_limit)
        async with self._lock:
            if not self.is_open:
                raise self._not_open("the shell session")
            result = await self._run(command, timeout, collected)
        if check:
            checked_result(result)
        return result

    async def _start(self) -> Process:
        """Start a shell; raises StartupError if the program is none."""
        process = self._start_process(["/bin/sh", "-c", _START, "sh", *self._words])
        await process
        self._process, self._exit_code, self._left = process, 0, _Left(self._streams)
        output = _MarkedOutput(self._left, CollectedOutput(MARK_BYTES))
        is_ready = False
        try:
            async with asyncio.timeout(START_SECONDS):
                text = _REDIRECT + _command_line(_PREPARE, 0) + output.next_mark()
                with contextlib.suppress(StdinClosed):
                    await process.write(text)
                is_ready = await _read(process, output) and output.exit_code == 0
        except TimeoutError:
            pass
        except BaseException:
            await self._kill()
            raise
        if not is_ready:
            await self._kill()
            output.finish()
            printed = output.collected.stderr or output.collected.stdout
            reason = printed.decode(errors="replace").strip() or "it did not answer"
            raise StartupError(_NO_SHELL.format(program=self._words[0], reason=reason))
        return process

    async def _ready(self) -> Process:
        """The shell, once there is a connection: without one, nothing of a command is sent."""
        await self._wait_connected()
        return self._process or await self._start()

    async def _run(
        self, command: str, seconds: float | None, collected: CollectedOutput
    ) -> ShellResult:
        began = asyncio.get_running_loop().time()
        end = None if seconds is None else began + seconds
        try:
            async with asyncio.timeout_at(end) as scope:
                process = await self._ready()
        except TimeoutError:
            if seconds is None or not scope.expired():
                raise
            words = (self._words[0], "-c", command)
            unsent = ShellResult(words, b"", b"", KILLED, asyncio.get_running_loop().time() - began)
            raise Timeout(seconds, unsent, was_sent=False) from None
        output = _MarkedOutput(self._left, collected)
        scope = asyncio.timeout_at(end)
        is_ended = True
        try:
            async with scope:
                text = _command_line(command, self._exit_code) + output.next_mark()
                with contextlib.suppress(StdinClosed):  # the shell has ended meanwhile
                    await process.write(text)
                is_ended = not await _read(process, output)
        except BaseException as error:
            if isinstance(error, ExecServerError):
                await self._kill()
                raise
            is_ended = not await self._stop(process, output)
            if isinstance(error, TimeoutError) and scope.expired():
                assert seconds is not None
                result = self._result(process, command, output, began, is_ended=is_ended)
                is_killed = not is_ended or process.exit_code is not None
                raise Timeout(seconds, result, is_killed=is_killed) from None
            raise
        if is_ended:
            with contextlib.suppress(TimeoutError):
                await process.wait(REST_SECONDS)
            await self._kill()
        self._exit_code = output.exit_code
        return self._result(process, command, output, began, is_ended=is_ended)

    async def _stop(self, process: Process, output: _MarkedOutput) -> bool:
        """Interrupt the command; False if that has not helped, and its shell was killed."""
        try:
            lives_on = await _interrupted(process, output)
        except TimeoutError:  # a server that does not answer this would not answer the kill
            await self._kill(wait=False)
            return False
        except BaseException:  # cancelled for the second time
            await self._kill()
            raise
        if lives_on:
            self._exit_code = output.exit_code
        else:
            await self._kill()
        return lives_on

    def _result(
        self, process: Process, command: str, output: _MarkedOutput, began: float, *, is_ended: bool
    ) -> ShellResult:
        output.finish()
        collected, code = output.collected, output.exit_code
        stdout, stderr = collected.stdout, collected.stderr
        if len(self._streams) > 1:
            stderr = _without_complaints(stderr)
        else:
            stdout = _without_complaints(stdout)
        if is_ended:
            code = KILLED if process.exit_code is None else process.exit_code
        return ShellResult(
            argv=(self._words[0], "-c", command),
            stdout=stdout,
            stderr=stderr,
            exit_code=code,
            duration=asyncio.get_running_loop().time() - began,
            lost_bytes=output.lost_bytes + collected.lost_stdout + collected.lost_stderr,
            lost_stdout=collected.lost_stdout,
            lost_stderr=collected.lost_stderr,
            kept_head=collected.kept_head,
            shell_ended=is_ended,
        )

    async def _kill(self, *, wait: bool = True) -> None:
        """Kill the shell, if there is one, with everything that it has started."""
        process, self._process = self._process, None
        if process is not None:
            # An error means that it was lost, with all that it has started.
            with contextlib.suppress(ExecServerError, TimeoutError):
                async with asyncio.timeout(None if wait else 0):
                    await process.aclose()


class _Left:
    """Output of the shell that no command has got yet."""

    def __init__(self, streams: tuple[Stream, ...]) -> None:
        self.streams = {stream: bytearray() for stream in streams}


class _MarkedOutput:
    """The output of one command, up to the last mark on each stream; no I/O."""

    def __init__(self, left: _Left, collected: CollectedOutput) -> None:
        self.collected = collected
        self.exit_code = 0  # known when it is over
        self.lost_bytes = 0
        self._left = left.streams
        self._marks: list[bytes] = []
        self._pattern: re.Pattern[bytes]
        self._marked: set[Stream] = set()  # the last mark was found
        self._has_code = False

    @property
    def is_over(self) -> bool:
        return len(self._marked) == len(self._left)

    def next_mark(self) -> bytes:
        """The text that lets the shell print a new mark, which is the last one from now on."""
        first, second = uuid.uuid4().hex.encode(), uuid.uuid4().hex.encode()
        self._marks.append(first + b"-" + second)
        self._pattern = re.compile(rb"(%b):(\d{1,3}):\n" % b"|".join(self._marks))
        self._marked.clear()
        text = b"\\command printf '%%s-%%s:%%d:\\n' %b %b" % (first, second)
        mark = b'%b "$?" >&7' % text
        if len(self._left) > 1:
            mark += b"; %b 0 >&8" % text
        # A shell drops the line after a syntax error.
        return b"\n\n{ %b; }\n" % mark

    def add(self, chunk: Chunk) -> None:
        self.lost_bytes += chunk.lost_before
        stream: Stream = "stderr" if chunk.stream == "stderr" else "stdout"
        if stream in self._left:
            self._left[stream] += chunk.data
            self._search(stream)

    def _search(self, stream: Stream) -> None:
        data = self._left[stream]
        while stream not in self._marked:
            found = self._pattern.search(data)
            if found is None:
                self._collect(stream, len(data) - MARK_BYTES)
                return
            mark, code = found[1], int(found[2])
            self._collect(stream, found.start())
            del data[: found.end() - found.start()]
            if stream == "stdout" and not self._has_code:
                self._has_code, self.exit_code = True, code
            if mark == self._marks[-1]:
                self._marked.add(stream)
        excess = len(data) - LEFT_BYTES
        if excess > 0:
            del data[:excess]
            self.lost_bytes += excess

    def _collect(self, stream: Stream, size: int) -> None:
        data = self._left[stream]
        if size > 0:
            self.collected.add(stream, bytes(data[:size]))
            del data[:size]

    def finish(self) -> None:
        """Take all output of a stream without its mark."""
        for stream, data in self._left.items():
            if stream not in self._marked:
                self._collect(stream, len(data))


def _without_complaints(data: bytes) -> bytes:
    """The output without what bash prints if a signal has killed a command, for lack of a tty."""
    return _COMPLAINT.sub(b"", data) if b"] tcsetattr: " in data else data


def _command_line(command: str, last_code: int) -> bytes:
    """A line for the shell that runs the command; its `$?` begins with the last exit code."""
    # Not a bare `exit`: a command may have defined a function or an alias of that name.
    before = f"(\\command exit {last_code}) || " if last_code else ""
    text = f"{before}\\command eval {shlex.quote(command)} </dev/null >&7 2>&8 7>&- 8>&-\n"
    return encoded(text)


async def _read(process: Process, output: _MarkedOutput) -> bool:
    """Read until the mark; False if the shell has ended, even if its children hold its output."""
    loop = asyncio.get_running_loop()
    interval = MARK_SECONDS
    next_mark = loop.time() + interval
    chunks = aiter(process)
    while not output.is_over:
        if loop.time() >= next_mark:
            interval *= 2
            next_mark = loop.time() + interval
            with contextlib.suppress(StdinClosed):
                await process.write(output.next_mark())
        try:
            async with asyncio.timeout(QUIET_SECONDS):
                received = await chunks.read_some()
        except TimeoutError:
            if process.exit_code is not None:
                return False
            continue
        if not received:
            return False
        for chunk in received:
            output.add(chunk)
    return True


async def _interrupted(process: Process, output: _MarkedOutput) -> bool:
    """Interrupt the command; False if the shell does not live on.

    Raises TimeoutError if the server does not answer.
    """
    try:
        for _ in range(INTERRUPTS):
            async with asyncio.timeout(INTERRUPT_SECONDS):
                await process.interrupt()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(INTERRUPT_SECONDS):
                    await process.write(output.next_mark())
                    return await _read(process, output)
    except ExecServerError:
        pass  # it has ended, or the server cannot interrupt it
    return False
