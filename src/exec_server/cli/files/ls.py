"""`exec-server ls`: list directories and files of a target."""

from __future__ import annotations

import argparse
import os
import posixpath
from typing import TYPE_CHECKING, Final

from exec_server.cli.parser import CommandParser
from exec_server.cli.streams import json_text, local_time, print_text
from exec_server.cli.targets import PathParser, with_access_flags
from exec_server.client.targets import DEFAULT_TARGET
from exec_server.errors import NotFound, RpcError, printable

if TYPE_CHECKING:
    from exec_server.cli.files.operands import Operand
    from exec_server.client.results import Entry, Stat

# Concurrent stat requests of one directory: enough to hide the round-trip time.
MAX_CONCURRENT_STATS: Final = 32
# `ls -l` prints a directory in batches of this size, which bounds the results it holds.
STAT_BATCH_SIZE: Final = 1024

_DESCRIPTION: Final = """\
List directories and files of a target. A path may be a pattern with *, ?, [...], {a,b} and **;
quote it for your shell.
"""
_EPILOG: Final = """\
examples:
  exec-server ls build:                            the server's working directory
  exec-server ls :/srv                             on the target of EXEC_SERVER_TARGET
  exec-server ls -l build:/srv ws://127.0.0.1:7700:/tmp
  exec-server ls -l 'build:logs/*.gz'              a pattern on the target
  exec-server ls --json build: | jq '.[].path'
"""


class LsParser(PathParser):
    """-h is that of ls(1), except alone."""

    def parse_words(self, words: list[str]) -> argparse.Namespace:
        return super().parse_words(["--help"] if words == ["-h"] else words)


def build_parser() -> CommandParser:
    parser = LsParser("ls", _DESCRIPTION, _EPILOG, conflict_handler="resolve")
    parser.add_argument("paths", metavar="TARGET:PATH", nargs="*", default=[DEFAULT_TARGET])
    parser.add_argument(
        "-l", "--long", action="store_true", help="also show kind, size and modification time"
    )
    parser.add_argument(
        "-a", "--all", action="store_true", help="also show names that begin with a dot"
    )
    parser.add_argument(
        *("-h", "--human-readable"),
        action="store_true",
        help="with -l: print sizes as 1.5 MiB; -h alone prints this help",
    )
    parser.add_argument(
        "-1", dest="one", action="store_true", help="no effect: each name has a line of its own"
    )
    parser.add_argument(
        "--json", action="store_true", help="print a JSON array with kind, size and time of each"
    )
    return with_access_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    from exec_server.cli.files.operands import for_each_operand, is_pattern

    lister = Lister(
        is_long=arguments.long,
        as_json=arguments.json,
        shows_all=arguments.all,
        has_units=arguments.human_readable,
        has_headings=len(arguments.paths) > 1 or any(map(is_pattern, arguments.paths)),
    )
    code = for_each_operand(arguments, lister, needs_path=False, takes_patterns=True)
    if arguments.json:
        print_text(json_text(lister.members))
    return code


class Lister:
    """Lists one operand after the other: prints it, or collects the `members` of its JSON form."""

    def __init__(
        self,
        *,
        is_long: bool = False,
        as_json: bool = False,
        shows_all: bool = False,
        has_headings: bool = False,
        has_units: bool = False,
    ) -> None:
        self._is_long = is_long
        self._as_json = as_json
        self._shows_all = shows_all
        self._has_headings = has_headings and not as_json
        self._has_units = has_units
        self._count = 0
        self._is_terminal = os.isatty(1)
        self.members: list[dict[str, object]] = []

    async def __call__(self, operand: Operand) -> None:
        status, link = await _status(operand)
        if not status.is_directory:
            self._list_file(operand, status, link)
            return
        entries = sorted(
            await operand.environment.files.list(operand.path), key=lambda entry: entry.name
        )
        if not self._shows_all:
            entries = [entry for entry in entries if not entry.name.startswith(".")]
        if self._has_headings:
            print_text(("\n" if self._count else "") + self._short_line(f"{operand.label}:"))
        self._count += 1
        if not (self._is_long or self._as_json):
            print_text("".join(self._short_line(entry.name) for entry in entries))
            return
        for start in range(0, len(entries), STAT_BATCH_SIZE):
            await self._list_entries(operand, entries[start : start + STAT_BATCH_SIZE])

    def _list_file(self, operand: Operand, status: Stat, link: str | None) -> None:
        if self._as_json:
            self.members.append(_members(operand.label, operand.path, status, link))
        elif self._is_long:
            name = operand.path if link is None else f"{operand.path} -> {link}"
            print_text(self._long_line(name, status))
        else:
            print_text(self._short_line(operand.path))

    async def _list_entries(self, operand: Operand, entries: list[Entry]) -> None:
        results = zip(entries, await _stats(operand, entries), strict=True)
        if self._as_json:
            self.members += (
                _members(operand.label, entry.path, status, entry.link_target)
                for entry, status in results
            )
        else:
            print_text("".join(self._long_entry(entry, status) for entry, status in results))

    def _long_entry(self, entry: Entry, status: Stat | RpcError) -> str:
        """The line with kind, size and time, or with the error of the stat."""
        if isinstance(status, RpcError):
            from exec_server.cli.connection import error_text

            name = self._display_name(entry.name)
            return f"?  {'?':>14}  {'?':16}  {name} ({error_text(status)})\n"
        name = entry.name
        if entry.link_target is not None and not (entry.is_directory or entry.is_file):
            name += f" -> {entry.link_target}"  # which does not exist
        return self._long_line(name, status)

    def _long_line(self, name: str, status: Stat) -> str:
        from exec_server.cli.files.progress import format_size

        kind = "d" if status.is_directory else "-" if status.is_file else "?"
        kind += "l" if status.is_symlink else " "
        modified = local_time(status.modified, "%Y-%m-%d %H:%M")
        size = format_size(status.size) if self._has_units else status.size
        return f"{kind} {size:>14}  {modified:16}  {self._display_name(name)}\n"

    def _short_line(self, name: str) -> str:
        return f"{self._display_name(name)}\n"

    def _display_name(self, name: str) -> str:
        return printable(name) if self._is_terminal else name


def _members(
    label: str, path: str, status: Stat | RpcError, link_target: str | None
) -> dict[str, object]:
    """The JSON form of an entry; kind, size and time are null if they are unknown."""
    known = None if isinstance(status, RpcError) else status
    kind = None
    if known is not None:
        kind = "directory" if known.is_directory else "file" if known.is_file else "other"
    return {
        "operand": label,
        "path": path,
        "name": path.rstrip("/").rpartition("/")[2],
        "kind": kind,
        "symlink": known and known.is_symlink,
        "target": link_target,
        "size": known and known.size,
        "modified": known and known.modified,
    }


async def _status(operand: Operand) -> tuple[Stat, str | None]:
    """The metadata of an operand and, if it is a link that leads nowhere, its target."""
    files = operand.environment.files
    try:
        return await files.stat(operand.path), None
    except NotFound:
        directory, name = posixpath.split(operand.path)
        try:
            entries = await files.list(directory or ".")
        except RpcError:
            entries = []
        for entry in entries:
            if entry.name == name and entry.link_target is not None:
                return _known(entry, entry.size or 0, entry.modified or 0.0), entry.link_target
        raise


def _known(entry: Entry, size: int, modified: float) -> Stat:
    """The metadata of an entry that the server has listed with all details."""
    from exec_server.client.results import Stat

    is_symlink = entry.link_target is not None
    return Stat(entry.is_directory, entry.is_file, is_symlink, size, modified, None)


async def _stats(operand: Operand, entries: list[Entry]) -> list[Stat | RpcError]:
    """The metadata of entries, or the error of each; several requests at a time if unknown."""
    import asyncio

    semaphore = asyncio.Semaphore(MAX_CONCURRENT_STATS)

    async def stat(entry: Entry) -> Stat | RpcError:
        if entry.size is not None and entry.modified is not None:
            return _known(entry, entry.size, entry.modified)
        async with semaphore:
            try:
                return await operand.environment.files.stat(entry.path)
            except RpcError as error:
                return error

    try:
        async with asyncio.TaskGroup() as tasks:
            pending = [tasks.create_task(stat(entry)) for entry in entries]
    except ExceptionGroup as group:  # the session is lost, which fails all requests
        raise group.exceptions[0] from None
    return [task.result() for task in pending]
