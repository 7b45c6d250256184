"""The operands of file commands: TARGET:PATH, patterns in it, and an operation for each."""

from __future__ import annotations

import argparse
import posixpath
import re
import shlex
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from exec_server.cli.connection import Connections, error_text, run_until_signal
from exec_server.cli.errors import EXIT_FAILURE, CommandError, UsageError
from exec_server.cli.streams import print_status
from exec_server.cli.targets import (
    RemotePath,
    access_options,
    join_path,
    parse_remote_path,
    remote_path_example,
)
from exec_server.client.environment import Environment
from exec_server.client.targets import NAME
from exec_server.errors import RpcError, Unsupported

if TYPE_CHECKING:
    from exec_server.client.files import Files


# Paths of one pattern: as many as the server finds.
MAX_MATCHES: Final = 10_000
_PATTERN: Final = r"[*?\[{]"
# A name of a pattern, or an alternative in it, that begins with a dot.
_NAMES_HIDDEN: Final = r"(^|[{,/])\."


def is_pattern(path: str) -> bool:
    """Whether a path has wildcards, if there is no file of this name."""
    return re.search(_PATTERN, path) is not None


async def find_matches(files: Files, path: str) -> list[str]:
    """The paths that match; an existing path is no pattern. Raises CommandError, RpcError.

    As in a shell, wildcards do not match names that begin with a dot.
    """
    if not is_pattern(path) or await files.exists(path):
        return [path]
    root, pattern = split_pattern(path)
    try:
        matches = await files.glob(pattern, root, limit=MAX_MATCHES)
    except Unsupported:
        raise CommandError(
            f"{path}: this server cannot look for patterns (it has no fsGlob); name each path, or "
            "let a shell of the target find them: exec-server exec TARGET -- sh -c "
            + shlex.quote(f"ls -d {path}")
        ) from None
    if matches.truncated:
        raise CommandError(f"{path}: more than {MAX_MATCHES} paths match")
    return [posixpath.join(root, each) for each in matches if not _is_hidden(each, pattern)]


def _is_hidden(match: str, pattern: str) -> bool:
    """Whether only a wildcard has matched a name with a leading dot.

    With `**` and alternatives that have slashes, names cannot be compared one by one; then a dot
    anywhere in the pattern suffices.
    """
    names, wanted = match.split("/"), pattern.split("/")
    if "**" in pattern or len(names) != len(wanted):
        wanted = [pattern] * len(names)
    return any(
        name.startswith(".") and not re.search(_NAMES_HIDDEN, want)
        for name, want in zip(names, wanted, strict=True)
    )


def split_pattern(path: str) -> tuple[str, str]:
    """The directory before the first name with a wildcard, and the pattern below it."""
    names = path.split("/")
    first = next(index for index, name in enumerate(names) if is_pattern(name))
    root = "/".join(names[:first]) or ("/" if path.startswith("/") else ".")
    return root, "/".join(names[first:])


@dataclass(frozen=True)
class Operand:
    """A path on an environment, and the argument that names it."""

    environment: Environment
    path: str
    label: str


def for_each_operand(
    arguments: argparse.Namespace,
    operation: Callable[[Operand], Awaitable[None]],
    *,
    needs_path: bool = True,
    takes_patterns: bool = False,
    may_be_missing: bool = False,
) -> int:
    """Apply the operation to each of `paths`, also after another one failed; returns the exit code.

    Without `needs_path`, a target alone is its working directory. With `takes_patterns`, a path
    with wildcards is replaced by those that match; there is one unless it `may_be_missing`. Raises
    UsageError.
    """
    paths = [(text, parse_operand(text, needs_path=needs_path)) for text in arguments.paths]
    access = access_options(arguments)

    async def work() -> int:
        code = 0
        async with Connections(access) as connections:
            for text, remote in paths:
                environment = await connections.get(remote.target)
                operands = [Operand(environment, remote.path or ".", text)]
                if takes_patterns and is_pattern(operands[0].path):
                    operands = await _matches(operands[0], remote.target)
                    if not operands and not may_be_missing:
                        print_status(f"{text}: no path matches")
                        code = EXIT_FAILURE
                for operand in operands:
                    try:
                        await operation(operand)
                    except RpcError as error:
                        print_status(f"{operand.label}: {error_text(error, operand.path)}")
                        code = EXIT_FAILURE
        return code

    return run_until_signal(work)


async def _matches(operand: Operand, target: str) -> list[Operand]:
    try:
        paths = await find_matches(operand.environment.files, operand.path)
    except (CommandError, RpcError) as error:
        raise CommandError(f"{operand.label}: {error_text(error, operand.path)}") from None
    if paths == [operand.path]:
        return [operand]
    return [Operand(operand.environment, path, join_path(target, path)) for path in paths]


def parse_operand(text: str, *, needs_path: bool) -> RemotePath:
    """Parse TARGET:PATH, and TARGET alone if no path is needed; raises UsageError."""
    remote = parse_remote_path(text)
    if remote is None:
        # A bare word is the name of a target. Other texts were meant as a path.
        if "/" in text or text in ("", ".", ".."):
            raise UsageError(f"`{text}` is a local path; write TARGET:{text}")
        remote = RemotePath(text, None)
    if needs_path and not remote.path:
        advice = f"write {remote_path_example(remote.target)}"
        if remote.path is None and re.fullmatch(NAME, text) is not None:
            advice += f", or TARGET:{text} if it is a file"
        raise UsageError(f"`{text}` names no file; {advice}")
    return remote
