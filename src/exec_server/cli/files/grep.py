"""`exec-server grep`: search the files of a target."""

from __future__ import annotations

import argparse
import posixpath
from typing import TYPE_CHECKING, Final

from exec_server.cli.errors import EXIT_USAGE
from exec_server.cli.parser import CommandParser
from exec_server.cli.targets import PathParser, with_access_flags

if TYPE_CHECKING:
    from exec_server.cli.files.operands import Operand
    from exec_server.client.results import GrepMatch


_DESCRIPTION: Final = """\
Print the lines below directories, or in files, of a target that match a regular expression.
Binary files are skipped. The exit code is 1 if no line matches.
"""
_EPILOG: Final = """\
examples:
  exec-server grep 'import +os' build:src
  exec-server grep -iF -g '*.{c,h}' -C 2 'buffer overflow' build:
  exec-server grep -lw TODO build:src              the files that have the word
  exec-server grep --json main build:src | jq .path
"""
_MORE: Final = "{}: there may be further matches; see -m, -g and --exclude"


def build_parser() -> CommandParser:
    parser = PathParser("grep", _DESCRIPTION, _EPILOG)
    parser.add_argument("pattern", metavar="PATTERN")
    parser.add_argument("paths", metavar="TARGET:PATH", nargs="+")
    parser.add_argument("-i", "--ignore-case", action="store_true", help="ignore case")
    parser.add_argument(
        "-F", "--fixed-strings", action="store_true", help="PATTERN is a plain text"
    )
    parser.add_argument("-w", "--word-regexp", action="store_true", help="match whole words")
    parser.add_argument(
        "-v", "--invert-match", action="store_true", help="print the lines that do not match"
    )
    parser.add_argument(
        *("-l", "--files-with-matches"), action="store_true", help="print only paths of files"
    )
    parser.add_argument(
        "-c", "--count", action="store_true", help="print paths with the number of their lines"
    )
    for flag, name, text in (
        ("-A", "after", "after"),
        ("-B", "before", "before"),
        ("-C", "context", "around"),
    ):
        parser.add_argument(
            flag,
            f"--{name}",
            type=int,
            default=0,
            metavar="N",
            help=f"also print N lines {text} it",
        )
    parser.add_argument(
        "-g", "--glob", metavar="GLOB", help="search only files that match, as '*.py'"
    )
    parser.add_argument(
        "--exclude",
        metavar="GLOB",
        default=".git",
        help="skip files and directories (default: .git)",
    )
    parser.add_argument(
        *("-m", "--max-count"),
        type=int,
        default=1000,
        metavar="N",
        help="stop after N matches, or files of -l and -c (1000)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object for each match")
    parser.add_argument(
        *("-r", "-R", "-n", "-H", "-E"),
        dest="grep_habit",
        action="store_true",
        help="no effect: directories are searched, PATTERN is an extended regular expression, and "
        "paths and line numbers are printed",
    )
    return with_access_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    from exec_server.cli.files.operands import for_each_operand
    from exec_server.cli.streams import print_status, print_text

    if arguments.count or arguments.files_with_matches:
        return _run_counts(arguments)
    before = max(arguments.before, arguments.context)
    after = max(arguments.after, arguments.context)
    has_groups = before > 0 or after > 0
    count = 0

    async def search(operand: Operand) -> None:
        nonlocal count
        matches = await operand.environment.files.grep(
            arguments.pattern,
            operand.path,
            literal=arguments.fixed_strings,
            ignore_case=arguments.ignore_case,
            word=arguments.word_regexp,
            invert=arguments.invert_match,
            glob=arguments.glob,
            exclude=arguments.exclude or None,
            before=before,
            after=after,
            limit=arguments.max_count,
        )
        if arguments.json:
            print_text("".join(_json_line(operand, match) for match in matches))
        elif matches:
            is_directory = (await operand.environment.files.stat(operand.path)).is_directory
            paths = [
                _display_path(operand, each.path, is_directory=is_directory) for each in matches
            ]
            text = _text_lines(paths, matches, has_groups=has_groups)
            print_text(f"--\n{text}" if has_groups and count else text)
        count += len(matches)
        if matches.truncated:
            print_status(_MORE.format(operand.label))

    return _exit_code(for_each_operand(arguments, search, needs_path=False), count)


def _exit_code(failed: int, count: int) -> int:
    """The exit code of grep(1), for that of all operands and the number of matches."""
    if failed:
        return EXIT_USAGE if failed == 1 else failed
    return 0 if count else 1


def _run_counts(arguments: argparse.Namespace) -> int:
    """Print the files that have matches, with -c their number."""
    import json

    from exec_server.cli.files.operands import for_each_operand
    from exec_server.cli.streams import print_status, print_text
    from exec_server.errors import printable

    total = 0

    async def search(operand: Operand) -> None:
        nonlocal total
        files = operand.environment.files
        counts = await files.grep_count(
            arguments.pattern,
            operand.path,
            literal=arguments.fixed_strings,
            ignore_case=arguments.ignore_case,
            word=arguments.word_regexp,
            invert=arguments.invert_match,
            glob=arguments.glob,
            exclude=arguments.exclude or None,
            limit=arguments.max_count,
        )
        is_directory = bool(counts) and (await files.stat(operand.path)).is_directory
        for each in counts:
            if arguments.json:
                found = {"operand": operand.label, "path": each.path, "count": each.count}
                print_text(json.dumps(found) + "\n")
                continue
            path = printable(_display_path(operand, each.path, is_directory=is_directory))
            print_text(f"{path}\n" if arguments.files_with_matches else f"{path}:{each.count}\n")
        total += len(counts)
        if counts.truncated:
            print_status(_MORE.format(operand.label))

    return _exit_code(for_each_operand(arguments, search, needs_path=False), total)


def _json_line(operand: Operand, match: GrepMatch) -> str:
    import json

    members = {name: getattr(match, name) for name in ("path", "line", "column", "text")}
    return (
        json.dumps(
            {"operand": operand.label, **members, "before": match.before, "after": match.after}
        )
        + "\n"
    )


def _display_path(operand: Operand, path: str, *, is_directory: bool) -> str:
    """The path of a match as grep prints it: that of the operand, and the path below it."""
    if not is_directory:
        return operand.path
    return path if operand.path == "." else posixpath.join(operand.path, path)


def _text_lines(paths: list[str], matches: list[GrepMatch], *, has_groups: bool) -> str:
    """PATH:LINE:TEXT as grep prints it, with `-` for the lines around a match.

    Each line is printed once, and with `has_groups` a line `--` is between those that are apart.
    """
    from exec_server.errors import printable

    lines: dict[tuple[str, int], tuple[str, str]] = {}
    for path, match in zip(paths, matches, strict=True):
        first = match.line - len(match.before)
        for number, text in enumerate((*match.before, match.text, *match.after), first):
            if number == match.line:
                lines[path, number] = (":", text)
            else:
                lines.setdefault((path, number), ("-", text))
    output = []
    last: tuple[str, int] | None = None
    for (path, number), (mark, text) in lines.items():
        if has_groups and last is not None and last != (path, number - 1):
            output.append("--\n")
        last = (path, number)
        tab = "\t"
        output.append(f"{printable(path)}{mark}{number}{mark}{printable(text, keep=tab)}\n")
    return "".join(output)
