"""SystemCommands: commands of the machine that the client runs for itself, such as find and xargs.

The PATH of a server may begin with directories of a project (`.venv/bin`, `node_modules/.bin`),
where a confined command may have put a program of any name. For these commands the directories of
the system come first.
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any, Final

from exec_server.client.engine.start_params import SYSTEM_FIRST
from exec_server.client.file_errors import ProgramNotFound
from exec_server.errors import InternalError

if TYPE_CHECKING:
    from exec_server.client.process import Process
    from exec_server.client.results import Result
    from exec_server.client.transfer.plan import Commands

# The exit code of a shell that has not found a program.
_NO_PROGRAM: Final = 127


def with_system_programs(argv: Sequence[str]) -> list[str]:
    """A command, or a script of `/bin/sh -c`, that finds programs of the system first."""
    if list(argv[:2]) == ["/bin/sh", "-c"]:
        return [*argv[:2], SYSTEM_FIRST + argv[2], *argv[3:]]
    return ["/bin/sh", "-c", f'{SYSTEM_FIRST}exec "$@"', "sh", *argv]


class SystemCommands:
    """Runs commands with programs of the system, through an environment."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands

    async def run(self, argv: Sequence[str], **options: Any) -> Result:
        """Raises ProgramNotFound if a command, not one of a script, does not exist."""
        done = await self._commands.run(with_system_programs(argv), **options)
        if done.exit_code == _NO_PROGRAM and argv[0] != "/bin/sh":
            text = "No such file or directory (os error 2)"
            error = InternalError(f"cannot start {argv[0]}: {text}")
            raise ProgramNotFound.from_rpc(error, errno.ENOENT, argv[0])
        return done

    def start(self, argv: Sequence[str], **options: Any) -> Process:
        """Its exit code is 127 if the command does not exist."""
        return self._commands.start(with_system_programs(argv), **options)


class CommandsAs:
    """Runs commands as another user."""

    def __init__(self, commands: Commands, user: str | None) -> None:
        self._commands = commands
        self._user = user

    def run(self, *args: Any, **kwargs: Any) -> Awaitable[Result]:
        return self._commands.run(*args, user=self._user, **kwargs)

    def start(self, *args: Any, **kwargs: Any) -> Process:
        return self._commands.start(*args, user=self._user, **kwargs)
