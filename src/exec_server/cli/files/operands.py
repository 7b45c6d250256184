"""Applies an operation to each TARGET:PATH operand of a command."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from exec_server.cli.connection import Connections, error_text, run_until_signal
from exec_server.cli.errors import EXIT_FAILURE, CommandError, UsageError
from exec_server.cli.files.patterns import find_matches, is_pattern
from exec_server.cli.streams import print_status
from exec_server.cli.targets import (
    AccessOptions,
    RemotePath,
    parse_remote_path,
    remote_path_example,
)
from exec_server.client.environment import Environment
from exec_server.errors import RpcError


@dataclass(frozen=True)
class Operand:
    """A path on an environment, and the argument that names it."""

    environment: Environment
    path: str
    label: str


def for_each_operand(
    words: list[str],
    access: AccessOptions,
    operation: Callable[[Operand], Awaitable[None]],
    *,
    needs_path: bool = True,
    takes_patterns: bool = False,
    may_be_missing: bool = False,
) -> int:
    """Apply the operation to each operand, also after another one failed; returns the exit code.

    Without `needs_path`, a target alone is its working directory. With `takes_patterns`, a path
    with wildcards is replaced by those that match; there is one unless it `may_be_missing`. Raises
    UsageError.
    """
    paths = [parse_operand(text, needs_path=needs_path) for text in words]

    async def work() -> int:
        code = 0
        async with Connections(access) as connections:
            for text, remote in zip(words, paths, strict=True):
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
    """The operands that a pattern means; raises CommandError."""
    try:
        paths = await find_matches(operand.environment.files, operand.path)
    except (CommandError, RpcError) as error:
        raise CommandError(f"{operand.label}: {error_text(error, operand.path)}") from None
    if paths == [operand.path]:
        return [operand]
    return [Operand(operand.environment, path, f"{target}:{path}") for path in paths]


def parse_operand(text: str, *, needs_path: bool) -> RemotePath:
    """Parse TARGET:PATH, and TARGET alone if no path is needed; raises UsageError."""
    remote = parse_remote_path(text)
    if remote is None:
        # A bare word is the name of a target. Other texts were meant as a path.
        if "/" in text or text in ("", ".", ".."):
            raise UsageError(f"`{text}` is a local path; write TARGET:{text}")
        remote = RemotePath(text, None)
    if needs_path and not remote.path:
        raise UsageError(f"`{text}` names no file; write {remote_path_example(remote.target)}")
    return remote
