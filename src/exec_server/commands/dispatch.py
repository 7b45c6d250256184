"""From the first word to the command that it means, and from what fails to an exit code."""

from __future__ import annotations

import argparse
import signal

from exec_server.commands.arguments import parse
from exec_server.commands.failures import EXEC_FAILED, FAILED, MISTAKEN, Failure, Mistake
from exec_server.commands.printing import complain, print_text
from exec_server.errors import ExecServerError


def run(command: str, words: list[str]) -> int:
    """Do what was asked for; returns the exit code. No traceback for what is no bug."""
    is_exec = command == "exec"
    try:
        return _perform(command, parse(command, words))
    except SystemExit as end:  # argparse: --help and mistakes
        return end.code if isinstance(end.code, int) else FAILED
    except Mistake as mistake:
        _complain(f"{mistake}\n\nFor more information, try 'exec-server {command} -h'.")
        return EXEC_FAILED if is_exec else MISTAKEN
    except (Failure, ExecServerError) as error:
        _complain(str(error))
        return EXEC_FAILED if is_exec else FAILED
    except BrokenPipeError:
        return 128 + signal.SIGPIPE
    except OSError as error:
        _complain(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        return EXEC_FAILED if is_exec else FAILED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _complain(text: str) -> None:
    complain(f"Error: {text}")


def _perform(command: str, arguments: argparse.Namespace) -> int:
    # Each is imported only when it is wanted: completion must not wait for the others.
    if command == "exec":
        from exec_server.commands import exec_command

        return exec_command.run(arguments)
    if command == "cp":
        from exec_server.commands import copy_command

        return copy_command.run(arguments)
    if command in ("ls", "cat", "rm"):
        from exec_server.commands import files_command

        return files_command.run(command, arguments)
    if command == "info":
        from exec_server.commands import info_command

        return info_command.run(arguments)
    if command == "targets":
        return _list_targets(arguments)
    from exec_server.commands import completion

    print_text(completion.script(arguments.shell))
    return 0


def _list_targets(arguments: argparse.Namespace) -> int:
    from exec_server.commands.targets import load_targets, targets_file

    known = load_targets()
    width = max(map(len, known), default=0)
    for name, target in sorted(known.items()):
        print_text(f"{name}\n" if arguments.names else f"{name:{width}}  {target.whereabouts}\n")
    if not known and not arguments.names:
        _complain(f"there are no targets in {targets_file()}; see `exec-server targets -h`")
    return 0
