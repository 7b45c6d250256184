"""Runs the client command that the first argument names, and maps errors to exit codes."""

from __future__ import annotations

import signal

from exec_server.cli.commands.errors import (
    EXIT_FAILURE,
    EXIT_USAGE,
    CommandError,
    LostConnection,
    UsageError,
)
from exec_server.cli.commands.printing import print_error
from exec_server.cli.commands.routing import unknown_command
from exec_server.cli.commands.table import COMMANDS, Command, load
from exec_server.errors import (
    ConnectFailed,
    ConnectionLost,
    ExecServerError,
    RegistryError,
    SessionLost,
)
from exec_server.printable import printable


def run(name: str, words: list[str]) -> int:
    """Run a command and return its exit code. Only defects print a traceback."""
    command = COMMANDS.get(name)
    if command is None:
        _print_error(f"{unknown_command(name)}\n\nFor more information, try 'exec-server --help'.")
        return EXIT_USAGE
    try:
        return _run_command(command, words)
    except SystemExit as end:  # argparse: --help and usage errors
        return end.code if isinstance(end.code, int) else EXIT_FAILURE
    except UsageError as error:
        _print_error(f"{error}\n\nFor more information, try 'exec-server {name} -h'.")
        return EXIT_USAGE
    except CommandError as error:
        _print_error(str(error))
        if error.exit_code is not None:
            return error.exit_code
        is_lost = isinstance(error, LostConnection)
        return command.connection_code if is_lost else command.failure_code
    except ExecServerError as error:
        _print_error(printable(str(error)))
        is_lost = isinstance(error, ConnectFailed | ConnectionLost | SessionLost | RegistryError)
        return command.connection_code if is_lost else command.failure_code
    except BrokenPipeError:
        return 128 + signal.SIGPIPE
    except OSError as error:
        _print_error(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        return command.failure_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception:  # an edge: the traceback may quote a server, so Python must not print it
        import traceback

        _print_error(f"this is a defect of exec-server\n{traceback.format_exc()}")
        return command.failure_code


def _print_error(text: str) -> None:
    print_error(f"Error: {text}")


def _run_command(command: Command, words: list[str]) -> int:
    # Each command is imported only when it runs, so that shell completion starts fast.
    module = load(command)
    return module.run(module.build_parser().parse_words(words))
