"""Prints the listing of a file or directory of a target."""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
from typing import Final

from exec_server.cli.commands.connection import error_text
from exec_server.cli.commands.local_time import local_time
from exec_server.cli.commands.printing import print_text
from exec_server.cli.commands.progress import format_size
from exec_server.cli.commands.remote_operands import Operand
from exec_server.client.results import Entry, Stat
from exec_server.errors import NotFound, RpcError
from exec_server.printable import printable

# Concurrent stat requests of one directory: enough to hide the round-trip time.
MAX_CONCURRENT_STATS: Final = 32
# `ls -l` prints a directory in batches of this size, which bounds the results it holds.
STAT_BATCH_SIZE: Final = 1024


class JsonLister:
    """Collects the entries of all operands; `size` and `modified` are null if unknown."""

    def __init__(self, *, shows_all: bool) -> None:
        self._shows_all = shows_all
        self.entries: list[dict[str, object]] = []

    async def __call__(self, operand: Operand) -> None:
        files = operand.environment.files
        status, link = await _status(operand)
        if not status.is_directory:
            self.entries.append(_members(operand.label, operand.path, status, link))
            return
        entries = [
            entry
            for entry in await files.list(operand.path)
            if self._shows_all or not entry.name.startswith(".")
        ]
        for start in range(0, len(entries), STAT_BATCH_SIZE):
            batch = entries[start : start + STAT_BATCH_SIZE]
            for entry, found in zip(batch, await _stats(operand, batch), strict=True):
                known = found if isinstance(found, Stat) else None
                link = entry.link_target
                self.entries.append(_members(operand.label, entry.path, known, link))


def _members(
    label: str, path: str, status: Stat | None, link_target: str | None = None
) -> dict[str, object]:
    kind = None
    if status is not None:
        kind = "directory" if status.is_directory else "file" if status.is_file else "other"
    return {
        "operand": label,
        "path": path,
        "name": path.rstrip("/").rpartition("/")[2],
        "kind": kind,
        "symlink": None if status is None else status.is_symlink,
        "target": link_target,
        "size": None if status is None else status.size,
        "modified": None if status is None else status.modified,
    }


async def _status(operand: Operand) -> tuple[Stat, str | None]:
    """The metadata of an operand and, if it is a link that leads nowhere, its target."""
    files = operand.environment.files
    try:
        return await files.stat(operand.path), None
    except NotFound:
        directory, name = posixpath.split(operand.path)
        with contextlib.suppress(RpcError):
            for entry in await files.list(directory or "."):
                if entry.name == name and entry.link_target is not None:
                    return _known(entry, entry.size or 0, entry.modified or 0.0), entry.link_target
        raise


def _known(entry: Entry, size: int, modified: float) -> Stat:
    """The metadata of an entry that the server has listed with all details."""
    is_symlink = entry.link_target is not None
    return Stat(entry.is_directory, entry.is_file, is_symlink, size, modified, None)


async def _stats(operand: Operand, entries: list[Entry]) -> list[Stat | RpcError]:
    """The metadata of entries, or the error of each; several requests at a time if unknown."""
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


class Lister:
    """Prints one operand after the other."""

    def __init__(
        self, *, is_long: bool, shows_all: bool, has_headings: bool, has_units: bool = False
    ) -> None:
        self._has_units = has_units
        self._is_long = is_long
        self._shows_all = shows_all
        self._has_headings = has_headings
        self._count = 0
        self._is_terminal = os.isatty(1)

    async def __call__(self, operand: Operand) -> None:
        files = operand.environment.files
        status, link = await _status(operand)
        if not status.is_directory:
            shown = operand.path if link is None else f"{operand.path} -> {link}"
            is_long = self._is_long
            print_text(
                self._long_line(shown, status) if is_long else self._short_line(operand.path)
            )
            return
        entries = sorted(await files.list(operand.path), key=lambda entry: entry.name)
        if not self._shows_all:
            entries = [entry for entry in entries if not entry.name.startswith(".")]
        if self._has_headings:
            print_text(("\n" if self._count else "") + self._short_line(f"{operand.label}:"))
        self._count += 1
        if not self._is_long:
            print_text("".join(self._short_line(entry.name) for entry in entries))
            return
        for start in range(0, len(entries), STAT_BATCH_SIZE):
            print_text(await self._long_lines(operand, entries[start : start + STAT_BATCH_SIZE]))

    async def _long_lines(self, operand: Operand, entries: list[Entry]) -> str:
        """Lines with kind, size and time; an entry whose stat fails gets the error instead."""
        lines = []
        for entry, found in zip(entries, await _stats(operand, entries), strict=True):
            if isinstance(found, Stat):
                shown = entry.name
                if entry.link_target is not None and not (entry.is_directory or entry.is_file):
                    shown += f" -> {entry.link_target}"  # which does not exist
                lines.append(self._long_line(shown, found))
            else:
                name = self._display_name(entry.name)
                lines.append(f"?  {'?':>14}  {'?':16}  {name} ({error_text(found)})\n")
        return "".join(lines)

    def _long_line(self, name: str, status: Stat) -> str:
        kind = "d" if status.is_directory else "-" if status.is_file else "?"
        kind += "l" if status.is_symlink else " "
        modified = local_time(status.modified, "%Y-%m-%d %H:%M")
        size = format_size(status.size) if self._has_units else status.size
        return f"{kind} {size:>14}  {modified:16}  {self._display_name(name)}\n"

    def _short_line(self, name: str) -> str:
        return f"{self._display_name(name)}\n"

    def _display_name(self, name: str) -> str:
        return printable(name) if self._is_terminal else name
