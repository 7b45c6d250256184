"""Starts a detached command on a server and leaves it running."""

from __future__ import annotations

import argparse

from exec_server.cli.commands.connection import open_environment, run_until_signal
from exec_server.cli.commands.policy_file import command_sandbox, load_policy
from exec_server.cli.commands.printing import print_text
from exec_server.cli.commands.start_failure import start_failure
from exec_server.cli.commands.targets import Target
from exec_server.cli.commands.terminal import window_size
from exec_server.cli.commands.variables import command_variables
from exec_server.errors import ConnectionLost, ExecServerError, SessionLost


def start_detached(arguments: argparse.Namespace, target: Target) -> int:
    """Start the command that the arguments of `exec -d` describe, and print its name."""
    variables = command_variables(arguments.env, tty=arguments.tty)
    policy = load_policy("--sandbox", arguments.sandbox)

    async def work() -> int:
        async with open_environment(target) as environment:
            process = environment.start(
                arguments.argv,
                cwd=arguments.cwd,
                env=variables,
                tty=arguments.tty,
                size=window_size(0) if arguments.tty else None,
                stdin=arguments.interactive,
                sandbox=command_sandbox(policy, arguments.cwd, environment.info),
                user=arguments.user,
                detach=True,
                name=arguments.name,
                max_lifetime=arguments.max_lifetime,
                idle_timeout=arguments.idle_timeout,
            )
            try:
                await process
            except (ConnectionLost, SessionLost):
                raise
            except ExecServerError as error:
                raise start_failure(error, arguments.argv, target.label) from None
            await process.aclose()
        print_text(f"{process.name}\n")
        return 0

    return run_until_signal(work)
