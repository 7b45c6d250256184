"""`exec-server ls`, `cat` and `rm`: list, print and remove files of a target."""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from exec_server.cli.commands.arguments import access_options
from exec_server.cli.commands.connection import Connections, error_text, run_until_signal
from exec_server.cli.commands.errors import EXIT_FAILURE, UsageError
from exec_server.cli.commands.printing import describe_stdout_errors, print_status, print_text
from exec_server.cli.commands.streams import OutputWriter
from exec_server.cli.commands.targets import RemotePath, parse_remote_path, remote_path_example
from exec_server.client.environment import Environment
from exec_server.client.results import Entry, Stat
from exec_server.errors import RpcError
from exec_server.printable import printable

# Concurrent stat requests of one directory: enough to hide the round-trip time.
MAX_CONCURRENT_STATS: Final = 32
# `ls -l` prints a directory in batches of this size, which bounds the results it holds.
STAT_BATCH_SIZE: Final = 1024


@dataclass(frozen=True)
class _Operand:
    """A path on an environment, and the argument that names it."""

    environment: Environment
    path: str
    label: str


def run(command: str, arguments: argparse.Namespace) -> int:
    """Run ls, cat or rm for each operand; returns the exit code."""
    paths = [_parse_operand(text, needs_path=command != "ls") for text in arguments.paths]
    operation = _OPERATIONS[command](arguments)

    async def work() -> int:
        code = 0
        async with Connections(access_options(arguments)) as connections:
            for text, remote in zip(arguments.paths, paths, strict=True):
                environment = await connections.get(remote.target)
                try:
                    await operation(_Operand(environment, remote.path or ".", text))
                except RpcError as error:
                    print_status(f"{text}: {error_text(error, remote.path or '.')}")
                    code = EXIT_FAILURE
        return code

    return run_until_signal(work)


def _parse_operand(text: str, *, needs_path: bool) -> RemotePath:
    remote = parse_remote_path(text)
    if remote is None:
        # A bare word is the name of a target. Other texts were meant as a path.
        if "/" in text or text in ("", ".", ".."):
            raise UsageError(f"`{text}` is a local path; write TARGET:{text}")
        remote = RemotePath(text, None)
    if needs_path and not remote.path:
        raise UsageError(f"`{text}` names no file; write {remote_path_example(remote.target)}")
    return remote


class _List:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._is_long = arguments.long
        self._shows_all = arguments.all
        self._has_headings = len(arguments.paths) > 1
        self._count = 0
        self._is_terminal = os.isatty(1)

    async def __call__(self, operand: _Operand) -> None:
        files = operand.environment.files
        status = await files.stat(operand.path)
        if not status.is_directory:
            line = self._long_line if self._is_long else self._short_line
            print_text(line(operand.path, status))
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

    async def _long_lines(self, operand: _Operand, entries: list[Entry]) -> str:
        """Lines with kind, size and time; an entry whose stat fails gets the error instead."""
        semaphore = asyncio.Semaphore(MAX_CONCURRENT_STATS)

        async def stat(entry: Entry) -> str:
            async with semaphore:
                try:
                    status = await operand.environment.files.stat(entry.path)
                except RpcError as error:
                    name = self._display_name(entry.name)
                    return f"?  {'?':>14}  {'?':16}  {name} ({error_text(error)})\n"
                return self._long_line(entry.name, status)

        try:
            async with asyncio.TaskGroup() as tasks:
                pending = [tasks.create_task(stat(entry)) for entry in entries]
        except ExceptionGroup as group:  # the session is lost, which fails all requests
            raise group.exceptions[0] from None
        return "".join(task.result() for task in pending)

    def _long_line(self, name: str, status: Stat) -> str:
        kind = "d" if status.is_directory else "-" if status.is_file else "?"
        kind += "l" if status.is_symlink else " "
        modified = time.strftime("%Y-%m-%d %H:%M", time.localtime(status.modified))
        return f"{kind} {status.size:>14}  {modified:16}  {self._display_name(name)}\n"

    def _short_line(self, name: str, _: Stat | None = None) -> str:
        return f"{self._display_name(name)}\n"

    def _display_name(self, name: str) -> str:
        return printable(name) if self._is_terminal else name


class _Cat:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._writer = OutputWriter()

    async def __call__(self, operand: _Operand) -> None:
        async with operand.environment.files.open(operand.path, "rb") as file:
            async for block in file:
                with describe_stdout_errors():
                    await self._writer.write(1, block)


class _Remove:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._is_recursive = arguments.recursive
        self._is_forced = arguments.force

    async def __call__(self, operand: _Operand) -> None:
        if not operand.path.strip("/"):
            raise UsageError(f"`{operand.label}` is the root directory; refusing to remove it")
        await operand.environment.files.remove(
            operand.path, recursive=self._is_recursive, missing_ok=self._is_forced
        )


_Operation = Callable[[_Operand], Awaitable[None]]
_OPERATIONS: Final[dict[str, Callable[[argparse.Namespace], _Operation]]] = {
    "ls": _List,
    "cat": _Cat,
    "rm": _Remove,
}
