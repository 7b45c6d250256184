"""The arguments of the exec-server command."""

from __future__ import annotations

import argparse
import os
from typing import NoReturn

from exec_server import __version__
from exec_server.logs import FORMATS, LEVELS

DEFAULT_LISTEN_URL = "ws://127.0.0.1:0"

_DESCRIPTION = """\
Run processes, terminals and file operations on this machine for a coding agent.

The server speaks JSON-RPC over WebSocket (one message per WebSocket message) or over
stdin/stdout (one message per line). It prints the URL it listens on as its first line.
"""

_EPILOG = """\
examples:
  exec-server
      listen on a free port of 127.0.0.1 and print its URL
  exec-server --listen ws://127.0.0.1:7700
      listen on a fixed port
  exec-server --listen stdio
      serve the program that started it, over stdin and stdout
  exec-server --listen ws://0.0.0.0:7700 --ws-auth capability-token --ws-token-file token
      listen for other machines; clients send "Authorization: Bearer TOKEN"
  exec-server --remote https://registry.example.net --environment-id build-7
      behind a NAT: register there, and serve clients that come through its relay
  exec-server forward --connect ws://127.0.0.1:7700 --remote URL --environment-id build-7
      the same for another server: pass on what comes through the relay

Anyone who may connect may run commands as the user that runs the server. Its processes
end with it, whatever ends it.

other commands, for people; each explains itself with --help:
    exec-server exec TARGET -- COMMAND     run a command on another machine, like ssh
    exec-server cp SOURCE DESTINATION      copy files and directories, like scp
    exec-server ls, cat, rm, info          look at another machine
    exec-server targets, completion        names for machines; completion for your shell
    exec-server sandbox check              say what this machine can confine, and what it refuses
    exec-server sandbox run                run a command under a policy by hand
"""

_SANDBOX_DESCRIPTION = """\
Clients may ask for a process or a file operation to be confined by a policy. The server does
that with the kernel's own means, or refuses the request: it never runs unconfined what asked
to be confined.
"""

_SANDBOX_EPILOG = """\
examples:
  exec-server sandbox check
      does confinement work here, and if not, what would make it work?
  exec-server sandbox run --policy read-only -- touch /etc/new
      see a command fail, and why
  exec-server sandbox run --help
      policies, roots and exit codes
"""

_CHECK_DESCRIPTION = """\
Try out everything that confinement needs of this machine, as this user, and print what works,
what will be enforced for clients, what will be refused, and how to fill each gap.
"""

_CHECK_EPILOG = """\
exit code:
  0   everything that a client may ask for will be enforced
  1   something will be refused

examples:
  exec-server sandbox check
  exec-server sandbox check --json | python3 -m json.tool
  docker run IMAGE exec-server sandbox check
      inside a container the answer is often another one than outside
"""

_RUN_USAGE = """\
exec-server sandbox run --policy P [--root DIR ...] [--cwd DIR] [--network] -- COMMAND...
       exec-server sandbox run --policy P [--root DIR ...] [--cwd DIR] [--network] --show"""

_RUN_DESCRIPTION = """\
Run a command under a policy, as the server would for a client. Stdin, stdout and signals are
the command's own; its stderr is passed on. When it fails because something was denied, the
path and the rule behind it are printed afterwards.
"""

_RUN_EPILOG = """\
policies:
  read-only         everything can be read, nothing written
  workspace-write   the same, but the roots, /tmp and TMPDIR can be written, except for .git,
                    .agents, .codex and .aws directly below each of them
  FILE              JSON: a `sandbox` object as clients send it, or only its `permissions`,
                    which are then completed by --root and --cwd; see docs/protocol.md
  A name of a policy means that policy; for a file of that name write ./read-only.

exit code:
  the command's own, or 128 + N when signal N has ended it
  2     the arguments or FILE are wrong; nothing has run
  101   the program cannot be executed inside
  125   the policy cannot be enforced here; nothing has run (see `exec-server sandbox check`)

examples:
  exec-server sandbox run --policy read-only -- git status
  exec-server sandbox run --policy workspace-write -- make test
      the current directory can be written, the network is out of reach
  exec-server sandbox run --policy workspace-write --root src --root build --network -- npm ci
  exec-server sandbox run --policy policy.json -- bash -i
      look around inside
  exec-server sandbox run --policy policy.json --show
      one line for each mount and each name that is kept missing; runs nothing

a FILE, for programs of the system that may write their workspace and see nothing else:
  {"type": "managed", "network": "restricted", "file_system": {"type": "restricted", "entries": [
     {"path": {"type": "special", "value": {"kind": "minimal"}}, "access": "read"},
     {"path": {"type": "special", "value": {"kind": "project_roots"}}, "access": "write"}]}}
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"Error: {message}\n\nFor more information, try '--help'.\n")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


_positive.__name__ = "positive number"  # argparse names it in its error


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < 1e9:
        raise ValueError(text)
    return seconds


_seconds.__name__ = "number of seconds"


def parse(words: list[str]) -> argparse.Namespace:
    """The arguments of the server; ends the program when they make no sense."""
    parser = build_parser()
    arguments, rest = parser.parse_known_args(words)
    # The word may stand anywhere, which argparse's own subcommands cannot do.
    arguments.forward = rest[:1] == ["forward"]
    if rest[arguments.forward :]:
        parser.error(f"unrecognized arguments: {' '.join(rest[arguments.forward :])}")
    mistake = _remote_mistake(arguments)
    if mistake is not None:
        parser.error(mistake)
    if arguments.listen is None:
        arguments.listen = DEFAULT_LISTEN_URL
    return arguments


def _remote_mistake(arguments: argparse.Namespace) -> str | None:
    """What is wrong with the flags of remote mode taken together."""
    given = [flag for flag in _REMOTE_FLAGS if getattr(arguments, _name(flag)) not in (None, False)]
    has_id = arguments.environment_id is not None or arguments.executor_id is not None
    is_direct = arguments.remote_transport == "direct"
    rules = (
        (arguments.remote is None and arguments.forward, "forward requires --remote"),
        (arguments.remote is None and given, f"{', '.join(given)} requires --remote"),
        (
            arguments.remote is not None and arguments.listen,
            "--remote and --listen exclude each other",
        ),
        (arguments.remote is not None and not has_id, "--remote requires --environment-id"),
        (
            arguments.environment_id is not None and arguments.executor_id is not None,
            "--environment-id and --executor-id exclude each other",
        ),
        (arguments.forward and arguments.connect is None, "forward requires --connect"),
        (arguments.connect is not None and not arguments.forward, "--connect requires forward"),
        (
            arguments.use_agent_identity_auth and arguments.executor_credential_stdin,
            "--use-agent-identity-auth and --executor-credential-stdin exclude each other",
        ),
        (
            arguments.executor_credential_stdin and arguments.aws_sigv4,
            "--executor-credential-stdin and --aws-sigv4 exclude each other",
        ),
        (is_direct and not arguments.aws_sigv4, "--remote-transport direct requires --aws-sigv4"),
        (
            is_direct and arguments.relay_security is not None,
            "--relay-security is for --remote-transport noise",
        ),
        (
            arguments.remote is not None and arguments.ws_auth is not None,
            "--ws-auth requires --listen",
        ),
    )
    return next((text for is_wrong, text in rules if is_wrong), None)


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        "exec-server",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"exec-server {__version__}")
    parser.add_argument(
        "--listen",
        metavar="URL",
        help=f"ws://IP:PORT (port 0: any free one) or stdio (default: {DEFAULT_LISTEN_URL})",
    )
    parser.add_argument(
        "--concurrent-requests",
        metavar="COUNT",
        type=_positive,
        default=1,
        help="requests of one connection handled at a time (default: 1, strictly in order)",
    )
    parser.add_argument(
        "--session-retention",
        metavar="SECONDS",
        type=_seconds,
        default=30.0,
        help="how long the processes of a lost connection wait for its client to resume "
        "(default: 30; 0: end them at once)",
    )
    parser.add_argument(
        "--exit-on-stdin-close",
        action="store_true",
        default=os.environ.get("CODEX_EXEC_SERVER_EXIT_ON_STDIN_CLOSE") == "true",
        help="end when stdin reaches its end, so as not to outlive the program that started it",
    )
    parser.add_argument(
        "--older-sandbox-forms",
        action="store_true",
        help="also accept `sandbox` objects as earlier versions of the protocol spelt them, and "
        "native paths inside them (default: refuse them, as the reference does)",
    )
    _add_authentication(parser)
    _add_remote(parser)
    logging = parser.add_argument_group("logging (to stderr)")
    logging.add_argument(
        "--log-level",
        choices=LEVELS,
        default=os.environ.get("EXEC_SERVER_LOG", "error"),
        help="default: EXEC_SERVER_LOG, or error",
    )
    logging.add_argument("--log-format", choices=FORMATS, default="human", help="default: human")
    return parser


def build_sandbox_parser() -> argparse.ArgumentParser:
    """The arguments after `exec-server sandbox`, without `--` and the command behind it."""
    parser = _Parser(
        "exec-server sandbox",
        description=_SANDBOX_DESCRIPTION,
        epilog=_SANDBOX_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = actions.add_parser(
        "check",
        help="say what this machine can confine, and what it refuses",
        description=_CHECK_DESCRIPTION,
        epilog=_CHECK_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    check.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    run = actions.add_parser(
        "run",
        help="run a command under a policy",
        usage=_RUN_USAGE,
        description=_RUN_DESCRIPTION,
        epilog=_RUN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    run.add_argument("--policy", required=True, help="read-only, workspace-write, or a FILE")
    run.add_argument(
        "--root",
        metavar="DIR",
        action="append",
        help="a workspace root; may be repeated (default: the directory of --cwd)",
    )
    run.add_argument("--cwd", metavar="DIR", help="where the command starts (default: here)")
    run.add_argument(
        "--network", action="store_true", help="let the command reach the network (default: not)"
    )
    run.add_argument(
        "--show", action="store_true", help="print what the command would see, and run nothing"
    )
    return parser


# Of no use without --remote.
_REMOTE_FLAGS = (
    "--environment-id",
    "--executor-id",
    "--name",
    "--remote-transport",
    "--relay-security",
    "--registry-auth",
    "--use-agent-identity-auth",
    "--executor-credential-stdin",
    "--aws-sigv4",
    "--aws-profile",
    "--aws-region",
    "--aws-service",
    "--connect",
)


def _add_remote(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "remote mode",
        "Register with a registry and serve clients that come through its relay, end-to-end\n"
        "encrypted; nothing listens here. The credential for the registry is EXEC_SERVER_API_KEY\n"
        "or CODEX_API_KEY, or a stored sign-in, or what one of these flags says.",
    )
    group.add_argument("--remote", metavar="URL", help="the registry, instead of --listen")
    group.add_argument("--environment-id", metavar="ID", help="what clients know this machine by")
    group.add_argument("--name", help="accepted for the sake of older scripts, and not sent")
    group.add_argument(
        "--remote-transport",
        choices=("noise", "direct"),
        help="through the relay, or one plain connection to a service that checks AWS "
        "signatures (default: noise)",
    )
    group.add_argument(
        "--relay-security",
        choices=("noise", "plain", "text"),
        help="plain and text are what relays spoke before there was encryption: relay frames "
        "with bare messages, or bare messages; whoever runs the relay can read and change "
        "everything (default: noise)",
    )
    group.add_argument(
        "--executor-id",
        metavar="ID",
        help="the older spelling of --environment-id: selects --relay-security text and the "
        "token in CODEX_EXEC_SERVER_REMOTE_BEARER_TOKEN",
    )
    group.add_argument(
        "--registry-auth",
        choices=("api-key",),
        help="send the API key to this registry although it is not OpenAI's (https only)",
    )
    group.add_argument(
        "--use-agent-identity-auth",
        action="store_true",
        help="authenticate with the agent identity in CODEX_ACCESS_TOKEN",
    )
    group.add_argument(
        "--executor-credential-stdin",
        action="store_true",
        help="read credentials from stdin, one JSON object per line, each replacing the last; "
        "end when it closes",
    )
    group.add_argument(
        "--aws-sigv4", action="store_true", help="sign for AWS; only with direct, needs botocore"
    )
    group.add_argument("--aws-profile", metavar="NAME", help="default: as other AWS tools choose")
    group.add_argument(
        "--aws-region", metavar="REGION", help="default: AWS_REGION or the profile's"
    )
    group.add_argument("--aws-service", metavar="NAME", help="default: execute-api")
    group.add_argument(
        "--connect", metavar="URL", help="forward: the ws:// or wss:// server to pass clients on to"
    )


def _add_authentication(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "who may connect",
        "Without --ws-auth anybody who can reach the address may connect, so the server\n"
        "then listens on loopback addresses only.",
    )
    group.add_argument(
        "--ws-auth",
        choices=("capability-token", "signed-bearer-token"),
        help="require an Authorization: Bearer header: one secret token, or a JWT signed "
        "(HS256) with a shared secret",
    )
    group.add_argument(
        "--ws-token-file", metavar="PATH", help="capability-token: file with the token"
    )
    group.add_argument(
        "--ws-token-sha256", metavar="HEX", help="capability-token: SHA-256 of the token instead"
    )
    group.add_argument(
        "--ws-shared-secret-file",
        metavar="PATH",
        help="signed-bearer-token: file with the secret, at least 32 bytes",
    )
    group.add_argument(
        "--ws-issuer", metavar="ISSUER", help="signed-bearer-token: required `iss` claim"
    )
    group.add_argument(
        "--ws-audience", metavar="AUDIENCE", help="signed-bearer-token: required `aud` claim"
    )
    group.add_argument(
        "--ws-max-clock-skew-seconds",
        metavar="SECONDS",
        type=int,
        help="signed-bearer-token: tolerance for `exp` and `nbf` (default: 30)",
    )
    group.add_argument(
        "--allow-unauthenticated",
        action="store_true",
        help="listen on other than loopback addresses without --ws-auth all the same",
    )
    group.add_argument(
        "--allow-host",
        metavar="NAME",
        action="append",
        default=[],
        help="also accept this name in the Host header; without --ws-auth only addresses and "
        "localhost are accepted, so that no web page can reach the server by a name of its own",
    )
