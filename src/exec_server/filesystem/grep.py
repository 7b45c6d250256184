"""fs/grep: the same search by ripgrep, by a process of its own, or in a confined worker."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Final

import msgspec

from exec_server.errors import InternalError, InvalidParams
from exec_server.filesystem.line_search import (
    MAX_CHARACTERS,
    MAX_LINES,
    MAX_SECONDS,
    SHOWN_CHARACTERS,
    Found,
    Line,
    LineSearch,
    Options,
    PathFilter,
)
from exec_server.host.module_path import helper_words
from exec_server.printable import lossy
from exec_server.protocol import file_changes as wire

# Matches of one search: the answer stays far below the limit of a message.
MAX_MATCHES: Final = 10_000
# Context lines on each side: enough to understand a match, and not the whole file.
MAX_CONTEXT: Final = 20
MAX_PATTERN: Final = 4096
# A program that has not ended by itself after this time is killed.
PROGRAM_SECONDS: Final = MAX_SECONDS + 2.0
# Output of our own process: JSON escapes a character with up to 6 bytes, and each line has some
# members beside its text. More would be a defect.
OUTPUT_BYTES: Final = 48 * 1_048_576
# A message of ripgrep, with a whole line and each match in it: minified programs are far shorter.
# A longer one is left out of the answer, which is truncated then, and takes no memory.
MESSAGE_BYTES: Final = 8 * 1_048_576

# Runs a program with these words and this input, for at most so many seconds, and passes its output
# to the function until that returns False. Returns whether the output has ended before.
RunProgram = Callable[[Sequence[str], bytes, float, Callable[[bytes], bool]], bool]

_CODE: Final = "from exec_server.filesystem.line_search import main; main()"
# Patterns that mean the same to ripgrep, which then skips other files faster.
_SIMPLE_GLOB: Final = re.compile(r"\*\.\w+")
_SIMPLE_NAME: Final = re.compile(r"\.?\w+")


def grep(params: wire.GrepParams) -> wire.GrepResult:
    """Search in this process, whose main thread calls this; see `line_search`."""
    return _result(params, LineSearch(_options(params)).run())


def grep_by_program(
    params: wire.GrepParams, run: RunProgram, ripgrep: str | None
) -> wire.GrepResult:
    """Search by ripgrep if there is one and it knows the pattern, otherwise by our own process."""
    options = _options(params)
    os.close(os.open(options.root, os.O_PATH | os.O_CLOEXEC))  # raises if it is missing
    found = None if ripgrep is None else _by_ripgrep(ripgrep, options, run)
    return _result(params, found or _by_process(options, run))


def _options(params: wire.GrepParams) -> Options:
    if not params.pattern or len(params.pattern) > MAX_PATTERN:
        raise InvalidParams(f"pattern must have 1 to {MAX_PATTERN} characters")
    if "\n" in params.pattern or "\0" in params.pattern:
        raise InvalidParams("pattern must not contain a line break or a null character")
    if max(params.before, params.after) > MAX_CONTEXT:
        raise InvalidParams(f"before and after must be at most {MAX_CONTEXT}")
    limit = min(params.limit, MAX_MATCHES)
    if limit < 1:
        raise InvalidParams("limit must be at least 1")
    PathFilter(params.glob, params.exclude)  # raises if one is malformed
    return Options(
        params.path.native(),
        params.pattern,
        params.literal,
        params.ignore_case,
        params.glob,
        params.exclude,
        params.before,
        params.after,
        limit,
    )


def _result(params: wire.GrepParams, found: Found) -> wire.GrepResult:
    """The matches with their context, from all lines in order."""
    lines = found.lines
    matches = []
    for index, line in enumerate(lines):
        if line.column:
            first, last = line.number - params.before, line.number + params.after
            nearby = lines[max(0, index - params.before) : index + 1 + params.after]
            context = [each for each in nearby if each.path == line.path]
            before = [each.text for each in context if first <= each.number < line.number]
            after = [each.text for each in context if line.number < each.number <= last]
            matches.append(
                wire.GrepMatch(line.path, line.number, line.column, line.text, before, after)
            )
    return wire.GrepResult(matches, found.truncated)


# ---- a process of our own -------------------------------------------------------------


class _Answer(msgspec.Struct, frozen=True):
    """The answer of `line_search.main`."""

    lines: list[Line] = []
    truncated: bool = False
    errno: int | None = None
    refusal: str | None = None


def _by_process(options: Options, run: RunProgram) -> Found:
    argv = helper_words(_CODE)
    output = bytearray()

    def feed(data: bytes) -> bool:
        output.extend(data)
        return len(output) <= OUTPUT_BYTES

    run(argv, json.dumps(asdict(options)).encode(), PROGRAM_SECONDS, feed)
    try:
        answer = msgspec.json.decode(output, type=_Answer)
    except msgspec.MsgspecError:
        raise InternalError("the search has failed: its process ended early") from None
    if answer.errno is not None:
        raise OSError(answer.errno, os.strerror(answer.errno))
    if answer.refusal is not None:
        raise InvalidParams(answer.refusal)
    return Found(answer.lines, answer.truncated)


# ---- ripgrep --------------------------------------------------------------------------


def _by_ripgrep(program: str, options: Options, run: RunProgram) -> Found | None:
    """The lines that ripgrep finds; None if it fails, for example at the pattern."""
    reader = _RipgrepReader(options)
    try:
        is_over = run([program, *_ripgrep_words(options)], b"", MAX_SECONDS, reader.feed)
    except OSError:
        return None  # for another kind of processor
    if is_over and not reader.has_ended:
        return None
    reader.found.truncated |= not reader.has_ended  # the time is up
    return reader.found


def _ripgrep_words(options: Options) -> list[str]:
    words = ["--no-config", "--json", "--no-ignore", "--hidden", "--no-messages", "--no-follow"]
    words += ["--sort=path", "--encoding=none", "--engine=default"]
    words += [f"--before-context={options.before}", f"--after-context={options.after}"]
    words += ["--fixed-strings"] if options.literal else []
    words += ["--ignore-case" if options.ignore_case else "--case-sensitive"]
    if options.glob is not None and _SIMPLE_GLOB.fullmatch(options.glob):
        words.append(f"--glob={options.glob}")
    if options.exclude is not None and _SIMPLE_NAME.fullmatch(options.exclude):
        words.append(f"--glob=!{options.exclude}")
    return [*words, f"--regexp={options.pattern}", "--", options.root]


class _Text(msgspec.Struct, frozen=True):
    """A text, or base64 of bytes that are not UTF-8."""

    text: str | None = None
    data: bytes | None = msgspec.field(name="bytes", default=None)

    def get(self) -> bytes:
        return self.data or b"" if self.text is None else self.text.encode()


class _Submatch(msgspec.Struct, frozen=True):
    start: int  # in bytes


class _Data(msgspec.Struct, frozen=True):
    path: _Text = _Text()
    lines: _Text = _Text()
    line_number: int | None = None
    submatches: list[_Submatch] = []
    binary_offset: int | None = None


class _Message(msgspec.Struct, frozen=True):
    type: str
    data: _Data


class _RipgrepReader:
    """Reads the messages of `rg --json` up to the limits of an answer."""

    def __init__(self, options: Options) -> None:
        self.found = Found()
        self.has_ended = False  # with its summary or at a limit
        self._prefix = f"{options.root.rstrip('/')}/"
        self._limit = options.limit
        self._filter = PathFilter(options.glob, options.exclude)
        self._rest = bytearray()  # the beginning of a message
        self._is_too_long = False
        self._name = ""
        self._is_searched = False
        self._first = 0  # line of the current file
        self._earlier = (0, 0, False)
        self._matches = 0
        self._characters = 0

    def feed(self, data: bytes) -> bool:
        """Read a piece of the output; False if no further one is needed."""
        *ends, rest = data.split(b"\n")
        is_needed = all(self._end_message(each) for each in ends)
        self._gather(rest)
        return is_needed

    def _gather(self, data: bytes) -> None:
        self._is_too_long |= len(self._rest) + len(data) > MESSAGE_BYTES
        if self._is_too_long:
            self._rest.clear()
        else:
            self._rest += data

    def _end_message(self, data: bytes) -> bool:
        self._gather(data)
        text, self._rest = self._rest, bytearray()
        if self._is_too_long:
            self._is_too_long = False
            self.found.truncated |= self._is_searched
            return True
        return self._read(text)

    def _read(self, text: bytearray) -> bool:
        try:
            message = msgspec.json.decode(text, type=_Message)
        except msgspec.MsgspecError:
            return True  # a message without interest
        data = message.data
        match message.type:
            case "begin":
                self._begin(data)
            case "match" | "context" if self._is_searched:
                self.has_ended = not self._add(data)
                self.found.truncated |= self.has_ended
            case "end" if data.binary_offset is not None:
                del self.found.lines[self._first :]
                self._matches, self._characters, self.found.truncated = self._earlier
            case "summary":
                self.has_ended = True
        return not self.has_ended

    def _begin(self, data: _Data) -> None:
        path = os.fsdecode(data.path.get())
        is_below = path.startswith(self._prefix)
        name = path.removeprefix(self._prefix) if is_below else os.path.basename(path)
        self._is_searched = not is_below or self._filter.is_path_searched(name)
        self._name = lossy(name)
        self._first = len(self.found.lines)
        self._earlier = (self._matches, self._characters, self.found.truncated)

    def _add(self, data: _Data) -> bool:
        """Add a line; False if that exceeds a limit."""
        line = data.lines.get().removesuffix(b"\n")
        column = 0
        if data.submatches:
            column = len(line[: data.submatches[0].start].decode("utf-8", "replace")) + 1
            self._matches += 1
        text = line.decode("utf-8", "replace")[:SHOWN_CHARACTERS].rstrip("\r")
        self._characters += len(text) + len(self._name)
        if len(self.found.lines) >= MAX_LINES or self._characters > MAX_CHARACTERS:
            return False
        is_enough = self._matches > self._limit
        number = data.line_number or 0
        self.found.lines.append(Line(self._name, number, 0 if is_enough else column, text))
        return not is_enough
