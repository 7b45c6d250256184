"""The parsers of `exec-server serve`, `forward` and `up`."""

from __future__ import annotations

import argparse
import os
from itertools import combinations

from exec_server import __version__
from exec_server.cli.parser import ArgumentParser, positive_number, refuse_token, seconds, utf8_text
from exec_server.host.clock import duration

DEFAULT_LISTEN_URL = "ws://127.0.0.1:0"
# Not in `logs`, which needs the logging package: the server prints its URL before it imports that.
LOG_LEVELS = ("error", "warning", "info", "debug")
LOG_FORMATS = ("human", "json")
# The defaults of the server, which is imported after the parsing.
_RETENTION_SECONDS = 80.0
_MAX_RETENTION = "24h"

_DESCRIPTION = """\
Run processes, terminals and file operations on this machine for a coding agent.

The server speaks JSON-RPC over WebSocket (one message per WebSocket message) or over
stdin/stdout (one message per line). It prints the URL of each listener, one per line.
The word `serve` may be omitted before a flag.
"""

_EPILOG = """\
examples:
  exec-server serve
      listen on a free port of 127.0.0.1 and print its URL
  exec-server serve --listen ws://127.0.0.1:7700
      listen on a fixed port
  exec-server serve --listen stdio
      serve the parent process over stdin and stdout
  exec-server serve --listen ws://0.0.0.0:7700 --ws-auth capability-token --ws-token-file token
      listen for other machines; clients send "Authorization: Bearer TOKEN"
  exec-server serve --listen wss://127.0.0.1:7700 --tls-cert cert.pem --tls-key key.pem
      with TLS; `exec-server tls-init` makes both files and prints the fingerprint for clients
  exec-server serve --listen unix:/run/user/1000/exec-server.sock
      listen for processes of the same user
  exec-server serve --remote https://registry.example.net --environment-id build-7
      from behind a NAT: register with a registry and serve clients through its relay
  printf '%s\\n' "$TOKEN" | exec-server serve --remote https://registry.example.net \\
          --environment-id build-7 --registration-bearer-stdin
      the same with the token of a registry of your own
  exec-server forward --connect ws://127.0.0.1:7700 --remote URL --environment-id build-7
      the same for another server: forward messages between the relay and that server

Every client that can connect can run commands as the user of the server. All processes that
clients have started end with the server, even if it is killed.
"""
# These flags require --remote.
_REMOTE_FLAGS = (
    *("--environment-id", "--executor-id", "--name", "--ca-file", "--pin", "--key-file"),
    *("--remote-transport", "--relay-security", "--registry-auth", "--use-agent-identity-auth"),
    *("--executor-credential-stdin", "--registration-bearer-stdin", "--chatgpt-token-stdin"),
    *("--chatgpt-account-id", "--aws-sigv4", "--aws-profile", "--aws-region"),
    *("--aws-service", "--connect"),
)
# Each has a row in `registry.stdin_credential`.
_STDIN_FLAGS = (
    *("--executor-credential-stdin", "--registration-bearer-stdin", "--chatgpt-token-stdin"),
)


# Its values are those of Codex; an empty one counts as unset.
_VIA_UPSTREAM = "CODEX_EXEC_SERVER_PROXY_PRIVATE_IPS_VIA_UPSTREAM"
# Flags of `codex exec-server` that change settings which are not read here.
_CONFIG_FLAGS = ("--config", "--enable", "--disable", "--strict-config")

_EXCLUDE = "exclude each other"
_EXCLUSIVE = (
    ("--remote", "--listen"),
    ("--environment-id", "--executor-id"),
    *(("--use-agent-identity-auth", flag) for flag in _STDIN_FLAGS),
    *((flag, "--aws-sigv4") for flag in _STDIN_FLAGS),
    *combinations(_STDIN_FLAGS, 2),
    ("--ca-file", "--pin"),
)


def parse(words: list[str]) -> argparse.Namespace:
    """Parse the arguments of the server; exits with code 2 if they are invalid."""
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(words)
    # `forward` may follow flags, which argparse's subcommands do not allow.
    arguments.forward = unknown[:1] == ["forward"]
    if unknown[arguments.forward :]:
        parser.error(f"unrecognized arguments: {' '.join(unknown[arguments.forward :])}")
    # `up` sets these: the token of a login, the callback for the first connection, and whether a
    # registry that is away is waited for.
    arguments.registry_token = arguments.on_ready = None
    arguments.waits_for_registry = False
    arguments.stdin_flag = next((flag for flag in _STDIN_FLAGS if _is_set(arguments, flag)), None)
    conflict = _find_conflict(arguments)
    if conflict is not None:
        parser.error(conflict)
    if arguments.listen is None:
        arguments.listen = [DEFAULT_LISTEN_URL]
    if arguments.process_retention is None:
        # A client that comes back late also finds the commands that have ended meanwhile.
        arguments.process_retention = max(_RETENTION_SECONDS, arguments.session_retention)
    return arguments


def _find_conflict(arguments: argparse.Namespace) -> str | None:
    """The first rule that flags and variables violate."""
    flags = [flag for flag in _REMOTE_FLAGS if _is_set(arguments, flag)]
    has_id = arguments.environment_id is not None or arguments.executor_id is not None
    is_remote, is_direct = arguments.remote is not None, arguments.remote_transport == "direct"
    has_key = arguments.key_file is not None
    rules = (
        (
            os.environ.get(_VIA_UPSTREAM, "") not in ("", "true", "false"),
            f"{_VIA_UPSTREAM} must be true or false",
        ),
        (not is_remote and arguments.forward, "forward requires --remote"),
        (not is_remote and flags, f"{', '.join(flags)} requires --remote"),
        *(
            (_is_set(arguments, one) and _is_set(arguments, other), f"{one} and {other} {_EXCLUDE}")
            for one, other in _EXCLUSIVE
        ),
        (is_remote and not has_id, "--remote requires --environment-id"),
        (arguments.forward and arguments.connect is None, "forward requires --connect"),
        (arguments.connect is not None and not arguments.forward, "--connect requires forward"),
        (
            arguments.chatgpt_account_id is not None and not arguments.chatgpt_token_stdin,
            "--chatgpt-account-id requires --chatgpt-token-stdin",
        ),
        (
            arguments.forward and arguments.chatgpt_token_stdin,
            "--chatgpt-token-stdin does not work with forward",
        ),
        (
            is_direct and not arguments.aws_sigv4 and not _excludes_sigv4(arguments),
            "--remote-transport direct requires --aws-sigv4",
        ),
        (
            is_direct and arguments.relay_security is not None,
            "--relay-security requires --remote-transport noise",
        ),
        (
            has_key and (is_direct or not _is_encrypted(arguments)),
            "--key-file requires --relay-security noise",
        ),
        (is_remote and arguments.ws_auth is not None, "--ws-auth requires --listen"),
    )
    return next((text for is_violated, text in rules if is_violated), None)


def _excludes_sigv4(arguments: argparse.Namespace) -> bool:
    # Then `--aws-sigv4` cannot be added, and the server does not start for that reason.
    return arguments.stdin_flag is not None or arguments.use_agent_identity_auth


def _is_encrypted(arguments: argparse.Namespace) -> bool:
    return arguments.relay_security == "noise" or (
        arguments.relay_security is None and arguments.executor_id is None
    )


def _is_set(arguments: argparse.Namespace, flag: str) -> bool:
    name = flag.removeprefix("--").replace("-", "_")
    return getattr(arguments, name) not in (None, False)


class ServerParser(ArgumentParser):
    """The parser of a command that serves; its name is that of the command."""

    def help_command(self) -> str:
        return f"{self.prog} --help"


def build_parser() -> ServerParser:
    """The parser of `serve`, and of exec-server without a command."""
    parser = ServerParser("exec-server serve", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"exec-server {__version__}")
    parser.add_argument(
        "--listen",
        metavar="URL",
        action="append",
        help="ws://IP:PORT (port 0: a free port), wss://IP:PORT, wss://NAME:PORT, unix:/PATH or "
        f"stdio; may be repeated (default: {DEFAULT_LISTEN_URL})",
    )
    parser.add_argument(
        "--tls-cert",
        metavar="FILE",
        help="wss: the certificate with its chain, in PEM format; SIGHUP has it read again",
    )
    parser.add_argument("--tls-key", metavar="FILE", help="wss: the private key, in PEM format")
    parser.add_argument(
        "--concurrent-requests",
        metavar="COUNT",
        type=positive_number,
        default=1,
        help="number of requests of one connection to handle at a time "
        "(default: 1, strictly in order)",
    )
    _add_retentions(parser)
    parser.add_argument(
        "--exit-on-stdin-close",
        action="store_true",
        default=os.environ.get("CODEX_EXEC_SERVER_EXIT_ON_STDIN_CLOSE") == "true",
        help="exit when stdin is closed, and so with the parent process "
        "(default: yes if CODEX_EXEC_SERVER_EXIT_ON_STDIN_CLOSE is true)",
    )
    _add_permissions(parser)
    _add_authentication(parser)
    add_remote_flags(parser)
    add_registry_credentials(parser)
    refuse_token(
        parser, "--ws-token-file PATH for clients, --registration-bearer-stdin for a registry"
    )
    _add_codex_flags(parser)
    add_logging_flags(parser)
    return parser


def _add_retentions(parser: ArgumentParser) -> None:
    """How long sessions and finished processes are kept."""
    parser.add_argument(
        "--session-retention",
        metavar="SECONDS",
        type=seconds,
        default=_RETENTION_SECONDS,
        help="how long a session and its processes survive a lost connection "
        f"(default: {_RETENTION_SECONDS:g}; 0: end them at once)",
    )
    parser.add_argument(
        "--max-session-retention",
        metavar="TIME",
        type=duration,
        default=_MAX_RETENTION,
        help="how long a session may be kept for a client that asks for it, such as 90, 30m, 8h or "
        f"1d (default: {_MAX_RETENTION}; never below --session-retention)",
    )
    parser.add_argument(
        "--process-retention",
        metavar="SECONDS",
        type=seconds,
        help="how long the output and the exit code of a finished process can be read "
        f"(default: as --session-retention, but {_RETENTION_SECONDS:g} at least)",
    )


def _add_permissions(parser: ArgumentParser) -> None:
    """Requests that are refused without these flags."""
    # Without effect: the forms are always accepted. Command lines with the flags keep working.
    parser.add_argument(
        *("--legacy-sandbox-forms", "--older-sandbox-forms"),
        action="store_true",
        help=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--allow-port-hosts",
        action="store_true",
        help="let clients forward connections to any host that this machine reaches "
        "(default: to its loopback addresses only)",
    )


def _add_codex_flags(parser: ArgumentParser) -> None:
    """Flags of `codex exec-server`, so that its command lines work here."""
    group = parser.add_argument_group("for command lines of codex exec-server")
    group.add_argument(
        "--proxy-private-ips-via-upstream",
        action="store_true",
        default=os.environ.get(_VIA_UPSTREAM) == "true",
        help="let managed networks reach permitted private addresses through the upstream proxy; "
        f"loopback is always dialled (default: yes if {_VIA_UPSTREAM} is true)",
    )
    group.add_argument(
        "--linux-sandbox-pid-namespace",
        metavar="MODE",
        choices=("isolate", "inherit"),
        help="isolate: confined commands have a pid namespace of their own (default); inherit has "
        "no effect",
    )
    group.add_argument(
        *("-c", "--config"), metavar="KEY=VALUE", action="append", help="has no effect"
    )
    group.add_argument("--enable", metavar="FEATURE", action="append", help="has no effect")
    group.add_argument("--disable", metavar="FEATURE", action="append", help="has no effect")
    group.add_argument("--strict-config", action="store_true", help="has no effect")


def ignored_flags(arguments: argparse.Namespace) -> str | None:
    """What to tell a user whose flags have no effect here; None if all of them have one."""
    texts = []
    flags = [flag for flag in _CONFIG_FLAGS if _is_set(arguments, flag)]
    if flags:
        verb = "has" if len(flags) == 1 else "have"
        texts.append(f"{', '.join(flags)} {verb} no effect: flags alone configure this server")
    if arguments.linux_sandbox_pid_namespace == "inherit":
        texts.append(
            "--linux-sandbox-pid-namespace inherit has no effect: confined commands stay isolated "
            "and cannot signal other processes"
        )
    return "Warning: " + "; ".join(texts) if texts else None


def add_logging_flags(parser: ArgumentParser, *, level: str = "error") -> None:
    """Add the flags of the log; `level` is the least severe one without a flag or variable."""
    group = parser.add_argument_group("logging (to stderr)")
    group.add_argument(
        "--log-level",
        choices=LOG_LEVELS,
        default=os.environ.get("EXEC_SERVER_LOG", level),
        help=f"least severe level to log (default: EXEC_SERVER_LOG, or {level})",
    )
    group.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        default="human",
        help="one line of text or one JSON object per event (default: human)",
    )


def add_remote_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group(
        "remote mode",
        "Register with a registry and serve clients through its relay, encrypted end to end;\n"
        "no port is opened on this machine.",
    )
    group.add_argument(
        "--remote", type=utf8_text, metavar="URL", help="URL of the registry; replaces --listen"
    )
    group.add_argument(
        "--environment-id",
        type=utf8_text,
        metavar="ID",
        help="the id by which clients find this machine",
    )
    group.add_argument(
        "--ca-file",
        metavar="FILE",
        help="root certificates to trust for the registry and its relay, in PEM format (default: "
        "those of the system)",
    )
    group.add_argument(
        "--pin",
        metavar="SHA256",
        action="append",
        help="accept exactly the certificate with this fingerprint, whatever its issuer; may be "
        "repeated",
    )
    add_key_file(group)
    group.add_argument("--name", help="accepted for compatibility with older scripts; not sent")
    group.add_argument(
        "--remote-transport",
        choices=("noise", "direct"),
        help="noise: encrypted streams through the relay; direct: one WebSocket to a service "
        "that checks AWS signatures (default: noise)",
    )
    group.add_argument(
        "--relay-security",
        choices=("noise", "plain", "text"),
        help="plain and text are for relays without encryption: relay frames with JSON-RPC "
        "messages, or bare JSON-RPC messages; the operator of such a relay can read and change "
        "everything (default: noise)",
    )
    group.add_argument(
        "--executor-id",
        type=utf8_text,
        metavar="ID",
        help="like --environment-id, for older registries: selects --relay-security text and "
        "the token in CODEX_EXEC_SERVER_REMOTE_BEARER_TOKEN",
    )
    group.add_argument(
        "--connect",
        metavar="URL",
        help="with forward: the ws:// or wss:// server to forward clients to",
    )


def add_key_file(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--key-file",
        metavar="FILE",
        help="the private key of this executor, created if it is missing, so that clients that pin "
        "it still connect after a restart; none: a new key at each start, in memory alone "
        "(default: a file for each environment id in ~/.local/state/exec-server/executor-keys)",
    )


def add_registry_credentials(parser: ArgumentParser) -> None:
    group = parser.add_argument_group(
        "credentials for the registry",
        "By default EXEC_SERVER_API_KEY, CODEX_API_KEY or a stored Codex sign-in is used. A token\n"
        "on stdin is in no argument and no variable, where other processes could see it.",
    )
    group.add_argument(
        "--registry-auth",
        choices=("api-key",),
        help="send the API key to a registry that is not OpenAI's (https only)",
    )
    group.add_argument(
        "--use-agent-identity-auth",
        action="store_true",
        help="authenticate with the agent identity in CODEX_ACCESS_TOKEN",
    )
    add_stdin_credentials(group)
    group.add_argument(
        "--aws-sigv4",
        action="store_true",
        help="sign requests for AWS; requires --remote-transport direct and botocore",
    )
    group.add_argument(
        "--aws-profile", metavar="NAME", help="default: the profile that AWS tools select"
    )
    group.add_argument(
        "--aws-region", metavar="REGION", help="default: AWS_REGION, or the region of the profile"
    )
    group.add_argument("--aws-service", metavar="NAME", help="default: execute-api")


def add_stdin_credentials(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--registration-bearer-stdin",
        action="store_true",
        help="read one line from stdin, the token that the registry accepts; https only, except "
        "on this machine; what follows the line is not read",
    )
    group.add_argument(
        "--executor-credential-stdin",
        action="store_true",
        help="read credentials from stdin, one JSON object per line, each replacing the "
        "previous one; exit when stdin is closed",
    )
    group.add_argument(
        "--chatgpt-token-stdin",
        action="store_true",
        help="read one line from stdin, a ChatGPT access token, which is not refreshed; stdin must "
        "be a pipe or a socket, and the registry https; not with forward",
    )
    group.add_argument(
        "--chatgpt-account-id",
        type=utf8_text,
        metavar="ID",
        help="with --chatgpt-token-stdin: the account of the token; required if the token does not "
        "name one, and must be the same if it does",
    )


def _add_authentication(parser: ArgumentParser) -> None:
    group = parser.add_argument_group(
        "authentication of clients",
        "Without --ws-auth every client that can reach the address can connect, so the server\n"
        "then listens on loopback addresses and unix sockets only.",
    )
    group.add_argument(
        "--ws-auth",
        choices=("capability-token", "signed-bearer-token"),
        help="require an Authorization: Bearer header: a secret token, or a JWT signed "
        "(HS256) with a shared secret (default: no authentication)",
    )
    group.add_argument(
        "--ws-token-file", metavar="PATH", help="capability-token: file with the token"
    )
    group.add_argument(
        "--ws-token-sha256",
        metavar="HEX",
        help="capability-token: SHA-256 of the token, instead of the file",
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
        help="allow --listen on other than loopback addresses without --ws-auth",
    )
    group.add_argument(
        "--allow-host",
        metavar="NAME",
        action="append",
        default=[],
        help="also accept this host name in the Host header; may be repeated (default, without "
        "--ws-auth: IP addresses and localhost only, against DNS rebinding by web pages)",
    )


_FORWARD_DESCRIPTION = """\
Serve clients of a relay on behalf of another server: register with a registry, and forward
messages between the relay and the server of --connect. No port is opened on this machine.
"""

_FORWARD_EPILOG = """\
examples:
  exec-server forward --connect ws://127.0.0.1:7700 --remote URL --environment-id build-7
  exec-server forward --connect wss://inner.example.net --remote URL --environment-id build-7
"""


def build_forward_parser() -> ServerParser:
    """For help and completion; `parse` accepts all flags of the server."""
    parser = ServerParser(
        "exec-server forward", description=_FORWARD_DESCRIPTION, epilog=_FORWARD_EPILOG
    )
    add_remote_flags(parser)
    add_registry_credentials(parser)
    add_logging_flags(parser)
    return parser


_UP_DESCRIPTION = """\
Make this machine reachable through a registry, under its host name, with the token that
`exec-server login` has stored. No port is opened on this machine. It runs until Ctrl-C, or as a
service of the user. While the registry is away it goes on trying; it ends if the registry rejects
the token.
"""

_UP_EPILOG = """\
Every client that the registry lets connect can run commands as the user who runs this.

examples:
  exec-server up                                   the registry of the only login
  exec-server up https://registry.example.net --environment-id build-7
  exec-server up https://registry.example.net --registration-bearer-stdin < token.txt
  exec-server up --pin sha256:2f05…                a registry with a new self-signed certificate
  exec-server up --install                         as a systemd service of this user, from now on
  exec-server up --uninstall
"""


def build_up_parser() -> ServerParser:
    """The parser of the command; `serve.up` hands the rest to that of the server."""
    parser = ServerParser("exec-server up", description=_UP_DESCRIPTION, epilog=_UP_EPILOG)
    parser.add_argument(
        "url",
        metavar="URL",
        nargs="?",
        help="the registry (default: the only one that a login lets this machine register with)",
    )
    parser.add_argument(
        "--environment-id",
        type=utf8_text,
        metavar="ID",
        help="the id by which clients find this machine (default: its host name)",
    )
    _add_certificate_checks(parser)
    add_key_file(parser)
    add_stdin_credentials(
        parser.add_argument_group(
            "credentials on stdin", "Instead of the token of a login; URL is then required."
        )
    )
    refuse_token(parser, "`exec-server login`, or --registration-bearer-stdin")
    service = parser.add_mutually_exclusive_group()
    service.add_argument(
        "--install",
        action="store_true",
        help="run it as a systemd service of this user, now and after each login",
    )
    service.add_argument("--uninstall", action="store_true", help="stop and remove the service")
    # Its user wants to know that the registry cannot be reached.
    add_logging_flags(parser, level="warning")
    return parser


def parse_up(words: list[str]) -> argparse.Namespace:
    """Parse the arguments of `up`; exits with code 2 if they are invalid."""
    parser = build_up_parser()
    arguments = parser.parse_args(words)
    if stdin_flags(arguments):
        if arguments.url is None:
            parser.error("a credential on stdin requires the URL of its registry")
        if arguments.install:
            parser.error("--install requires a login: a service has no stdin")
    return arguments


def stdin_flags(arguments: argparse.Namespace) -> list[str]:
    """The flags about credentials on stdin, as they were given."""
    words = [flag for flag in _STDIN_FLAGS if _is_set(arguments, flag)]
    if arguments.chatgpt_account_id is not None:
        words += ["--chatgpt-account-id", arguments.chatgpt_account_id]
    return words


def _add_certificate_checks(parser: ServerParser) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--ca-file",
        metavar="FILE",
        help="root certificates to trust for the registry and its relay, in PEM format "
        "(default: as `exec-server login` was told)",
    )
    group.add_argument(
        "--pin",
        metavar="SHA256",
        action="append",
        default=[],
        help="accept exactly the certificate with this fingerprint; may be repeated (default: as "
        "`exec-server login` was told)",
    )
