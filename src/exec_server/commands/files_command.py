"""`exec-server ls`, `cat` and `rm`: files of a target."""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from exec_server.client.environment import Environment
from exec_server.client.results import Entry, Stat
from exec_server.commands.arguments import access
from exec_server.commands.connection import Connections, reason, run_to_end
from exec_server.commands.failures import FAILED, Mistake
from exec_server.commands.printing import explained_output, print_text, say
from exec_server.commands.progress import printable
from exec_server.commands.streams import Outlet
from exec_server.commands.targets import Place, split_place, with_path
from exec_server.errors import RpcError

# Questions under way for one directory: enough to hide the distance to a server.
STATS_AT_A_TIME: Final = 32
# `ls -l` of a directory asks in turns of this many, so that the answers it holds are bounded.
STATS_IN_A_TURN: Final = 1024


@dataclass(frozen=True)
class _Item:
    """One operand: a path on an environment, and what the user called it."""

    environment: Environment
    path: str
    label: str


def run(command: str, arguments: argparse.Namespace) -> int:
    """Do what the arguments say; returns the exit code."""
    places = [_place(text, needs_path=command != "ls") for text in arguments.places]
    perform = _PERFORMERS[command](arguments)

    async def work() -> int:
        code = 0
        async with Connections(access(arguments)) as connections:
            for text, place in zip(arguments.places, places, strict=True):
                environment = await connections.get(place.target)
                try:
                    await perform(_Item(environment, place.path or ".", text))
                except RpcError as error:
                    say(f"{text}: {reason(error, place.path or '.')}")
                    code = FAILED
        return code

    return run_to_end(work)


def _place(text: str, *, needs_path: bool) -> Place:
    place = split_place(text)
    if place is None:
        # A name alone is a target. Anything else was meant to be a path.
        if "/" in text or text in ("", ".", ".."):
            raise Mistake(f"`{text}` is a local path; write TARGET:{text}")
        place = Place(text, None)
    if needs_path and not place.path:
        raise Mistake(f"`{text}` names no file; write {with_path(place.target)}")
    return place


class _List:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._is_long = arguments.long
        self._shows_all = arguments.all
        self._has_headings = len(arguments.places) > 1
        self._count = 0
        self._is_terminal = os.isatty(1)

    async def __call__(self, item: _Item) -> None:
        files = item.environment.files
        status = await files.stat(item.path)
        if not status.is_directory:
            print_text(self._line(item.path, status) if self._is_long else self._name(item.path))
            return
        entries = sorted(await files.list(item.path), key=lambda entry: entry.name)
        if not self._shows_all:
            entries = [entry for entry in entries if not entry.name.startswith(".")]
        if self._has_headings:
            print_text(("\n" if self._count else "") + self._name(f"{item.label}:"))
        self._count += 1
        if not self._is_long:
            print_text("".join(self._name(entry.name) for entry in entries))
            return
        for start in range(0, len(entries), STATS_IN_A_TURN):
            print_text(await self._lines(item, entries[start : start + STATS_IN_A_TURN]))

    async def _lines(self, item: _Item, entries: list[Entry]) -> str:
        """The long lines of some entries; those that are gone by now are left out."""
        gate = asyncio.Semaphore(STATS_AT_A_TIME)

        async def ask(entry: Entry) -> str:
            async with gate:
                try:
                    return self._line(entry.name, await item.environment.files.stat(entry.path))
                except RpcError as error:
                    return f"?  {'?':>14}  {'?':16}  {self._shown(entry.name)} ({reason(error)})\n"

        try:
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(ask(entry)) for entry in entries]
        except ExceptionGroup as group:  # the session is lost, for all of them
            raise group.exceptions[0] from None
        return "".join(task.result() for task in asked)

    def _line(self, name: str, status: Stat) -> str:
        kind = "d" if status.is_directory else "-" if status.is_file else "?"
        kind += "l" if status.is_symlink else " "
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(status.modified))
        return f"{kind} {status.size:>14}  {when:16}  {self._name(name)}"

    def _shown(self, name: str) -> str:
        return printable(name) if self._is_terminal else name

    def _name(self, name: str) -> str:
        return f"{self._shown(name)}\n"


class _Cat:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._outlet = Outlet()

    async def __call__(self, item: _Item) -> None:
        async with item.environment.files.open(item.path, "rb") as file:
            async for block in file:
                with explained_output():
                    await self._outlet.write(1, block)


class _Remove:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._is_recursive = arguments.recursive
        self._is_forced = arguments.force

    async def __call__(self, item: _Item) -> None:
        if not item.path.strip("/"):
            raise Mistake(f"`{item.label}` would remove everything there is")
        await item.environment.files.remove(
            item.path, recursive=self._is_recursive, missing_ok=self._is_forced
        )


_Performer = Callable[[_Item], Awaitable[None]]
_PERFORMERS: Final[dict[str, Callable[[argparse.Namespace], _Performer]]] = {
    "ls": _List,
    "cat": _Cat,
    "rm": _Remove,
}
