"""The flags with which every command that connects finds and checks its target."""

from __future__ import annotations

import argparse

from exec_server.cli.argument_parser import ArgumentParser
from exec_server.cli.commands.errors import UsageError
from exec_server.cli.commands.targets import AccessOptions


def add_access_flags(parser: ArgumentParser) -> None:
    """Add the group of flags to a parser."""
    group = parser.add_argument_group(
        "access", "For targets without a name; for named ones they override targets.toml."
    )
    group.add_argument("--token-file", metavar="FILE", help="file with the token to send")
    group.add_argument("--token-env", metavar="NAME", help="environment variable with the token")
    group.add_argument(
        "--ca-file",
        metavar="FILE",
        help="root certificates to trust, in PEM format (default: those of the system)",
    )
    group.add_argument(
        "--pin",
        metavar="SHA256",
        action="append",
        default=[],
        help="for wss and relay targets: accept exactly the certificate with this fingerprint, "
        "whatever its issuer; may be repeated (`exec-server tls-init` prints it)",
    )
    group.add_argument(
        "--allow-insecure-token",
        action="store_true",
        help="send the token also to ws:// targets on other machines, unencrypted (default: "
        "refuse)",
    )
    group.add_argument(
        "--executor-key",
        metavar="SHA256",
        help="for relay targets: the only executor key to accept, by its fingerprint "
        "(default: the key that the registry names)",
    )


def access_options(arguments: argparse.Namespace) -> AccessOptions:
    """The access flags as AccessOptions; raises UsageError."""
    if arguments.token_file is not None and arguments.token_env is not None:
        raise UsageError("--token-file and --token-env exclude each other")
    if arguments.ca_file is not None and arguments.pin:
        raise UsageError("--ca-file and --pin exclude each other")
    return AccessOptions(
        token_file=arguments.token_file,
        token_env=arguments.token_env,
        executor_key=arguments.executor_key,
        ca_file=arguments.ca_file,
        pins=tuple(arguments.pin),
        allow_insecure_token=arguments.allow_insecure_token,
    )
