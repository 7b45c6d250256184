"""run_cell: one cell or line on a target, from its arguments to its Result."""

from __future__ import annotations

import argparse
import sys
from collections.abc import MutableMapping
from typing import Any, Final

from exec_server import sync
from exec_server.cli.connection import describe_error, error_text
from exec_server.cli.errors import CommandError, UsageError
from exec_server.cli.start_options import command_sandbox, command_variables, load_policy
from exec_server.cli.targets import access_options, find_target
from exec_server.client.collected_output import OutputLimit
from exec_server.client.exceptions import Timeout
from exec_server.client.results import Chunk, Result
from exec_server.client.run import OUTPUT_BYTES
from exec_server.errors import ConnectionLost, ExecServerError, SessionLost
from exec_server.notebook.brief_errors import (
    RemoteCommandFailed,
    RemoteError,
    RemoteInterrupt,
    RemoteTimeout,
)
from exec_server.notebook.cell_output import CellOutput
from exec_server.notebook.connections import Connections
from exec_server.sync.streamed_run import run_streamed

# Output in the result of an error, if no variable holds all of it.
FAILURE_BYTES: Final = 16_384


def run_cell(
    arguments: argparse.Namespace,
    text: str,
    connections: Connections,
    names: MutableMapping[str, Any],
) -> None:
    """Run a text for the shell; `names` are the variables of the notebook.

    All errors are brief ones: RemoteError, RemoteCommandFailed, RemoteTimeout, RemoteInterrupt.
    """
    try:
        target = find_target(arguments.target, access_options(arguments))
        try:
            _run(arguments, text, connections.get(target), names)
        except (ConnectionLost, SessionLost) as error:
            raise RemoteError(describe_error(error, target)) from None
        except (RemoteError, RemoteCommandFailed, RemoteTimeout):
            raise
        except ExecServerError as error:
            raise RemoteError(f"{target.label}: {error_text(error)}") from None
    except (UsageError, CommandError) as error:
        raise RemoteError(str(error)) from None
    except KeyboardInterrupt:
        raise RemoteInterrupt from None


def _run(
    arguments: argparse.Namespace,
    text: str,
    env: sync.Environment,
    names: MutableMapping[str, Any],
) -> None:
    argv = [arguments.shell, "-c", text]
    policy = load_policy("--sandbox", arguments.sandbox)
    sandbox = command_sandbox(policy, arguments.cwd, env.info)
    variables = command_variables(arguments.env, tty=arguments.tty)
    if arguments.tty:
        variables["TERM"] = "xterm-256color"  # notebooks show its colours
    if arguments.background:
        names[arguments.out] = env.start(
            argv,
            cwd=arguments.cwd,
            env=variables,
            tty=arguments.tty,
            user=arguments.user,
            sandbox=sandbox,
        )
        return
    output = CellOutput(sys.stdout, sys.stderr)

    def show(chunks: list[Chunk]) -> None:
        if not arguments.quiet:
            output.show(chunks)

    keeps_all = arguments.out is not None
    try:
        result = run_streamed(
            env,
            argv,
            show,
            cwd=arguments.cwd,
            env=variables,
            tty=arguments.tty,
            user=arguments.user,
            sandbox=sandbox,
            timeout=arguments.timeout,
            output_limit=OUTPUT_BYTES if keeps_all else OutputLimit(tail=FAILURE_BYTES),
        )
    except Timeout as late:
        _store(arguments, late.result, names)
        raise RemoteTimeout(late.seconds, late.result) from None
    finally:
        output.finish()
    _store(arguments, result, names)
    if result.exit_code and not arguments.no_raise:
        raise RemoteCommandFailed(result)


def _store(arguments: argparse.Namespace, result: Result, names: MutableMapping[str, Any]) -> None:
    names["_exit_code"] = result.exit_code  # as `!command` does
    if arguments.out is not None:
        names[arguments.out] = result
