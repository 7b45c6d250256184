"""BashSession: a bash in a terminal that keeps its state between commands; for adapters.

Bash prints a prompt with a random word and the exit code of the last command, which PROMPT_COMMAND
sets anew each time, so that programs that change the prompt do no harm. A command is one word for
`eval`, so there is one prompt for it however many lines it has.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import uuid
from collections.abc import Sequence
from typing import Final, NamedTuple

from exec_server.client.arguments import AnySandbox
from exec_server.client.environment import Environment
from exec_server.client.process import Process

# Until bash has read its start-up files.
START_SECONDS: Final = 30.0
# Until bash has stopped or killed a job that ignores Ctrl-C. A program can ignore Ctrl-Z as well.
STOP_SECONDS: Final = 10.0

_CONTROL: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|[\x00-\x08\x0b-\x1f\x7f]")


class Observation(NamedTuple):
    """The output of a command; the text that ended it, and the exit code if it was the prompt."""

    output: str
    exit_code: int | None
    ended_by: str


class BashSession:
    """A bash that runs one command after the other."""

    def __init__(
        self,
        environment: Environment,
        *,
        cwd: str | None = None,
        sandbox: AnySandbox | None = None,
        user: str | None = None,
    ) -> None:
        self._word = uuid.uuid4().hex
        self._process: Process = environment.start(
            ["bash"], cwd=cwd, tty=True, env={"TERM": "dumb"}, sandbox=sandbox, user=user
        )

    async def start(self, files: Sequence[str] = ()) -> str:
        """Start bash and let it source some files; returns what it has printed."""
        await self._process
        lines = [f"source {shlex.quote(file)}" for file in files]
        prompt = f"PROMPT_COMMAND='PS1=\"{self._word}:$?:\"'"
        lines += ["bind 'set enable-bracketed-paste off' 2>/dev/null", "PS2=", "PS0=", prompt]
        # Without an echo, which stty stops for readline too.
        await self._process.write(f"stty -echo; {'; '.join(lines)}\n".encode())
        return (await self._read((), START_SECONDS)).output

    async def run(self, command: str, timeout: float | None, expect: Sequence[str]) -> Observation:  # noqa: ASYNC109 - the output stays unread
        """Run a command until the prompt, or until one of the expected texts is printed.

        Raises TimeoutError; the command goes on then, until `interrupt`.
        """
        await self._process.write(f" eval {shlex.quote(command)}\n".encode())
        return await self._read(expect, timeout)

    async def send(self, line: str, timeout: float | None, expect: Sequence[str]) -> Observation:  # noqa: ASYNC109 - the output stays unread
        """Send a line to the running program; otherwise like `run`."""
        await self._process.write(f"{line}\n".encode())
        return await self._read(expect, timeout)

    async def interrupt(
        self,
        timeout: float,  # noqa: ASYNC109 - of one attempt
        attempts: int,
        expect: Sequence[str],
    ) -> Observation:
        """Interrupt the running command, and kill it if that does not end it.

        Raises TimeoutError if neither is possible, because it ignores all keys of a terminal.
        """
        for _ in range(attempts):
            await self._process.write(b"\x03")
            try:
                return await self._read(expect, timeout)
            except TimeoutError:
                await asyncio.sleep(0)
        await self._process.write(b"\x1a")  # Ctrl-Z: the job is killed in the background
        await self._read((), STOP_SECONDS)
        await self._process.write(b"kill -9 %% 2>/dev/null\n")
        return await self._read(expect, STOP_SECONDS)

    async def _read(self, expect: Sequence[str], timeout: float | None) -> Observation:  # noqa: ASYNC109 - nothing is lost by it
        texts = [re.escape(text.encode()) for text in expect]
        prompt = rb"%b:(?P<code>\d+):" % self._word.encode()
        pattern = re.compile(b"|".join([prompt, *texts]))
        read = await self._process.read_until(pattern, timeout)
        (match,) = [found for found in pattern.finditer(read) if found.end() == len(read)]
        code = match["code"]
        output = _CONTROL.sub("", read[: match.start()].decode(errors="backslashreplace"))
        ended_by = "" if code is not None else match[0].decode()
        return Observation(output, None if code is None else int(code), ended_by)

    async def close(self) -> None:
        """Kill bash with all that it has started."""
        await self._process.aclose()
