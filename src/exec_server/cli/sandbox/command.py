"""`exec-server sandbox`: parses its arguments, runs `check` or `run`, maps errors to exit codes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from exec_server.cli.errors import EXIT_NOT_RUN, EXIT_USAGE, UsageError
from exec_server.cli.parser import ArgumentParser

if TYPE_CHECKING:
    import argparse

    from exec_server.cli.sandbox.run import ForegroundSignals
    from exec_server.sandbox.runtime.placeholders import RegisterCleanup

_DESCRIPTION = """\
Test the sandbox of this machine. Clients may ask the server to confine a process or a file
operation by a policy. The server then enforces the policy with kernel features, or refuses the
request: it never runs unconfined what a client asked to confine.
"""

_EPILOG = """\
examples:
  exec-server sandbox check
      show whether the sandbox works here, and how to fix it if not
  exec-server sandbox run --policy read-only -- touch /etc/new
      see a command fail, and the rule that denied it
  exec-server sandbox run --help
      policies, roots and exit codes
"""

_CHECK_DESCRIPTION = """\
Try each kernel feature that the sandbox needs, as the current user, and print which ones work,
which requests of clients will be enforced or refused, and how to fix each problem.
"""

_CHECK_EPILOG = """\
exit code:
  0   every policy that a client may send will be enforced
  1   some requests will be refused

examples:
  exec-server sandbox check
  exec-server sandbox check --json | python3 -m json.tool
  docker run IMAGE exec-server sandbox check
      the result inside a container often differs from the one on its host
"""

_RUN_USAGE = """\
exec-server sandbox run --policy P [--root DIR ...] [--cwd DIR] [--network] -- COMMAND...
       exec-server sandbox run --policy P [--root DIR ...] [--cwd DIR] [--network] --show"""

_RUN_DESCRIPTION = """\
Run a command under a policy, as the server does for a client. The command gets stdin, stdout
and the signals of exec-server; its stderr is copied. If the command fails because the policy
denied an access, the path and the rule are printed afterwards.
"""

_RUN_EPILOG = """\
policies:
  read-only         all files can be read, none can be written
  workspace-write   like read-only, but the roots, /tmp and TMPDIR can be written, except for
                    .git, .agents, .codex and .aws directly below each of them
  FILE              JSON: a `sandbox` object as clients send it, or only its `permissions`,
                    which --root and --cwd then complete; see docs/protocol.md
  For a file that has the name of a policy write ./read-only.

exit code:
  the exit code of the command, or 128 + N if signal N has killed it
  2     the arguments or FILE are invalid; nothing has run
  101   the program cannot be executed inside the sandbox
  125   the policy cannot be enforced here; nothing has run (see `exec-server sandbox check`)

examples:
  exec-server sandbox run --policy read-only -- git status
  exec-server sandbox run --policy workspace-write -- make test
      the command can write the current directory, and has no network
  exec-server sandbox run --policy workspace-write --root src --root build --network -- npm ci
  exec-server sandbox run --policy policy.json -- bash -i
      an interactive shell inside the sandbox
  exec-server sandbox run --policy policy.json --show
      print one line for each mount and each name that must stay missing; run nothing

a FILE for system programs that may write the workspace and see no other files:
  {"type": "managed", "network": "restricted", "file_system": {"type": "restricted", "entries": [
     {"path": {"type": "special", "value": {"kind": "minimal"}}, "access": "read"},
     {"path": {"type": "special", "value": {"kind": "project_roots"}}, "access": "write"}]}}
"""


class SandboxParser(ArgumentParser):
    """The parser of `sandbox`, and of each of its actions."""

    def help_command(self) -> str:
        return f"{self.prog} --help"


def build_parser() -> ArgumentParser:
    """The parser of the words between `exec-server sandbox` and `--`."""
    parser = SandboxParser("exec-server sandbox", description=_DESCRIPTION, epilog=_EPILOG)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = actions.add_parser(
        "check",
        help="show which policies this machine can enforce, and how to fix problems",
        description=_CHECK_DESCRIPTION,
        epilog=_CHECK_EPILOG,
    )
    check.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    run = actions.add_parser(
        "run",
        help="run a command under a policy",
        usage=_RUN_USAGE,
        description=_RUN_DESCRIPTION,
        epilog=_RUN_EPILOG,
    )
    run.add_argument("--policy", required=True, help="read-only, workspace-write, or a FILE")
    run.add_argument(
        "--root",
        metavar="DIR",
        action="append",
        help="a workspace root; may be repeated (default: the directory of --cwd)",
    )
    run.add_argument(
        "--cwd",
        metavar="DIR",
        help="working directory of the command (default: the current directory)",
    )
    run.add_argument(
        "--network", action="store_true", help="allow network access (default: deny it)"
    )
    run.add_argument(
        "--show", action="store_true", help="print the view of the command, and run nothing"
    )
    return parser


def run(words: list[str], register_cleanup: RegisterCleanup) -> int:
    """Run the arguments; `register_cleanup` gets paths to remove if this process is killed."""
    from exec_server.cli.sandbox.run import ForegroundSignals, print_to
    from exec_server.errors import RpcError, os_error_text

    # Installed before anything else, so that no signal is lost.
    signals = ForegroundSignals()
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
    words: list[str], register_cleanup: RegisterCleanup, signals: ForegroundSignals
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
    from exec_server.cli.sandbox.run import describe_view, prepare_command, print_to, run_confined

    confined = prepare_command(arguments, words[separator + 1 :])
    if arguments.show:
        print_to(1, describe_view(confined.policy))
        return 0
    return run_confined(confined, register_cleanup, signals)


def _check(arguments: argparse.Namespace) -> int:
    from exec_server.cli.sandbox import check
    from exec_server.cli.sandbox.run import print_to

    report = check.run_checks()
    print_to(1, check.as_json(report) if arguments.json else check.as_text(report))
    return 1 if report.refused else 0
