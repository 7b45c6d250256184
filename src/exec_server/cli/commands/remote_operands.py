"""Applies an operation to each TARGET:PATH operand of a command."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from exec_server.cli.commands.connection import Connections, error_text, run_until_signal
from exec_server.cli.commands.errors import EXIT_FAILURE, UsageError
from exec_server.cli.commands.printing import print_status
from exec_server.cli.commands.targets import (
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
) -> int:
    """Apply the operation to each operand, also after another one failed; returns the exit code.

    Without `needs_path`, a target alone is its working directory. Raises UsageError.
    """
    paths = [parse_operand(text, needs_path=needs_path) for text in words]

    async def work() -> int:
        code = 0
        async with Connections(access) as connections:
            for text, remote in zip(words, paths, strict=True):
                environment = await connections.get(remote.target)
                try:
                    await operation(Operand(environment, remote.path or ".", text))
                except RpcError as error:
                    print_status(f"{text}: {error_text(error, remote.path or '.')}")
                    code = EXIT_FAILURE
        return code

    return run_until_signal(work)


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
