"""`exec-server ls`: list directories and files of a target."""

from __future__ import annotations

import argparse
import os
import posixpath
from typing import TYPE_CHECKING, Final

from exec_server.cli.parser import CommandParser
from exec_server.cli.streams import json_text, local_time, print_text
from exec_server.cli.targets import PathParser, with_access_flags
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
    parser.add_argument("paths", metavar="TARGET:PATH", nargs="+")
    parser.add_argument(
        "-l", "--long", action="store_true", help="also show mode, owner, size, time and target"
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
        "--json", action="store_true", help="print a JSON array with the details of each"
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
        self._owner_width = self._group_width = 1
        self._is_terminal = os.isatty(1)
        self.members: list[dict[str, object]] = []

    async def __call__(self, operand: Operand) -> None:
        has_details = self._is_long or self._as_json
        files = operand.environment.files
        status, itself = await _status(operand, has_details=has_details)
        if not status.is_directory:
            self._list_file(operand, status, itself)
            return
        listed = await files.list(operand.path, owners=has_details)
        entries = sorted(listed, key=lambda entry: entry.name)
        if not self._shows_all:
            entries = [entry for entry in entries if not entry.name.startswith(".")]
        if self._has_headings:
            print_text(("\n" if self._count else "") + self._short_line(f"{operand.label}:"))
        self._count += 1
        if not has_details:
            print_text("".join(self._short_line(entry.name) for entry in entries))
            return
        self._measure(entries)
        for start in range(0, len(entries), STAT_BATCH_SIZE):
            await self._list_entries(operand, entries[start : start + STAT_BATCH_SIZE])

    def _list_file(self, operand: Operand, status: Stat, entry: Entry) -> None:
        if self._as_json:
            self.members.append(_members(operand.label, operand.path, status, entry))
        elif self._is_long:
            self._measure([entry])
            print_text(self._long_line(operand.path, entry, status))
        else:
            print_text(self._short_line(operand.path))

    def _measure(self, entries: list[Entry]) -> None:
        """Choose the widths of the columns, which are the same for a whole listing."""
        self._owner_width = max((len(_shown(entry.owner)) for entry in entries), default=1)
        self._group_width = max((len(_shown(entry.group)) for entry in entries), default=1)

    async def _list_entries(self, operand: Operand, entries: list[Entry]) -> None:
        results = zip(entries, await _stats(operand, entries), strict=True)
        if self._as_json:
            self.members += (
                _members(operand.label, entry.path, status, entry) for entry, status in results
            )
        else:
            print_text("".join(self._long_entry(entry, status) for entry, status in results))

    def _long_entry(self, entry: Entry, status: Stat | RpcError) -> str:
        """The line with all details, or with the error of the stat."""
        if isinstance(status, RpcError):
            from exec_server.cli.connection import error_text

            row = f"{'?':>10}  {'?':16}  {self._display_name(entry.name)} ({error_text(status)})"
            return f"{'?' * 10} {self._owners(entry)} {row}\n"
        return self._long_line(entry.name, entry, status)

    def _long_line(self, name: str, entry: Entry, status: Stat) -> str:
        from exec_server.cli.files.progress import format_size

        size, link = status.size, ""
        if entry.link_target is not None:
            size = len(os.fsencode(entry.link_target))
            link = f" -> {self._display_name(entry.link_target)}"
        shown = format_size(size) if self._has_units else str(size)
        modified = local_time(status.modified, "%Y-%m-%d %H:%M")
        row = f"{shown:>10}  {modified:16}  {self._display_name(name)}{link}"
        return f"{_mode_text(entry, status)} {self._owners(entry)} {row}\n"

    def _owners(self, entry: Entry) -> str:
        owner, group = _shown(entry.owner), _shown(entry.group)
        return f"{owner:{self._owner_width}} {group:{self._group_width}}"

    def _short_line(self, name: str) -> str:
        return f"{self._display_name(name)}\n"

    def _display_name(self, name: str) -> str:
        return printable(name) if self._is_terminal else name


def _shown(name: str | None) -> str:
    return "?" if name is None else printable(name)


def _mode_text(entry: Entry, status: Stat) -> str:
    """Kind and permissions as ls(1) prints them; `?` stands for what is unknown."""
    import stat

    if entry.link_target is not None:
        return "lrwxrwxrwx"
    if status.is_symlink:
        return "l" + "?" * 9  # on a server that does not tell the target
    kind = "d" if status.is_directory else "-" if status.is_file else "?"
    return kind + ("?" * 9 if entry.mode is None else stat.filemode(entry.mode)[1:])


def _members(label: str, path: str, status: Stat | RpcError, entry: Entry) -> dict[str, object]:
    """The JSON form of an entry; what is unknown is null."""
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
        "target": entry.link_target,
        "size": known and known.size,
        "modified": known and known.modified,
        "mode": None if entry.mode is None else f"{entry.mode:04o}",
        "owner": entry.owner,
        "group": entry.group,
    }


async def _status(operand: Operand, *, has_details: bool) -> tuple[Stat, Entry]:
    """The metadata of an operand and its entry, with further details only if they are shown.

    The details are those that its directory lists. Of a link that leads nowhere there is no more.
    """
    from exec_server.client.results import Entry

    try:
        status = await operand.environment.files.stat(operand.path)
    except NotFound:
        entry = await _listed(operand)
        if entry is None or entry.link_target is None:
            raise
        return _known(entry, entry.size or 0, entry.modified or 0.0), entry
    unknown = Entry(operand.path, status.is_directory, status.is_file)
    if status.is_directory or not has_details:
        return status, unknown
    return status, await _listed(operand) or unknown


async def _listed(operand: Operand) -> Entry | None:
    """The entry of an operand in its directory, as far as that can be listed."""
    directory, name = posixpath.split(operand.path)
    try:
        entries = await operand.environment.files.list(directory or ".", owners=True)
    except RpcError:
        return None
    return next((entry for entry in entries if entry.name == name), None)


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
