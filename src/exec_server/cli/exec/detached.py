"""`exec-server ps`, `logs`, `attach` and `kill`: detached commands of a target."""

from __future__ import annotations

import argparse
import re
import shlex
from typing import TYPE_CHECKING, Final, NoReturn

from exec_server.cli.errors import EXIT_FAILURE, CommandError
from exec_server.cli.exec.command import add_escape_flag
from exec_server.cli.parser import CommandParser, line_count
from exec_server.cli.streams import (
    by_descriptor,
    json_text,
    local_time,
    print_error,
    print_status,
    print_text,
)
from exec_server.cli.targets import TargetParser, chosen_target, with_access_flags
from exec_server.errors import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from exec_server.cli.streams import OutputWriter
    from exec_server.client.environment import Environment
    from exec_server.client.targets import Target
    from exec_server.protocol.process import DetachedProcessInfo

# Characters of a command line in the table; the JSON form has more of it.
MAX_COMMAND: Final = 60
# A position behind all events: only those that follow are received.
END: Final = 2**64 - 1

_HEADINGS: Final = ("NAME", "STATUS", "STARTED", "CLIENTS", "COMMAND")
_LIMITS: Final = {"maxLifetime": "max lifetime", "idleTimeout": "idle timeout"}
_KILL: Final = frozenset({"KILL", "SIGKILL", "9"})
# -9, -HUP or -SIGHUP, as kill(1) takes them.
_SHORT_SIGNAL: Final = re.compile(r"-([0-9]{1,2}|[A-Z][A-Z0-9]+)")

_PS_DESCRIPTION: Final = """\
List the detached commands of a target, which `exec-server exec -d` has started, also those of
other clients. Commands that have ended are listed for an hour.
"""
_PS_EPILOG: Final = """\
examples:
  exec-server ps build
  exec-server ps --json ws://127.0.0.1:7700
"""


class NameParser(TargetParser):
    """The parser of a command on detached commands: says where their names are."""

    def error(self, message: str) -> NoReturn:
        is_missing = message.startswith("the following arguments are required:")
        hint = "; `exec-server ps TARGET` lists the names" if is_missing else ""
        super().error(message + hint)


def build_ps_parser() -> CommandParser:
    parser = TargetParser("ps", _PS_DESCRIPTION, _PS_EPILOG)
    parser.add_argument("target", metavar="TARGET", nargs="?")
    parser.add_argument(
        *("-a", "--all"),
        action="store_true",
        help="no effect: commands that have ended are listed too",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON array instead of a table")
    return with_access_flags(parser)


def run_ps(arguments: argparse.Namespace) -> int:
    target = chosen_target(arguments)

    from exec_server.cli.connection import open_environment, run_until_signal

    async def work() -> int:
        async with open_environment(target) as environment:
            listed = await environment.detached_processes()
        print_text(as_json(listed) if arguments.json else as_table(listed))
        return 0

    return run_until_signal(work)


def as_json(listed: Sequence[DetachedProcessInfo]) -> str:
    """The list with the names of the protocol."""
    import msgspec

    return json_text([msgspec.to_builtins(each) for each in listed])


def as_table(listed: Sequence[DetachedProcessInfo]) -> str:
    """One line for each process, in columns; nothing but the headings if there is none."""
    rows = [_HEADINGS, *(_row(each) for each in listed)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS) - 1)]
    lines = []
    for *cells, command in rows:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append("  ".join((*padded, command)).rstrip() + "\n")
    return "".join(lines)


def _row(each: DetachedProcessInfo) -> tuple[str, ...]:
    started = local_time(each.started_at_ms // 1000, "%Y-%m-%d %H:%M:%S")
    command = printable(shlex.join(each.argv))
    if len(command) > MAX_COMMAND:
        command = f"{command[: MAX_COMMAND - 1]}…"
    return printable(each.name), _status(each), started, str(each.attached), command


def _status(each: DetachedProcessInfo) -> str:
    if each.running:
        return "running"
    limit = "" if each.ended_by is None else f" ({_LIMITS[each.ended_by]})"
    return f"exited {each.exit_code}{limit}"


_LOGS_DESCRIPTION: Final = """\
Print the output of a detached command (`exec-server exec -d`), as far as the server retains it:
the last MiB, until an hour after its end. Its stderr is printed to stderr.
"""
_LOGS_EPILOG: Final = """\
examples:
  exec-server logs build web
  exec-server logs -f build web | grep -i error
  exec-server logs -n 20 -f build web
  exec-server logs : web                           on the target of EXEC_SERVER_TARGET
"""


def build_logs_parser() -> CommandParser:
    parser = NameParser("logs", _LOGS_DESCRIPTION, _LOGS_EPILOG)
    parser.add_argument("target", metavar="TARGET")
    parser.add_argument("name", metavar="NAME")
    parser.add_argument(
        "-f",
        "--follow",
        action="store_true",
        help="go on with new output until the command has ended",
    )
    parser.add_argument(
        *("-n", "--lines", "--tail"),
        metavar="N",
        type=line_count,
        help="begin with the last N lines of the retained output (default: all of it)",
    )
    return with_access_flags(parser)


def run_logs(arguments: argparse.Namespace) -> int:
    target = chosen_target(arguments)

    from exec_server.cli.connection import run_until_signal

    return run_until_signal(
        lambda: print_output(
            target, arguments.name, is_following=arguments.follow, lines=arguments.lines
        )
    )


Output = list[tuple[str, bytes]]  # the stream and the bytes of each chunk


async def print_output(
    target: Target, name: str, *, is_following: bool, lines: int | None = None
) -> int:
    """Print the output of a command, or its last lines; returns the exit code of `logs`."""
    from exec_server.cli.connection import attached, open_environment
    from exec_server.cli.streams import OutputWriter

    writer = OutputWriter()
    async with open_environment(target) as environment:
        after = lost = 0
        if lines is not None or not is_following:
            output, lost, after = await _retained(environment, target, name)
            await _write_output(writer, output if lines is None else last_lines(output, lines))
            lost = 0 if lines is not None else lost
        if is_following:
            async with attached(environment, target, name, after=after) as process:
                while chunks := await process.read_some():
                    await _write_output(writer, ((each.stream, each.data) for each in chunks))
                lost += process.lost_bytes
    if lost:
        print_status(f"{lost} bytes of older output are not retained any more")
    return 0


def last_lines(output: Output, count: int) -> Output:
    """The last lines of an output, of both streams together."""
    tail: Output = []
    missing = count
    is_last = True  # of all: the newline at its end begins no line
    for stream, data in reversed(output):
        end = len(data)
        while missing and (end := data.rfind(b"\n", 0, end)) >= 0:
            missing -= not (is_last and end == len(data) - 1)
        is_last = is_last and not data
        if not missing:
            tail.append((stream, data[end + 1 :] if count else b""))
            break
        tail.append((stream, data))
    return tail[::-1]


async def _retained(environment: Environment, target: Target, name: str) -> tuple[Output, int, int]:
    """The output up to now, at most the MiB that servers retain; lost bytes; the last event."""
    from exec_server.cli.connection import attached
    from exec_server.client.process import read_retained

    async with attached(environment, target, name, after=END) as process:
        listed = await environment.detached_processes()
        last = max((each.next_seq - 1 for each in listed if each.name == name), default=0)
        chunks, lost, after = await read_retained(environment.session, process, last)
    return [(chunk.stream, chunk.data) for chunk in chunks], lost, after


async def _write_output(writer: OutputWriter, chunks: Iterable[tuple[str, bytes]]) -> None:
    for descriptor, data in by_descriptor(chunks):
        await writer.print(data, descriptor)


_ATTACH_DESCRIPTION: Final = """\
Attach to a detached command (`exec-server exec -d`): print its output, from the oldest that the
server retains to its end, and send it stdin. Several clients may be attached at a time; all of
them see the output, and the input of all reaches the command. Leaving does not end the command.
"""
_ATTACH_EPILOG: Final = """\
exit code:
  the exit code of the command, if it has ended; 0 after ~. and 128 + N after signal N
  1     there is no such command
  255   there is no connection to the target, or the session was lost

signals:
  INT, TERM and HUP let exec-server leave; the command does not get them. On a terminal the
  keys, Ctrl-C among them, are sent to the command.

on a terminal, at the beginning of a line:
  ~.    leave; the command goes on        ~^Z   suspend exec-server
  ~?    list these escapes                ~~    send ~

examples:
  exec-server attach build web
  exec-server attach -n build web
"""


def build_attach_parser() -> CommandParser:
    parser = NameParser("attach", _ATTACH_DESCRIPTION, _ATTACH_EPILOG)
    parser.add_argument("target", metavar="TARGET")
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("-n", "--no-stdin", action="store_true", help="send no input")
    add_escape_flag(parser)
    return with_access_flags(parser)


def run_attach(arguments: argparse.Namespace) -> int:
    target = chosen_target(arguments)

    from exec_server.cli.exec.execution import attach

    return attach(arguments, target)


_KILL_DESCRIPTION: Final = """\
End detached commands (`exec-server exec -d`): SIGTERM first, and SIGKILL to the command and all
its descendants if it has not ended after 5 seconds.
"""
_KILL_EPILOG: Final = """\
examples:
  exec-server kill build web
  exec-server kill -s HUP build web worker-1
  exec-server kill -9 build web
"""


class KillParser(NameParser):
    """Takes a signal in the short form of kill(1) too."""

    def parse_words(self, words: list[str]) -> argparse.Namespace:
        if words and (short := _SHORT_SIGNAL.fullmatch(words[0])) is not None:
            words = [f"--signal={short[1]}", *words[1:]]
        return super().parse_words(words)


def _signal(text: str) -> str:
    from exec_server.client.exceptions import SIGNALS  # slow to import

    name = text.upper().removeprefix("SIG")
    if name not in SIGNALS.values() and not (text.isdecimal() and int(text) in SIGNALS):
        raise argparse.ArgumentTypeError(f"unknown signal `{text}`; examples are TERM, HUP and 9")
    return text


def build_kill_parser() -> KillParser:
    parser = KillParser("kill", _KILL_DESCRIPTION, _KILL_EPILOG)
    parser.add_argument("target", metavar="TARGET")
    parser.add_argument("names", metavar="NAME", nargs="+")
    parser.add_argument(
        "-s",
        "--signal",
        metavar="SIGNAL",
        type=_signal,
        help="send only this signal, with or without SIG; KILL also ends all descendants; "
        "as the first word also -SIGNAL",
    )
    return with_access_flags(parser)


def run_kill(arguments: argparse.Namespace) -> int:
    target = chosen_target(arguments)

    from exec_server.cli.connection import run_until_signal

    return run_until_signal(lambda: kill_commands(target, arguments.names, arguments.signal))


async def kill_commands(target: Target, names: Sequence[str], signal: str | None) -> int:
    """End each command, or send it a signal; the errors are printed."""
    from exec_server.cli.connection import error_text, open_environment
    from exec_server.errors import RpcError

    code = 0
    async with open_environment(target) as environment:
        for name in names:
            try:
                await _kill(environment, target, name, signal)
            except CommandError as error:
                print_error(f"Error: {error}")
                code = EXIT_FAILURE
            except RpcError as error:
                print_error(f"Error: {target.label}: {name}: {error_text(error)}")
                code = EXIT_FAILURE
            except TimeoutError as error:
                print_error(f"Error: {target.label}: {error}")
                code = EXIT_FAILURE
    return code


async def _kill(environment: Environment, target: Target, name: str, signal: str | None) -> None:
    from exec_server.cli.connection import attached

    listed = await environment.detached_processes()
    if any(each.name == name and each.closed for each in listed):
        raise CommandError(f"{target.label}: {name} has already ended")
    async with attached(environment, target, name, after=END) as process:
        if signal is None:
            await process.terminate()
        elif signal.upper() in _KILL:
            await process.kill()
        else:
            await process.signal(int(signal) if signal.isdecimal() else signal)
