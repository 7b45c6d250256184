"""Detached commands of a target: their table, and attaching to one with a helpful error."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import msgspec

from exec_server.cli.commands.connection import error_text
from exec_server.cli.commands.errors import CommandError
from exec_server.cli.commands.local_time import local_time
from exec_server.cli.commands.printing import json_text
from exec_server.cli.commands.targets import Target
from exec_server.client.environment import Environment
from exec_server.client.process import DetachedProcess
from exec_server.errors import InvalidRequest
from exec_server.printable import printable
from exec_server.protocol.detached import ListedDetached

# Characters of a command line in the table; the JSON form has more of it.
MAX_COMMAND: Final = 60
# A position behind all events: only those that follow are received.
END: Final = 2**64 - 1

_HEADINGS: Final = ("NAME", "STATUS", "STARTED", "CLIENTS", "COMMAND")
_LIMITS: Final = {"maxLifetime": "max lifetime", "idleTimeout": "idle timeout"}


@asynccontextmanager
async def attached(
    environment: Environment, target: Target, name: str, *, after: int = 0
) -> AsyncIterator[DetachedProcess]:
    """Attach to a detached command; raises CommandError if there is none of this name."""
    process = environment.attach(name, after=after)
    try:
        await process
    except InvalidRequest as error:
        text = f"{target.label}: {error_text(error)}"
        hint = f"`exec-server ps {shlex.quote(target.label)}` lists the names"
        raise CommandError(f"{text}\n{hint}") from None
    try:
        yield process
    finally:
        await process.aclose()


def as_json(listed: Sequence[ListedDetached]) -> str:
    """The list with the names of the protocol."""
    return json_text([msgspec.to_builtins(each) for each in listed])


def as_table(listed: Sequence[ListedDetached]) -> str:
    """One line for each process, in columns; nothing but the headings if there is none."""
    rows = [_HEADINGS, *(_row(each) for each in listed)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS) - 1)]
    lines = []
    for *cells, command in rows:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append("  ".join((*padded, command)).rstrip() + "\n")
    return "".join(lines)


def _row(each: ListedDetached) -> tuple[str, ...]:
    started = local_time(each.started_at_ms // 1000, "%Y-%m-%d %H:%M:%S")
    command = printable(shlex.join(each.argv))
    if len(command) > MAX_COMMAND:
        command = f"{command[: MAX_COMMAND - 1]}…"
    return printable(each.name), _status(each), started, str(each.attached), command


def _status(each: ListedDetached) -> str:
    if each.running:
        return "running"
    limit = "" if each.ended_by is None else f" ({_LIMITS[each.ended_by]})"
    return f"exited {each.exit_code}{limit}"
