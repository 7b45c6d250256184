"""fs/grep: the params and the result of a LineSearch, and ripgrep, which makes it faster.

On a tree of 50,000 files, ripgrep needs 0.3 to 1 s for the files that may have a match; reading all
of them here takes 1.5 to 5 s and more. It only selects files by a wider pattern: every line of
an answer is one that `LineSearch` has found, with or without ripgrep.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from exec_server.errors import InvalidParams
from exec_server.filesystem.line_patterns import LinePattern
from exec_server.filesystem.line_search import Found, LineSearch, Options, Preselect
from exec_server.protocol import files as wire

# Matches of one search: the answer stays far below the limit of a message.
MAX_MATCHES: Final = 10_000
# Context lines on each side: enough to understand a match, and not the whole file.
MAX_CONTEXT: Final = 20
# A message of ripgrep with the path of a file, which has at most 4096 bytes. A longer message has
# the matching line of a file in it, and is skipped.
MESSAGE_BYTES: Final = 65_536

# Runs a program with these words for at most so many seconds, and passes its output on.
RunProgram = Callable[[Sequence[str], float, Callable[[bytes], None]], None]


def grep(
    params: wire.GrepParams,
    preselect: Preselect | None = None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> wire.GrepResult:
    """The matching lines of a file, or of the files below a directory. Blocking."""
    search = LineSearch(_options(params), is_cancelled=is_cancelled)
    return _result(params, search.run(preselect))


def _options(params: wire.GrepParams) -> Options:
    if max(params.before, params.after) > MAX_CONTEXT:
        raise InvalidParams(f"before and after must be at most {MAX_CONTEXT}")
    limit = min(params.limit, MAX_MATCHES)
    if limit < 1:
        raise InvalidParams("limit must be at least 1")
    return Options(
        params.path.native(),
        LinePattern(params.pattern, literal=params.literal, ignore_case=params.ignore_case),
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


# ---- ripgrep --------------------------------------------------------------------------


class Ripgrep:
    """Selects the files that may have a match, by a program at this path."""

    def __init__(self, program: str, run: RunProgram) -> None:
        self._program = program
        self._run = run

    def __call__(self, options: Options, seconds: float, visit: Callable[[str], None]) -> bool:
        """Visit the files in the order of paths; False if ripgrep has failed or was too slow."""
        reader = _RipgrepReader(f"{options.root.rstrip('/')}/", visit)
        try:
            self._run([self._program, *_ripgrep_words(options)], seconds, reader.feed)
        except OSError:
            return False  # for another kind of processor
        return reader.has_ended


def _ripgrep_words(options: Options) -> list[str]:
    # Files with a null byte are not searched here, and ripgrep leaves them at the first one.
    words = ["--no-config", "--json", "--max-count=1", "--no-ignore", "--hidden", "--no-messages"]
    words += ["--no-follow", "--sort=path", "--encoding=none", "--engine=default", "--no-unicode"]
    words += ["--ignore-case" if options.pattern.wide_ignores_case else "--case-sensitive"]
    return [*words, f"--regexp={options.pattern.wide}", "--", options.root]


class _Path(msgspec.Struct, frozen=True):
    """A path, or base64 of one that is not UTF-8."""

    text: str | None = None
    data: bytes | None = msgspec.field(name="bytes", default=None)

    def get(self) -> bytes:
        return self.data or b"" if self.text is None else self.text.encode()


class _Data(msgspec.Struct, frozen=True):
    path: _Path = _Path()


class _Message(msgspec.Struct, frozen=True):
    type: str
    data: _Data


class _RipgrepReader:
    """Reads the messages of `rg --json`: one at the beginning of each file, and a summary."""

    def __init__(self, prefix: str, visit: Callable[[str], None]) -> None:
        self.has_ended = False  # with its summary
        self._prefix = os.fsencode(prefix)
        self._visit = visit
        self._rest = b""  # the beginning of a message

    def feed(self, data: bytes) -> None:
        *messages, self._rest = (self._rest + data).split(b"\n")
        # The end of a longer message is none that can be decoded.
        self._rest = self._rest if len(self._rest) <= MESSAGE_BYTES else b"..."
        for message in messages:
            self._read(message)

    def _read(self, text: bytes) -> None:
        try:
            message = msgspec.json.decode(text, type=_Message)
        except msgspec.MsgspecError:
            return
        if message.type == "begin":
            self._visit(os.fsdecode(message.data.path.get().removeprefix(self._prefix)))
        self.has_ended |= message.type == "summary"
