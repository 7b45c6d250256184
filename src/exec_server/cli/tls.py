"""`exec-server tls-init`: make a self-signed certificate for a server."""

from __future__ import annotations

import argparse
import re
import shlex
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final

from exec_server.cli.errors import CommandError, UsageError
from exec_server.cli.parser import CommandParser
from exec_server.cli.streams import print_text
from exec_server.client.configuration import targets_file, write_private_file
from exec_server.client.targets import PORT

if TYPE_CHECKING:
    from exec_server.net.self_signed import Facts


# Pins do not expire; the date is for clients that trust the certificate by --ca-file.
DEFAULT_DAYS: Final = 3650
MAX_DAYS: Final = 36_500
# The port of the commands to paste.

_CERTIFICATE: Final = "cert.pem"
_KEY: Final = "key.pem"
_HOST_NAME: Final = re.compile(r"(?:[A-Za-z0-9-]{1,63}\.)*[A-Za-z0-9-]{1,63}")
_LOCAL_NAMES: Final = ("localhost", "127.0.0.1", "::1")
_DESCRIPTION: Final = """\
Make a self-signed certificate and its key for `exec-server --listen wss://…`, and print the
fingerprint that clients pin, with the commands for both sides. The files are cert.pem and
key.pem in DIR (default: ~/.config/exec-server/tls); only you can read the key.
"""
_EPILOG: Final = """\
The certificate is valid for this machine's name, localhost, and each --name. A pinned certificate
is accepted for every name.

examples:
  exec-server tls-init
  exec-server tls-init --name build.example.net --name 192.168.1.20
  exec-server tls-init --show                      print the fingerprint again
  exec-server tls-init --force /etc/exec-server    replace the certificate
"""


def _days(text: str) -> int:
    number = int(text)
    if not 1 <= number <= MAX_DAYS:
        raise ValueError(text)
    return number


_days.__name__ = f"number of days (1 to {MAX_DAYS})"


def build_parser() -> CommandParser:
    parser = CommandParser("tls-init", _DESCRIPTION, _EPILOG)
    parser.add_argument(
        "directory",
        metavar="DIR",
        nargs="?",
        help="the directory of both files (default: ~/.config/exec-server/tls)",
    )
    parser.add_argument(
        "--name",
        metavar="HOST",
        action="append",
        default=[],
        help="a further host name or address by which clients reach the server; may be repeated",
    )
    parser.add_argument(
        "--days",
        metavar="COUNT",
        type=_days,
        default=DEFAULT_DAYS,
        help=f"how long the certificate is valid (default: {DEFAULT_DAYS})",
    )
    output_group = parser.add_mutually_exclusive_group()
    output_group.add_argument(
        "--force", action="store_true", help="replace existing files (default: refuse)"
    )
    output_group.add_argument(
        "--show", action="store_true", help="make nothing; print the facts of the existing files"
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    from exec_server.net.self_signed import read_facts  # slow to import

    directory = Path(arguments.directory) if arguments.directory else _default_directory()
    directory = directory.absolute()
    if not arguments.show:
        _make(directory, arguments)
    certificate = directory / _CERTIFICATE
    try:
        facts = read_facts(certificate.read_bytes())
    except OSError as error:
        raise CommandError(f"cannot read {certificate}: {error.strerror}") from None
    except ValueError:
        raise CommandError(f"{certificate} is not a certificate in PEM format") from None
    print_text(_report(directory, facts, arguments.name))
    return 0


def _default_directory() -> Path:
    return targets_file().parent / "tls"


def _make(directory: Path, arguments: argparse.Namespace) -> None:
    from datetime import UTC, datetime

    from exec_server.net.self_signed import make_self_signed

    paths = [directory / _KEY, directory / _CERTIFICATE]
    existing = [str(path) for path in paths if path.exists()]
    if existing and not arguments.force:
        raise CommandError(
            f"{' and '.join(existing)} exist already; --show prints the fingerprint, --force "
            "replaces the files (clients then need the new fingerprint)"
        )
    names = [*arguments.name, *_LOCAL_NAMES]
    try:
        pair = make_self_signed(_with_host_name(names), datetime.now(UTC), arguments.days)
    except ValueError as error:
        raise UsageError(f"--name: {error}") from None
    write_private_file(directory / _KEY, pair.key, 0o600)
    write_private_file(directory / _CERTIFICATE, pair.certificate, 0o644)


def _with_host_name(names: list[str]) -> list[str]:
    """Add the name of this machine, unless it is none for a certificate."""
    host = socket.gethostname()
    return [*names, host] if _HOST_NAME.fullmatch(host) else names


def _report(directory: Path, facts: Facts, names: list[str]) -> str:
    certificate, key = (shlex.quote(str(directory / name)) for name in (_CERTIFICATE, _KEY))
    host = names[0] if names else socket.gethostname()
    target = f"wss://{f'[{host}]' if ':' in host else host}:{PORT}"
    return f"""\
certificate  {directory / _CERTIFICATE}
key          {directory / _KEY}
names        {", ".join(facts.names)}
valid until  {facts.valid_until:%Y-%m-%d}
fingerprint  {facts.fingerprint}

on this machine, once:
  (umask 077 && head -c 32 /dev/urandom | base64 > token)

on this machine:
  exec-server --listen wss://0.0.0.0:{PORT} --tls-cert {certificate} \\
      --tls-key {key} --ws-auth capability-token --ws-token-file token

on a client, with a copy of the file token:
  exec-server info --token-file token \\
      --pin {facts.fingerprint} \\
      {target}

or in its ~/.config/exec-server/targets.toml, as the target `box`:
  [box]
  url = "{target}"
  token_file = "token"
  pin = "{facts.fingerprint}"
"""
