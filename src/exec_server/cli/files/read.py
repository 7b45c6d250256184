"""`exec-server cat`, `tail` and `watch`: print files of a target, and their changes."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Final, NamedTuple

from exec_server.cli.errors import UsageError
from exec_server.cli.parser import CommandParser
from exec_server.cli.streams import print_status
from exec_server.cli.targets import PathParser, with_access_flags
from exec_server.errors import NotFound, printable

if TYPE_CHECKING:
    from exec_server.cli.files.operands import Operand
    from exec_server.client.results import Stat


# The end of a file is read in growing pieces until it has enough lines, up to the second size.
FIRST_BYTES: Final = 65_536
MAX_BYTES: Final = 64 * 1_048_576
# How often the size is asked for: a reader notices no longer delay, and a server no load.
INTERVAL_SECONDS: Final = 0.5
# Bytes before the position that are compared after a change: a file with others was overwritten.
COMPARED_BYTES: Final = 4096
# -5, as tail(1) takes it.
_SHORT_COUNT: Final = re.compile(r"-([0-9]+)")

_CAT_DESCRIPTION: Final = """\
Print files of a target to stdout. A path may be a pattern with *, ?, [...], {a,b} and **;
quote it for your shell.
"""
_CAT_EPILOG: Final = """\
examples:
  exec-server cat build:/etc/os-release
  exec-server cat build:data.tar.gz | tar tz
  exec-server cat 'build:logs/2026-*.log'
"""


def build_cat_parser() -> CommandParser:
    parser = PathParser("cat", _CAT_DESCRIPTION, _CAT_EPILOG)
    parser.add_argument("paths", metavar="TARGET:PATH", nargs="+")
    return with_access_flags(parser)


def run_cat(arguments: argparse.Namespace) -> int:
    from exec_server.cli.files.operands import for_each_operand
    from exec_server.cli.streams import OutputWriter

    writer = OutputWriter()

    async def print_file(operand: Operand) -> None:
        async with operand.environment.files.open(operand.path, "rb") as file:
            async for block in file:
                await writer.print(block)

    return for_each_operand(arguments, print_file, takes_patterns=True)


_TAIL_DESCRIPTION: Final = """\
Print the last lines of files of a target; with -f also the lines that are appended later, until
Ctrl-C. A file that is replaced or truncated is read from its beginning. Several files get headings.
"""
_TAIL_EPILOG: Final = """\
examples:
  exec-server tail build:/var/log/syslog
  exec-server tail -n 100 -f build:server.log
  exec-server tail -n +2 build:table.csv           all but the first line
"""


class TailParser(PathParser):
    """Takes a number of lines in the short form of tail(1) too."""

    def parse_words(self, words: list[str]) -> argparse.Namespace:
        if words and (short := _SHORT_COUNT.fullmatch(words[0])) is not None:
            words = [f"--lines={short[1]}", *words[1:]]
        return super().parse_words(words)


def _first_or_count(text: str) -> tuple[int | None, int]:
    """The first line of +N, and None; or None, and the number of the last lines."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError("the number of lines must not be negative")
    return (max(number, 1), 0) if text.startswith("+") else (None, number)


_first_or_count.__name__ = "number of lines"  # argparse prints the name of the type


def build_tail_parser() -> CommandParser:
    parser = TailParser("tail", _TAIL_DESCRIPTION, _TAIL_EPILOG)
    parser.add_argument("paths", metavar="TARGET:PATH", nargs="+")
    parser.add_argument(
        "-n",
        "--lines",
        type=_first_or_count,
        default=(None, 10),
        metavar="N",
        help="print the last N lines (default: 10), or with +N all from line N on; as the first "
        "word also -N",
    )
    parser.add_argument(
        *("-f", "-F", "--follow"),
        action="store_true",
        help="wait for further lines of one file, and for the file itself",
    )
    return with_access_flags(parser)


def run_tail(arguments: argparse.Namespace) -> int:
    from exec_server.cli.files.operands import for_each_operand

    if arguments.follow and len(arguments.paths) > 1:
        raise UsageError("-f follows one file")

    first, count = arguments.lines
    has_headings = len(arguments.paths) > 1
    gap = ""

    async def print_end(operand: Operand) -> None:
        nonlocal gap
        tail = Tail(operand)
        heading = (f"{gap}==> {printable(operand.path)} <==\n" if has_headings else "").encode()
        try:
            if first is None:
                await tail.print_end(count, heading)
            else:
                await tail.print_from(first, heading)
        except NotFound:
            if not arguments.follow:
                raise
            print_status(f"{operand.label}: there is no such file; waiting for it (Ctrl-C ends)")
        gap = "\n"
        if arguments.follow:
            await tail.follow()

    return for_each_operand(arguments, print_end)


class Seen(NamedTuple):
    """The file at the end of all links, and its metadata."""

    path: str
    status: Stat

    def is_same_file(self, other: Seen) -> bool:
        return (self.path, self.status.created) == (other.path, other.status.created)


class Tail:
    """Prints one file; `position` is the end of what was printed."""

    def __init__(self, operand: Operand) -> None:
        from exec_server.cli.streams import OutputWriter

        self._files = operand.environment.files
        self._path = operand.path
        self._label = operand.label
        self._writer = OutputWriter()
        self.position = 0
        self._printed = b""  # the bytes of the file before the position
        self._seen: Seen | None = None

    async def print_end(self, lines: int, heading: bytes = b"") -> None:
        """Print the last lines, after a heading if there is one."""
        seen = await self._look()
        end, size = seen.status.size, FIRST_BYTES
        while True:
            start = max(0, end - size)
            data = await self._read(start, end)
            text = last_lines(data, lines)
            if len(text) < len(data) or start == 0 or size >= MAX_BYTES:
                break
            size *= 8
        self._seen, self.position, self._printed = seen, start + len(data), data[-COMPARED_BYTES:]
        await self._writer.print(heading + text)

    async def print_from(self, line: int, heading: bytes = b"") -> None:
        """Print all lines from this one on, counted from 1, after a heading if there is one."""
        self._seen = await self._look()
        missing = line - 1
        await self._writer.print(heading)
        async with self._files.open(self._path, offset=0) as file:
            async for block in file:
                self._advance_by(block)
                missing, remaining = skip_lines(block, missing)
                await self._writer.print(remaining)

    async def follow(self) -> None:
        """Print everything that is appended, for ever."""
        import asyncio

        while True:
            try:
                seen = await self._look()
                if seen != self._seen:
                    await self._advance(seen)
            except NotFound:
                pass  # not there yet, or being replaced
            await asyncio.sleep(INTERVAL_SECONDS)

    async def _look(self) -> Seen:
        from exec_server.errors import InvalidRequest

        path = await self._files.realpath(self._path)
        try:
            metadata = await self._files.stat(path, follow_links=False)
        except InvalidRequest:  # a link, on a server without fsList
            metadata = None
        if metadata is None or metadata.is_symlink:  # a link has come in between
            metadata = await self._files.stat(path)
        return Seen(path, metadata)

    async def _advance(self, seen: Seen) -> None:
        is_other = self._seen is None or not seen.is_same_file(self._seen)
        if self._seen is None:
            print_status(f"{self._label}: the file is there")
        elif is_other or seen.status.size < self.position or not await self._has_printed():
            print_status(f"{self._label}: the file was replaced or truncated")
            self.position, self._printed = 0, b""
        self._seen = seen
        if seen.status.size > self.position:
            async with self._files.open(self._path, offset=self.position) as file:
                async for block in file:
                    self._advance_by(block)
                    await self._writer.print(block)

    def _advance_by(self, block: bytes) -> None:
        self.position += len(block)
        self._printed = (self._printed + block)[-COMPARED_BYTES:]

    async def _has_printed(self) -> bool:
        """Whether the bytes before the position are still those that were read there."""
        start = self.position - len(self._printed)
        return not self._printed or await self._read(start, self.position) == self._printed

    async def _read(self, start: int, end: int) -> bytes:
        if start == end:
            return (await self._files.read(self._path)) if not end else b""
        async with self._files.open(self._path, offset=start) as file:
            return await file.read(end - start)


def skip_lines(data: bytes, count: int) -> tuple[int, bytes]:
    """Skip so many lines; returns how many are still to be skipped, and the rest."""
    lines = data.count(b"\n")
    if lines < count:
        return count - lines, b""
    start = 0
    for _ in range(count):
        start = data.index(b"\n", start) + 1
    return 0, data[start:]


def last_lines(data: bytes, count: int) -> bytes:
    """The last lines of a text; one without a line break at its end is a line, too."""
    if count == 0:
        return b""
    end = len(data) - 1 if data.endswith(b"\n") else len(data)
    for _ in range(count):
        end = data.rfind(b"\n", 0, end)
        if end < 0:
            return data
    return data[end + 1 :]


_WATCH_DESCRIPTION: Final = """\
Print the changes of a directory or file of a target, one line each, until Ctrl-C.
"""
_WATCH_EPILOG: Final = """\
Each line has the kind of the change (created, modified, deleted) and the path. A line `overflow`
says that some changes are missing, because there were too many at once.

examples:
  exec-server watch -r build:src
  exec-server watch --json build:/var/log/syslog
"""


def build_watch_parser() -> CommandParser:
    parser = PathParser("watch", _WATCH_DESCRIPTION, _WATCH_EPILOG)
    parser.add_argument("paths", metavar="TARGET:PATH", nargs=1)
    parser.add_argument(
        "-r", "--recursive", action="store_true", help="also watch the directories below"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object for each change")
    return with_access_flags(parser)


def run_watch(arguments: argparse.Namespace) -> int:
    import json

    from exec_server.cli.files.operands import for_each_operand
    from exec_server.cli.streams import print_text
    from exec_server.errors import printable

    async def watch(operand: Operand) -> None:
        files = operand.environment.files
        async with files.watch(operand.path, recursive=arguments.recursive) as changes:
            async for change in changes:
                if arguments.json:
                    print_text(json.dumps({"path": change.path, "kind": change.kind}) + "\n")
                else:
                    print_text(f"{change.kind} {printable(change.path)}".rstrip() + "\n")

    return for_each_operand(arguments, watch, needs_path=False)
