"""PersistentShell: a bash on a machine that runs one command after the other and keeps its state.

It needs no framework. Its output is a pipe, so there is no prompt: bash prints a mark after each
command, two random words that are joined by printf alone. So neither a command that prints the
text of its own shell (`set -x`, `set -v`) nor one that guesses can print the mark.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import uuid
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from exec_server.client.arguments import AnySandbox
from exec_server.client.engine.recovery import KILL_SECONDS
from exec_server.client.environment import Environment
from exec_server.client.process import Process
from exec_server.errors import ExecServerError, StdinClosed

# Between two looks at the clock, at the caller's wish to stop, and at a shell that has exited while
# its children hold its output. A fifth of a second is not noticed by a model.
TICK_SECONDS: Final = 0.2
# The mark has two words of 32 characters and a number.
MARK_BYTES: Final = 96

# bash has its output here too, because a command can redirect or close the output of its shell. The
# number is one that scripts do not choose, as they do 3, 9 or 200.
_OUTPUT: Final = 187
# The names of variables with a prefix are known to bash alone. A second bash replaces the first,
# because /proc/PID/environ keeps the variables that a program has started with.
_WITHOUT: Final = 'unset "${{!{prefix}@}}"; exec /bin/bash --noprofile --norc'


class ShellResult(NamedTuple):
    """The output of a command, both streams in the order of writing.

    `exit_code` is None if the command ended its shell, or did not end within its time.
    `lost_bytes` counts the output before `output`.
    """

    output: bytes
    exit_code: int | None
    lost_bytes: int
    is_late: bool = False


class PersistentShell:
    """A bash with its state; one command at a time.

    After `is_over` it runs no further command: it has exited, was killed, or its machine was lost.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        cwd: str,
        env: Mapping[str, str],
        clean_env: bool,
        without: str,
        output_bytes: int,
        sandbox: AnySandbox | None,
        user: str | None,
    ) -> None:
        """`env` is added to the server's variables, or replaces them if `clean_env` is set.

        No command gets the variables whose names begin with `without`. The last `output_bytes` of
        each command are kept.
        """
        # -p: without BASH_ENV and functions of the environment. --norc: with a socket as its stdin,
        # bash reads the start files of a remote login even for a command.
        self._process: Process = environment.start(
            ["/bin/bash", "--noprofile", "--norc", "-p", "-c", _WITHOUT.format(prefix=without)],
            cwd=cwd,
            env={**env, "TERM": "dumb"},
            clean_env=clean_env,
            stdin=True,
            merge_stderr=True,
            sandbox=sandbox,
            user=user,
        )
        self._output_bytes = output_bytes
        self._output = bytearray()  # received, and not given to a caller yet
        self._lost_bytes = 0

    @property
    def is_over(self) -> bool:
        return self._process.is_over or self._process.exit_code is not None

    async def start(self) -> None:
        """Start bash; raises RpcError if the machine has none."""
        await self._process
        await self._process.write(f"exec {_OUTPUT}>&1\n".encode())

    async def run(self, command: str, seconds: float, check: Callable[[], None]) -> ShellResult:
        """Run a command; after `seconds`, or an exception, the shell is killed with everything.

        `check` is called all the time and may raise. Without stdin, like a script of cron.
        """
        first, second = uuid.uuid4().hex, uuid.uuid4().hex
        mark = re.compile(rb"\n%b-%b:(\d+):\n" % (first.encode(), second.encode()))
        # After a syntax error in the word of `eval`, bash drops the line that it reads next.
        text = (
            f"\n{{ eval {shlex.quote(command)}\n}} </dev/null >&{_OUTPUT} 2>&1; "
            f"builtin printf '\\n%s-%s:%d:\\n' {first} {second} \"$?\" >&{_OUTPUT}\n"
        )
        deadline = asyncio.get_running_loop().time() + seconds
        try:
            await self._process.write(text.encode())
            found = await self._read(mark, deadline, check)
        except TimeoutError:
            return self._take(len(self._output), None, is_late=True)
        except StdinClosed:
            found = None
        if found is None:
            return self._take(len(self._output), None)
        start, end = found.span()
        result = self._take(start, int(found[1]))
        del self._output[: end - start]
        return result

    async def _read(
        self, mark: re.Pattern[bytes], deadline: float, check: Callable[[], None]
    ) -> re.Match[bytes] | None:
        """Read until the mark; None if the shell has ended. Raises TimeoutError at the deadline."""
        process, loop = self._process, asyncio.get_running_loop()
        unsearched = 0
        while (found := mark.search(self._output, unsearched)) is None:
            check()
            self._forget_beginning()
            unsearched = max(0, len(self._output) - MARK_BYTES)
            if loop.time() >= deadline:
                raise TimeoutError
            chunks = None
            try:
                async with asyncio.timeout(TICK_SECONDS):
                    chunks = await process.read_some()
            except TimeoutError:
                if process.exit_code is not None:
                    return None  # its children hold the pipe
                continue
            if not chunks:
                return None
            for chunk in chunks:
                self._lost_bytes += chunk.lost_before
                self._output += chunk.data
        return found

    def _forget_beginning(self) -> None:
        excess = len(self._output) - self._output_bytes - MARK_BYTES
        if excess > 0:
            del self._output[:excess]
            self._lost_bytes += excess

    def _take(self, end: int, exit_code: int | None, *, is_late: bool = False) -> ShellResult:
        excess = max(0, end - self._output_bytes)
        output, lost = bytes(self._output[excess:end]), self._lost_bytes + excess
        del self._output[:end]
        self._lost_bytes = 0
        return ShellResult(output, exit_code, lost, is_late)

    async def close(self) -> None:
        """Kill the shell with all that it has started, for KILL_SECONDS at most."""
        try:
            async with asyncio.timeout(KILL_SECONDS):
                await self._process.aclose()
        except (TimeoutError, ExecServerError):
            pass  # the server kills it when it gets the request, or gives up the session
