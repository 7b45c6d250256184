"""Runs the client command that the first argument names, and maps errors to exit codes."""

from __future__ import annotations

import argparse
import signal

from exec_server.cli.commands.arguments import parse
from exec_server.cli.commands.errors import (
    EXIT_EXEC_FAILED,
    EXIT_FAILURE,
    EXIT_USAGE,
    CommandError,
    UsageError,
)
from exec_server.cli.commands.printing import print_error, print_text
from exec_server.errors import ExecServerError
from exec_server.printable import printable


def run(command: str, words: list[str]) -> int:
    """Run a command and return its exit code. Only defects print a traceback."""
    is_exec = command == "exec"
    try:
        return _run_command(command, parse(command, words))
    except SystemExit as end:  # argparse: --help and usage errors
        return end.code if isinstance(end.code, int) else EXIT_FAILURE
    except UsageError as error:
        _print_error(f"{error}\n\nFor more information, try 'exec-server {command} -h'.")
        return EXIT_EXEC_FAILED if is_exec else EXIT_USAGE
    except CommandError as error:
        _print_error(str(error))
        return EXIT_EXEC_FAILED if is_exec else EXIT_FAILURE
    except ExecServerError as error:
        _print_error(printable(str(error)))
        return EXIT_EXEC_FAILED if is_exec else EXIT_FAILURE
    except BrokenPipeError:
        return 128 + signal.SIGPIPE
    except OSError as error:
        _print_error(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        return EXIT_EXEC_FAILED if is_exec else EXIT_FAILURE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception:  # an edge: the traceback may quote a server, so Python must not print it
        import traceback

        _print_error(f"this is a defect of exec-server\n{traceback.format_exc()}")
        return EXIT_EXEC_FAILED if is_exec else EXIT_FAILURE


def _print_error(text: str) -> None:
    print_error(f"Error: {text}")


def _run_command(command: str, arguments: argparse.Namespace) -> int:
    # Each command is imported only when it runs, so that shell completion starts fast.
    if command == "exec":
        from exec_server.cli.commands import exec_command

        return exec_command.run(arguments)
    if command == "cp":
        from exec_server.cli.commands import copy_command

        return copy_command.run(arguments)
    if command in ("ls", "cat", "rm"):
        from exec_server.cli.commands import files_command

        return files_command.run(command, arguments)
    if command == "info":
        from exec_server.cli.commands import info_command

        return info_command.run(arguments)
    if command == "targets":
        return _list_targets(arguments)
    from exec_server.cli.commands import completion

    print_text(completion.script(arguments.shell))
    return 0


def _list_targets(arguments: argparse.Namespace) -> int:
    from exec_server.cli.commands.targets import load_targets, targets_file

    known = load_targets()
    width = max(map(len, known), default=0)
    for name, target in sorted(known.items()):
        print_text(f"{name}\n" if arguments.names else f"{name:{width}}  {target.address}\n")
    if not known and not arguments.names:
        _print_error(f"{targets_file()} defines no targets; see `exec-server targets -h`")
    return 0
