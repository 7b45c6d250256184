"""The parser of `exec-server up`."""

from __future__ import annotations

from exec_server.cli.argument_parser import utf8_text
from exec_server.cli.server_arguments import ServerParser, add_key_file, add_logging_flags

_DESCRIPTION = """\
Make this machine reachable through a registry, under its host name, with the token that
`exec-server login` has stored. No port is opened on this machine. It runs until Ctrl-C, or as a
service of the user. While the registry is away it goes on trying; it ends if the registry rejects
the token.
"""

_EPILOG = """\
Every client that the registry lets connect can run commands as the user who runs this.

examples:
  exec-server up                                   the registry of the only login
  exec-server up https://registry.example.net --environment-id build-7
  exec-server up --pin sha256:2f05…                a registry with a new self-signed certificate
  exec-server up --install                         as a systemd service of this user, from now on
  exec-server up --uninstall
"""


def build_parser() -> ServerParser:
    """The parser of the command; `up_command` hands the rest to that of the server."""
    parser = ServerParser("exec-server up", description=_DESCRIPTION, epilog=_EPILOG)
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
