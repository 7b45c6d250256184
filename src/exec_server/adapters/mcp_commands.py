"""CommandSessions: the commands that a model has started; they end with it. And texts for a model.

The output of each command is read all the time, so that one that is not looked at does not stop.
A command counts as running until its output has ended: children that it left behind hold it.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import io
import posixpath
import time
from collections.abc import Awaitable, Callable
from itertools import islice
from types import TracebackType
from typing import Final, Self

from exec_server.client.arguments import AnySandbox
from exec_server.client.environment import Environment
from exec_server.client.exceptions import denial_account
from exec_server.client.process import Process
from exec_server.errors import ExecServerError, InvalidParams

# Output of one command that can still be read: what a build prints in a few minutes. Older output
# is forgotten.
KEPT_BYTES: Final = 1_048_576
# A token has about this many bytes of English or code.
BYTES_PER_TOKEN: Final = 4
# Half of the longest answer: clients refuse answers above 25,000 tokens.
MAX_TOKENS: Final = 20_000
HEAD_BYTES: Final = MAX_TOKENS * BYTES_PER_TOKEN // 2
# Text of a file in one answer; the rest is read with the next offset.
FILE_CHARACTERS: Final = 65_536

# Lines from the first to the last change of which a diff is made: the time grows with their square.
DIFF_LINES: Final = 1_000
_CONTEXT: Final = 3  # lines around a change, as diff(1) prints them

# Commands that run at the same time: more than a model can follow. Further ones are refused.
MAX_RUNNING: Final = 32
# Ended commands whose output can still be read; the oldest is forgotten.
MAX_ENDED: Final = 16
# A call waits at most this long: clients give up after a minute or two.
MAX_WAIT_SECONDS: Final = 60.0
# The same for the end of a command: a long build. Clients that are told of the progress may wait
# longer than they do for a silent tool.
MAX_END_SECONDS: Final = 600.0
# For text that a command does not read: 1 MiB is queued for it before.
WRITE_SECONDS: Final = 10.0
# Output that follows the exit of a command, if children still hold its pipe.
QUIET_SECONDS: Final = 0.2
# Between two reports of a command that runs.
PROGRESS_SECONDS: Final = 1.0

Report = Callable[[float, int], Awaitable[None]]
OnEnd = Callable[[int], Awaitable[None]]


# Texts for a model: output with its middle left out, and the lines of a file; no I/O.
class CommandOutput:
    """The output of a command: the beginning of what is unseen, and the last KEPT_BYTES of all."""

    def __init__(self, session_id: int) -> None:
        self._session_id = session_id
        self._kept = bytearray()
        self._first = 0  # offset of the first byte that is kept
        self._head = bytearray()  # the first unseen bytes
        self._seen = 0  # offset behind the last byte that was shown

    @property
    def size(self) -> int:
        """Bytes of output until now."""
        return self._first + len(self._kept)

    def append(self, data: bytes) -> None:
        self._head += data[: HEAD_BYTES - len(self._head)]
        self._kept += data
        surplus = max(0, len(self._kept) - KEPT_BYTES)
        del self._kept[:surplus]
        self._first += surplus

    def take(self, tokens: int) -> str:
        """The output since the last call, without its middle if it is long."""
        limit = _limit(tokens)
        unseen = self.size - self._seen
        if unseen <= limit:  # far less than what is kept
            shown = _text(self._kept[len(self._kept) - unseen :])
        else:
            head = self._head[: limit // 2]
            tail = self._kept[len(self._kept) - limit // 2 :]
            left_out = unseen - len(head) - len(tail)
            first = max(self._seen + len(head), self._first)
            shown = (
                f"{_text(head)}\n[{left_out} bytes left out: read_output with session_id="
                f"{self._session_id} and offset={first} shows them]\n{_text(tail)}"
            )
        self._seen = self.size
        self._head.clear()
        return shown

    def tail(self) -> str:
        """The last part of the output, as much as an answer may have."""
        return _text(self._kept[-MAX_TOKENS * BYTES_PER_TOKEN :])

    def read(self, offset: int, tokens: int) -> str:
        """The output from an offset on, as far as it is kept."""
        first = min(max(offset, self._first), self.size)
        start = first - self._first
        data = self._kept[start : start + _limit(tokens)]
        end = first + len(data)
        more = f"; continue with offset={end}" if end < self.size else ""
        lost = f"; the {first - offset} bytes before are gone" if offset < first else ""
        return f"[bytes {first} to {end} of {self.size}{lost}{more}]\n{_text(data)}"


def select_lines(text: str, offset: int, limit: int) -> str:
    """Some lines of a file, and a note if there are others; `offset` is counted from 1."""
    # Not str.splitlines, which splits at form feeds, and would make a list of all lines.
    count = text.count("\n") + (not text.endswith("\n") and bool(text))
    first = min(max(offset, 1) - 1, count)
    last = min(first + max(limit, 1), count)
    shown: list[str] = []
    size = 0
    for line in islice(io.StringIO(text, newline="\n"), first, last):
        if size + len(line) > FILE_CHARACTERS:
            if not shown:
                shown.append(f"{line[:FILE_CHARACTERS]} [{len(line)} characters, cut]\n")
            break
        shown.append(line)
        size += len(line)
    last = first + len(shown)
    if not count or (first == 0 and last == count):
        return "".join(shown)
    if not shown:
        return f"[the file has {count} lines]"
    more = f"; continue with offset={last + 1}" if last < count else ""
    end = "" if shown[-1].endswith("\n") else "\n"
    return f"{''.join(shown)}{end}[lines {first + 1} to {last} of {count}{more}]"


def join_found(lines: list[str], *, is_cut: bool) -> str:
    """The results of a search, as many as fit into an answer."""
    size = 0
    for number, line in enumerate(lines):
        size += len(line) + 1
        if size > FILE_CHARACTERS:
            lines, is_cut = lines[:number] or [line[:FILE_CHARACTERS]], True
            break
    note = ["[there are more: narrow the search]"] if is_cut else []
    return "\n".join(lines + note) or "[nothing found]"


def diff_texts(old: str, new: str, path: str) -> str:
    """A unified diff of the two texts; a note if the changes are far apart."""
    if old == new:
        return "nothing has changed"
    before, after = _lines(old), _lines(new)
    start = _common(before, after)
    end = _common(before[start:][::-1], after[start:][::-1])
    changed = max(len(before), len(after)) - start - end
    if changed > DIFF_LINES:
        return f"changed: {changed} lines from the first to the last change, too many for a diff"
    first, rest = max(start - _CONTEXT, 0), max(end - _CONTEXT, 0)
    old_lines = before[first : len(before) - rest]
    new_lines = after[first : len(after) - rest]
    diff = [f"--- {path}", f"+++ {path}"]
    # Not difflib.unified_diff: its line numbers would be those of the parts.
    for group in difflib.SequenceMatcher(None, old_lines, new_lines).get_grouped_opcodes(_CONTEXT):
        (_, old_start, _, new_start, _), (_, _, old_end, _, new_end) = group[0], group[-1]
        old_range = _line_range(first + old_start, old_end - old_start)
        diff.append(f"@@ -{old_range} +{_line_range(first + new_start, new_end - new_start)} @@")
        for tag, a, b, c, d in group:
            if tag == "equal":
                diff += [_marked(" ", line) for line in old_lines[a:b]]
            else:
                diff += [_marked("-", line) for line in old_lines[a:b]]
                diff += [_marked("+", line) for line in new_lines[c:d]]
    return "\n".join(diff)


def _lines(text: str) -> list[str]:
    """The lines of a text with their ends, which only the last one may lack."""
    *lines, last = text.split("\n")
    return [f"{line}\n" for line in lines] + ([last] if last else [])


def _marked(mark: str, line: str) -> str:
    if line.endswith("\n"):
        return f"{mark}{line[:-1]}"
    return f"{mark}{line}\n\\ No newline at end of file"


def found_path(folder: str, name: str) -> str:
    """A path that a search of `folder` has found, as the other tools take it."""
    return name if folder in {"", ".", "./"} else posixpath.join(folder, name)


def _common(before: list[str], after: list[str]) -> int:
    pairs = enumerate(zip(before, after, strict=False))
    shorter = min(len(before), len(after))
    return next((number for number, (one, other) in pairs if one != other), shorter)


def _line_range(start: int, count: int) -> str:
    """The range of lines in the head of a hunk; an empty one names the line before it."""
    if count == 1:
        return str(start + 1)
    return f"{start + 1 if count else start},{count}"


def _limit(tokens: int) -> int:
    return min(max(tokens, 1), MAX_TOKENS) * BYTES_PER_TOKEN


def _text(data: bytes | bytearray) -> str:
    return data.decode("utf-8", "replace")


class CommandSessions:
    """The commands of one model by number; an async context manager that ends them."""

    def __init__(self, environment: Environment, sandbox: AnySandbox | None = None) -> None:
        """`sandbox` is a whole object: the workspace of a name would be that of each command."""
        self._environment = environment
        self._sandbox = sandbox
        self._sessions: dict[int, _Session] = {}
        self._last_id = 0
        self._starting = 0
        self._tasks = asyncio.TaskGroup()
        self._ends = asyncio.Condition()  # a command has ended
        self.on_end: OnEnd | None = None
        """Called with the number of a background command that has ended."""

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for session in self._sessions.values():
            self._end(session)
        await self._tasks.__aexit__(None, None, None)

    async def run(
        self, argv: list[str], *, workdir: str, tty: bool, wait_ms: int, tokens: int, report: Report
    ) -> str:
        """Start a command and wait for a while; if the call is cancelled, the command is killed."""
        session = await self._start(argv, workdir, tty=tty)
        try:
            await session.wait(wait_ms, report)
        except asyncio.CancelledError:
            self._sessions.pop(session.id, None)  # it may have ended and been forgotten
            self._end(session)
            raise
        self._forget_ended()
        return session.reply(tokens)

    async def _start(self, argv: list[str], workdir: str, *, tty: bool) -> _Session:
        running = sum(not each.is_over for each in self._sessions.values())
        if running + self._starting >= MAX_RUNNING:
            raise InvalidParams(
                f"{MAX_RUNNING} commands are running: end one of them with kill_process"
            )
        self._starting += 1
        try:
            process = await self._environment.start(
                argv,
                cwd=workdir,
                tty=tty,
                merge_stderr=not tty and self._environment.capabilities.process_merge_stderr,
                sandbox=self._sandbox,
            )
        finally:
            self._starting -= 1
        self._last_id += 1
        session = _Session(self._last_id, process, argv[-1], tty=tty)
        self._sessions[session.id] = session
        self._tasks.create_task(session.pump())
        self._tasks.create_task(self._watch(session))
        return session

    async def _watch(self, session: _Session) -> None:
        """Tell who waits for it that a command has ended."""
        await session.run_to_end()
        async with self._ends:
            self._ends.notify_all()
        if session.is_background and self.on_end is not None:
            await self.on_end(session.id)

    async def wait_for_end(
        self, session_id: int, *, wait_ms: int, tokens: int, report: Report
    ) -> str:
        """Wait until a command ends, or without a number the first of the background ones.

        One that has ended before counts too, unless the model was told.
        """
        if session_id:
            waited = [self._get(session_id)]
        else:
            background = (each for each in self._sessions.values() if each.is_background)
            waited = [each for each in background if not each.is_told]
        if not waited:
            return "no command runs in the background"
        await self._wait_for_any(
            waited, min(max(wait_ms, 0), 1000 * MAX_END_SECONDS) / 1000, report
        )
        ended = next((each for each in waited if each.has_ended), None)
        if ended is None:
            return "\n".join(["still running", *(each.line() for each in waited)])
        await ended.wait(0, None)  # for the rest of its output
        return f"session_id={ended.id}\n{ended.reply(tokens)}"

    async def _wait_for_any(self, waited: list[_Session], seconds: float, report: Report) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not any(each.has_ended for each in waited) and loop.time() < deadline:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(min(deadline, loop.time() + PROGRESS_SECONDS)):
                    async with self._ends:
                        await self._ends.wait()
            first = waited[0]
            await report(first.seconds, first.output.size)

    async def write(
        self, session_id: int, text: str, *, wait_ms: int, tokens: int, report: Report
    ) -> str:
        """Type a text, and wait for a while; an empty one only waits."""
        session = self._get(session_id)
        if text:
            if not session.tty:
                raise InvalidParams(
                    "this command reads no input: start it with tty=true in order to write to it"
                )
            await session.write(text.encode())
        await session.wait(wait_ms, report)
        return session.reply(tokens)

    async def kill(self, session_id: int) -> str:
        session = self._get(session_id)
        await session.process.kill()
        await session.wait(0, None)
        return session.reply(1000)

    def read(self, session_id: int, offset: int, tokens: int) -> str:
        """Output of a command that was left out."""
        return self._get(session_id).output.read(offset, tokens)

    def describe(self, session_id: int) -> str:
        """The state of a command and the end of its output."""
        session = self._get(session_id)
        return f"{session.line()}\n{session.output.tail()}"

    def background(self) -> list[tuple[int, str]]:
        """The numbers and texts of the commands that have outlived a call."""
        return [(each.id, each.command) for each in self._sessions.values() if each.is_background]

    def notes(self) -> str:
        """A line for each background command that has ended, and of which nobody was told."""
        ended = [each for each in self._sessions.values() if each.has_settled and not each.is_told]
        lines = [each.told_line() for each in ended if each.is_background]
        return "\n".join(f"[meanwhile {line}]" for line in lines)

    def list(self) -> str:
        """One line for each command."""
        lines = [session.told_line() for session in self._sessions.values()]
        return "\n".join(lines) or "no command was started"

    def _get(self, session_id: int) -> _Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise InvalidParams(f"there is no command with session_id={session_id}")
        return session

    def _forget_ended(self) -> None:
        ended = [each.id for each in self._sessions.values() if each.is_over]
        for session_id in ended[:-MAX_ENDED]:
            self._end(self._sessions.pop(session_id))

    def _end(self, session: _Session) -> None:
        # In a task of its own, because the caller may be cancelled.
        self._tasks.create_task(_close(session.process))


class _Session:
    """One command, and its output until now."""

    def __init__(self, session_id: int, process: Process, command: str, *, tty: bool) -> None:
        self.id = session_id
        self.process = process
        self.tty = tty
        self.output = CommandOutput(session_id)
        self.command = command if len(command) <= 200 else f"{command[:200]}…"
        self.is_background = False  # it has outlived the call that started it
        self.is_told = False  # the model has read that it has ended
        self.has_settled = False  # what holds its output now is a child
        self._started = time.monotonic()
        self._read_all = asyncio.Event()
        self._failure = ""

    @property
    def is_over(self) -> bool:
        return self._read_all.is_set()

    @property
    def has_ended(self) -> bool:
        """Whether it has exited or is lost; children may still hold its output."""
        return self.process.exit_code is not None or bool(self._failure)

    @property
    def seconds(self) -> float:
        """The time since its start."""
        return time.monotonic() - self._started

    async def run_to_end(self) -> None:
        """Wait for the exit, and a moment for the rest of the output."""
        with contextlib.suppress(ExecServerError):  # `pump` has it too
            await self.process.wait()
        await self._wait_for_rest()

    async def _wait_for_rest(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(QUIET_SECONDS):
                await self._read_all.wait()
        self.has_settled = True

    async def pump(self) -> None:
        """Read all output."""
        try:
            while chunks := await self.process.read_some():
                for chunk in chunks:
                    self.output.append(chunk.data)
        except ExecServerError as error:
            self._failure = str(error)
        finally:
            self._read_all.set()

    async def write(self, data: bytes) -> None:
        """Write to the terminal; raises InvalidParams if the command does not read."""
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                await self.process.write(data)
        except TimeoutError:
            raise InvalidParams(
                "the command does not read its input: a part of the text was not written"
            ) from None

    async def wait(self, wait_ms: int, report: Report | None) -> None:
        """Wait for the exit, at most for the time that was asked for."""
        loop = asyncio.get_running_loop()
        # A model may ask for a number that is no float.
        seconds = min(max(wait_ms, 0), 1000 * MAX_WAIT_SECONDS) / 1000
        deadline = loop.time() + max(seconds, QUIET_SECONDS)
        while self.process.exit_code is None and not self._failure:
            slice_end = min(deadline, loop.time() + PROGRESS_SECONDS)
            try:
                async with asyncio.timeout_at(slice_end):
                    await self.process.wait()
            except TimeoutError:
                pass
            except ExecServerError:
                break  # `pump` has it too
            if loop.time() >= deadline:
                return
            if report is not None:
                await report(self.seconds, self.output.size)
        await self._wait_for_rest()

    def reply(self, tokens: int) -> str:
        """What the model reads: the state, and the output that it has not seen."""
        self._tell()
        return (
            f"{self._state()}\nWall time: {self.seconds:.1f} seconds\nOutput:\n"
            f"{self.output.take(tokens)}"
        )

    def line(self) -> str:
        state = self._state().replace(f", session_id={self.id}", "")
        return f"session_id={self.id}: {state}; {self.output.size} bytes: {self.command!r}"

    def told_line(self) -> str:
        """The line for the model, which then knows the state."""
        self._tell()
        return self.line()

    def _tell(self) -> None:
        self.is_told = self.has_ended
        self.is_background = self.is_background or not self.has_ended

    def _state(self) -> str:
        process = self.process
        if process.exit_code is None:
            return f"Lost: {self._failure}" if self._failure else f"Running, session_id={self.id}"
        text = f"Exited with code {process.exit_code}"
        if self.has_settled and not self.is_over:
            text += f"; its children still run, session_id={self.id}"
        if not process.sandbox_denied and process.sandbox_denial is None:
            return text
        account = denial_account(process.sandbox_denial)
        return f"{text}; the sandbox has denied something{account}"


async def _close(process: Process) -> None:
    with contextlib.suppress(ExecServerError):  # the connection is lost, and the command with it
        await process.aclose()
