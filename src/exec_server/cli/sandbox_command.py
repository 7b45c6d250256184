"""`exec-server sandbox`: parses its arguments, runs `check` or `run`, maps errors to exit codes."""

from __future__ import annotations

import argparse
from typing import Final

from exec_server.cli import sandbox_check
from exec_server.cli.commands.errors import EXIT_USAGE, UsageError
from exec_server.cli.sandbox_arguments import build_parser
from exec_server.cli.sandbox_policy import describe_view, prepare_command
from exec_server.cli.sandbox_run import SignalForwarder, print_to, run_confined
from exec_server.errors import RpcError, os_error_text
from exec_server.sandbox.runtime.placeholders import RegisterCleanup

# The exit code of `docker run` and `timeout` for the same case: few commands use it themselves.
EXIT_NOT_RUN: Final = 125


def run(words: list[str], register_cleanup: RegisterCleanup) -> int:
    """Run the arguments after `sandbox`; returns the exit code.

    `register_cleanup` gets the paths that have to be removed if this process is killed.
    """
    # Installed before anything else, so that no signal is lost.
    signals = SignalForwarder()
    try:
        return _run_action(words, register_cleanup, signals)
    except SystemExit as end:  # argparse, or a signal before the command runs
        return end.code if isinstance(end.code, int) else 1
    except UsageError as error:
        action = f" {words[0]}" if words[:1] in (["check"], ["run"]) else ""
        hint = f"For more information, try 'exec-server sandbox{action} --help'."
        print_to(2, f"Error: {error}\n\n{hint}\n")
        return EXIT_USAGE
    except RpcError as error:
        print_to(2, f"Error: {error.message}\n")
        return EXIT_NOT_RUN
    except OSError as error:
        print_to(2, f"Error: {os_error_text(error)}\n")
        return EXIT_NOT_RUN


def _run_action(
    words: list[str], register_cleanup: RegisterCleanup, signals: SignalForwarder
) -> int:
    separator = words.index("--") if "--" in words else len(words)
    arguments, unknown = build_parser().parse_known_args(words[:separator])
    if unknown:
        hint = "; the command comes after `--`" if arguments.action == "run" else ""
        raise UsageError(f"unexpected argument `{unknown[0]}`{hint}")
    if arguments.action == "check":
        if words[separator:]:
            raise UsageError("`check` takes no command")
        return _check(arguments)
    confined = prepare_command(arguments, words[separator + 1 :])
    if arguments.show:
        print_to(1, describe_view(confined.policy))
        return 0
    return run_confined(confined, register_cleanup, signals)


def _check(arguments: argparse.Namespace) -> int:
    report = sandbox_check.run_checks()
    print_to(1, sandbox_check.as_json(report) if arguments.json else sandbox_check.as_text(report))
    return 1 if report.refused else 0
