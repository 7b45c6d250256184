"""TARGET and TARGET:PATH arguments of commands, and the flags for the access to a target.

A path follows after a colon. After a name, the first colon counts. After other targets the path
begins with `/` or `~`, and the first colon followed by one of these counts; for stdio and unix
the last one, because the command or the path of the socket may contain such colons. After a unix
socket a relative path may follow too: the last colon counts. A path after nothing but a colon is
one of the default target.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeVar

from exec_server.cli.errors import UsageError
from exec_server.cli.parser import (
    PATH_FORMS,
    TARGET_FORMS,
    ArgumentParser,
    CommandParser,
    positive_seconds,
    refuse_token,
)
from exec_server.client.targets import (
    DEFAULT_TARGET,
    NAME,
    AccessOptions,
    Target,
    check_scheme,
    find_target,
)

# Patterns are compiled at their first use: a command needs two or three of them.
_URL_PATH: Final = r"(?s)((?:wss?://|relay:https?://).+?)(?::((?:[/~].*)?))?"
# A URL followed by a relative path, which is not supported. A port is not a path; a URL with user
# name and password is rejected elsewhere.
_RELATIVE_URL_PATH: Final = (
    r"(?s)(wss?://(?![^/]*@)(?:\[[^]]*\]|[^/:[]*)(?::\d+)?):(?!\d+(?:[/?#]|$)).+"
)
_URL_WITH_PATH: Final = r"(wss?://[^/?#]+)(/[^?#]+)"
_STDIO_PATH: Final = r"(?s)(stdio:.+):([/~].*)"
_UNIX_PATH: Final = r"(?s)(unix:.+):([/~].*)|(unix:.+):(.*)"
_NAMED_PATH: Final = rf"(?s)(?!stdio:|unix:)({NAME}):(.*)"
_Parser = TypeVar("_Parser", bound=ArgumentParser)

# The flags of AccessOptions by the name of their field, with the arguments of `add_argument`. The
# token itself has none: other users see the arguments of a process.
ACCESS_FLAGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "token_file": {"metavar": "FILE", "help": "file with the token to send"},
    "token_env": {"metavar": "NAME", "help": "environment variable with the token"},
    "ca_file": {
        "metavar": "FILE",
        "help": "root certificates to trust, in PEM format (default: those of the system)",
    },
    "pin": {
        "metavar": "SHA256",
        "action": "append",
        "default": [],
        "help": "for wss and relay targets: accept exactly the certificate with this fingerprint, "
        "whatever its issuer; may be repeated (`exec-server tls-init` prints it)",
    },
    "allow_insecure_token": {
        "action": "store_true",
        "help": "send the token also to ws:// targets on other machines, unencrypted (default: "
        "refuse)",
    },
    "executor_key": {
        "metavar": "SHA256",
        "help": "for relay targets: the only executor key to accept, by its fingerprint "
        "(default: the key that the registry names)",
    },
    "retention": {
        "metavar": "TIME",
        "help": "after a lost connection: how long the server is to keep the session, and this "
        "program to try, such as 30m, 8h or 1d (default: 45 s; the server has a maximum)",
    },
    "wait": {
        "metavar": "SECONDS",
        "type": positive_seconds,
        "help": "try again for this long if the server is not there yet (default: once)",
    },
}


class RemotePath(NamedTuple):
    """A path on a target. `path` is None for a bare TARGET, and empty for `TARGET:`."""

    target: str
    path: str | None


def parse_remote_path(text: str) -> RemotePath | None:
    """Parse TARGET:PATH; None for a local path. Names are not looked up.

    Raises UsageError for a relative path after a target without a name, and StartupError for a URL
    of the web.
    """
    if text.startswith(DEFAULT_TARGET):
        return RemotePath(DEFAULT_TARGET, text.removeprefix(DEFAULT_TARGET))
    check_scheme(text)
    if (parts := re.fullmatch(_UNIX_PATH, text)) is not None:
        return RemotePath(parts[1] or parts[3], parts[4] if parts[1] is None else parts[2])
    for form in (_STDIO_PATH, _URL_PATH, _NAMED_PATH):
        if (parts := re.fullmatch(form, text)) is not None:
            if (relative := re.fullmatch(_RELATIVE_URL_PATH, parts[1])) is not None:
                raise UsageError(
                    f"`{text}`: a path after {relative[1]} begins with / or ~; only a target "
                    "with a name in targets.toml takes relative paths"
                )
            return RemotePath(parts[1], parts[2])
    return RemotePath(text, None) if text.startswith(("stdio:", "unix:")) else None


def remote_path_example(target: str) -> str:
    """How to write a path on a target, for error texts."""
    if (parts := re.fullmatch(_URL_WITH_PATH, target)) is not None:
        return f"{parts[1]}:{parts[2]}"  # the colon before the path is missing
    if target == DEFAULT_TARGET or re.fullmatch(NAME, target):
        return join_path(target, "PATH")
    return join_path(target, "/PATH")


def join_path(target: str, path: str) -> str:
    """TARGET:PATH; the default target has no name before the colon."""
    return f"{'' if target == DEFAULT_TARGET else target}:{path}"


def with_access_flags(
    parser: _Parser,
    purpose: str = "For targets without a name; for named ones they override targets.toml.",
) -> _Parser:
    """Add the group of flags to a parser, and return it."""
    group = parser.add_argument_group("access", purpose)
    for name, keywords in ACCESS_FLAGS.items():
        group.add_argument(f"--{name.replace('_', '-')}", **keywords)
    refuse_token(parser)
    return parser


class TargetParser(CommandParser):
    """The parser of a command on targets, whose description says how they are written."""

    forms = TARGET_FORMS

    def __init__(self, name: str, description: str, epilog: str, **options: Any) -> None:
        super().__init__(name, f"{description}\n{self.forms}", epilog, **options)


class PathParser(TargetParser):
    """The parser of a command on files of targets."""

    forms = PATH_FORMS


def access_options(arguments: argparse.Namespace) -> AccessOptions:
    """The access flags as AccessOptions; raises UsageError."""
    if arguments.token_file is not None and arguments.token_env is not None:
        raise UsageError("--token-file and --token-env exclude each other")
    if arguments.ca_file is not None and arguments.pin:
        raise UsageError("--ca-file and --pin exclude each other")
    values = {name: getattr(arguments, name) for name in ACCESS_FLAGS}
    return AccessOptions(**values)._replace(pin=tuple(arguments.pin))


def chosen_target(arguments: argparse.Namespace) -> Target:
    """The target of a command's TARGET and access flags; raises UsageError or StartupError."""
    return find_target(arguments.target, access_options(arguments))
