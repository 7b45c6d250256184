"""`exec-server help` and `version`, and the manual pages, from the argument parsers and the table.

hatch_build.py installs the pages with the wheel. They are hand-written because argparse-manpage
(4.8) leaves quotes, tildes and carets to roff, so that examples cannot be copied, and has no
sections for exit codes and no pages for groups.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from exec_server import __version__
from exec_server.cli.errors import UsageError
from exec_server.cli.parser import TARGET_FORMS, CommandParser
from exec_server.cli.streams import print_text
from exec_server.cli.table import COMMANDS, GROUPS, CommandRow, unknown_command

if TYPE_CHECKING:
    from pathlib import Path

# Digits of a commit: enough to find it in this project for ever.
COMMIT_DIGITS: Final = 12

_USAGE: Final = """\
usage: exec-server COMMAND ...
       exec-server [FLAG ...]     the server, as `exec-server serve`
"""
_OVERVIEW: Final = """\
Run commands, terminals and file operations on other machines, or serve them on this one for a
coding agent.
"""
_OVERVIEW_EPILOG: Final = """\
examples:
  exec-server serve --listen ws://127.0.0.1:7700   on the machine to work on
  exec-server exec ws://127.0.0.1:7700 uname -a
  exec-server shell ws://127.0.0.1:7700
  exec-server cp report.pdf ws://127.0.0.1:7700:/tmp/

Flags, exit codes and more examples of a command: exec-server COMMAND --help
"""

_FILES: Final = """\
files:
  ~/.config/exec-server/targets.toml   named targets; `exec-server targets --help` describes it
"""
# Characters that roff would change or interpret, and non-ASCII ones by their number.
_SPECIAL: Final = {"\\": r"\e", "-": r"\-", "'": r"\(aq", "`": r"\(ga", "^": r"\(ha", "~": r"\(ti"}
_HEADING: Final = re.compile(r"\S.*:")


def overview_text() -> str:
    """The whole text, with a line for each command."""
    groups = map(_group_list, GROUPS)
    return "\n".join([_USAGE, _OVERVIEW, *groups, TARGET_FORMS, _OVERVIEW_EPILOG])


def _group_list(group: str) -> str:
    width = max(len(command.name) for command in COMMANDS.values() if command.is_visible)
    members = [command for command in COMMANDS.values() if command.group == group]
    return f"{group}:\n" + "".join(f"  {each.name:{width}}   {each.summary}\n" for each in members)


_DESCRIPTION: Final = """\
List the commands, or show the help of one: the same as `exec-server COMMAND --help`.
"""
_EPILOG: Final = """\
examples:
  exec-server help
  exec-server help exec
  exec-server help sandbox run
"""


def build_parser() -> CommandParser:
    parser = CommandParser("help", _DESCRIPTION, _EPILOG)
    parser.usage = "exec-server help [COMMAND]"
    parser.add_argument("words", metavar="COMMAND", nargs=argparse.REMAINDER)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print the help; returns the exit code. Raises UsageError for an unknown command."""
    if not arguments.words:
        print_text(overview_text())
        return 0
    name, *words = arguments.words
    if name not in COMMANDS:
        raise UsageError(unknown_command(name))
    parser = COMMANDS[name].build_parser()
    if isinstance(parser, CommandParser) and parser.verbs:
        if words and " ".join(words) not in parser.verbs:
            raise UsageError(f"`exec-server {name}` has no command `{' '.join(words)}`")
        parser.parse_words([*words, "--help"])
    if words and COMMANDS[name].is_client:  # the others get the words of `COMMAND ... --help` too
        raise UsageError(f"`exec-server {name}` has no command `{words[0]}`")
    parser.parse_args([*words, "--help"])
    return 0


_VERSION_DESCRIPTION: Final = """\
Print the version of exec-server, and in a checkout its commit. `exec-server info TARGET` shows the
version of a server.
"""
_VERSION_EPILOG: Final = """\
examples:
  exec-server version                              name and version
  exec-server version | cut -d ' ' -f 2            the version alone
"""


def build_version_parser() -> CommandParser:
    return CommandParser("version", _VERSION_DESCRIPTION, _VERSION_EPILOG)


def run_version(_: argparse.Namespace) -> int:
    """Print name, version and commit; returns the exit code."""
    commit = _checkout_commit()
    print_text(f"exec-server {__version__}{f' (commit {commit})' if commit else ''}\n")
    return 0


def _checkout_commit() -> str:
    """The commit of the checkout, read from its files as Git may be missing; empty if installed."""
    from pathlib import Path

    root = Path(__file__).parents[3]
    try:
        directory = root / ".git"
        if directory.is_file():  # the checkout is a worktree
            directory = root / directory.read_text().removeprefix("gitdir:").strip()
        common = directory / "commondir"
        shared = directory / common.read_text().strip() if common.exists() else directory
        name = (directory / "HEAD").read_text().strip()
        if name.startswith("ref: "):
            name = _referenced_commit(shared, name.removeprefix("ref: "))
    except (OSError, ValueError):
        return ""
    return name[:COMMIT_DIGITS] if re.fullmatch(r"[0-9a-f]{40,64}", name) else ""


def _referenced_commit(directory: Path, name: str) -> str:
    if (directory / name).exists():
        return (directory / name).read_text().strip()
    lines = (directory / "packed-refs").read_text().splitlines()
    return next((line.partition(" ")[0] for line in lines if line.endswith(f" {name}")), "")


def pages() -> dict[str, str]:
    """The text of each page by its file name."""
    texts = {"exec-server.1": _overview_page()}
    for command in COMMANDS.values():
        if command.is_visible:
            texts |= _command_pages(command)
    return texts


def _command_pages(command: CommandRow) -> dict[str, str]:
    parser = command.build_parser()
    texts = {_file_name(parser): _page(parser, command.summary)}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            summaries = {each.dest: each.help or "" for each in action._choices_actions}
            for name, each in action.choices.items():
                texts[_file_name(each)] = _page(each, summaries[name])
    return texts


def _file_name(parser: argparse.ArgumentParser) -> str:
    return f"{parser.prog.replace(' ', '-')}.1"


def _overview_page() -> str:
    lines = _head("exec-server", "run commands and files on other machines, or serve this one")
    lines += [".SH SYNOPSIS", *_unfilled(_usage_lines(_USAGE))]
    lines += [".SH DESCRIPTION", *_blocks(_OVERVIEW)]
    note = _escaped("Each one has a page of its own, such as exec-server-exec(1).")
    lines += [".SH COMMANDS", note]
    for group in GROUPS:
        lines.append(f".SS {_escaped(group)}")
        for command in COMMANDS.values():
            if command.group == group:
                lines += [".TP", f".B {_escaped(command.name)}", _escaped(command.summary)]
    return _joined([*lines, *_blocks(TARGET_FORMS), *_blocks(_FILES)])


def _page(parser: argparse.ArgumentParser, summary: str) -> str:
    lines = _head(parser.prog.replace(" ", "-"), summary)
    lines += [".SH SYNOPSIS", *_unfilled(_usage_lines(parser.format_usage()))]
    lines += [".SH DESCRIPTION", *_blocks(parser.description or "")]
    lines += [".SH OPTIONS", *_options(parser), *_blocks(parser.epilog or "")]
    return _joined([*lines, ".SH SEE ALSO", r".BR exec\-server (1)"])


def _head(name: str, summary: str) -> list[str]:
    title = _escaped(name.upper())
    return [
        f'.TH {title} 1 "" "exec\\-server {_escaped(__version__)}" "exec\\-server manual"',
        ".SH NAME",
        rf"{_escaped(name)} \- {_escaped(summary)}",
    ]


def _usage_lines(usage: str) -> list[str]:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", usage)  # Python 3.14 colours it on a terminal
    return [line[len("usage: ") :] for line in plain.rstrip().splitlines()]


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """One paragraph for each flag, below the title of its group."""
    for group in parser._action_groups:
        actions = [
            action
            for action in group._group_actions
            if action.option_strings and action.help != argparse.SUPPRESS
        ]
        if actions and group.title != "options":
            yield f".SS {_escaped(group.title or '')}"
            yield from _blocks(group.description or "")
        for action in actions:
            yield from (".TP", f".B {_escaped(_invocation(action))}", _escaped(action.help or ""))


def _invocation(action: argparse.Action) -> str:
    names = ", ".join(action.option_strings)
    if action.nargs == 0:
        return names
    if action.choices is not None:
        return f"{names} {'|'.join(map(str, action.choices))}"
    return f"{names} {action.metavar or action.dest.upper()}"


def _blocks(text: str) -> Iterator[str]:
    """Paragraphs; a line that ends with a colon before indented lines is the title of a section."""
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        lines = block.splitlines()
        while lines:
            is_title = _HEADING.fullmatch(lines[0]) and lines[1:2] and lines[1].startswith(" ")
            if is_title:
                yield f".SH {_escaped(lines.pop(0)[:-1].upper())}"
            is_indented = lines[0].startswith(" ")
            end = next(
                (at for at, line in enumerate(lines) if line.startswith(" ") != is_indented),
                len(lines),
            )
            if is_indented:
                yield from _unfilled(lines[:end])
            else:
                yield from (".PP", *map(_escaped, lines[:end]))
            lines = lines[end:]


def _unfilled(lines: Iterable[str]) -> Iterator[str]:
    yield ".nf"
    yield from map(_escaped, lines)
    yield ".fi"


def _escaped(text: str) -> str:
    """Text that roff prints as it is."""
    characters = "".join(
        _SPECIAL.get(each) or (each if each.isascii() else rf"\[u{ord(each):04X}]") for each in text
    )
    return rf"\&{characters}" if characters.startswith((".", "'")) else characters


def _joined(lines: Iterable[str]) -> str:
    return "\n".join(lines) + "\n"
