"""Ends detached commands of a target, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from exec_server.cli.commands.connection import error_text, open_environment
from exec_server.cli.commands.detached_commands import END, attached
from exec_server.cli.commands.errors import EXIT_FAILURE, CommandError
from exec_server.cli.commands.printing import print_error
from exec_server.cli.commands.targets import Target
from exec_server.client.environment import Environment
from exec_server.errors import RpcError

_KILL: Final = frozenset({"KILL", "SIGKILL", "9"})


async def kill_commands(target: Target, names: Sequence[str], signal: str | None) -> int:
    """End each command, or send it a signal; the errors are printed."""
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
    return code


async def _kill(environment: Environment, target: Target, name: str, signal: str | None) -> None:
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
