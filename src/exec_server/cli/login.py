"""`exec-server login` and `logout`: stores and forgets the tokens for registries."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Final

from exec_server.cli.errors import CommandError, UsageError
from exec_server.cli.parser import CommandParser, refuse_token
from exec_server.cli.streams import json_text, print_text
from exec_server.client.logins import (
    Login,
    Place,
    Role,
    has_keyring,
    load_logins,
    normalise_url,
    remove_login,
    save_login,
)
from exec_server.client.targets import MAX_TOKEN_BYTES, AccessOptions

if TYPE_CHECKING:
    from exec_server.registry.api import Permissions

_DESCRIPTION: Final = """\
Store the token for a registry, so that `exec-server up` and relay targets find it. The token is
asked for on the terminal or read from stdin, never from an argument. The registry is asked whether
it accepts the token, and for what.
"""
_EPILOG: Final = """\
The token is stored in the keyring of your desktop if there is one and the package keyring is
installed (extra `keyring`), otherwise in ~/.config/exec-server/logins.json, which only you can
read. A registry has one token to register this machine and one to connect to others; a further
login replaces only those that its token is for. `exec-server logout URL` removes both.

examples:
  exec-server login https://registry.example.net
  exec-server login https://registry.example.net < token
  exec-server login https://10.0.0.5:7800 --pin sha256:2f05…   for a self-signed certificate
  exec-server login --list                                     the registries of this user
"""


def build_parser() -> CommandParser:
    parser = CommandParser("login", _DESCRIPTION, _EPILOG)
    parser.add_argument("url", metavar="URL", nargs="?", help="the URL of the registry")
    parser.add_argument("--token-file", metavar="FILE", help="file with the token")
    parser.add_argument("--token-env", metavar="NAME", help="environment variable with the token")
    refuse_token(parser)
    parser.add_argument(
        "--ca-file", metavar="FILE", help="root certificates to trust, in PEM format; remembered"
    )
    parser.add_argument(
        "--pin",
        metavar="SHA256",
        action="append",
        default=[],
        help="accept exactly the certificate with this fingerprint; may be repeated; remembered",
    )
    parser.add_argument(
        "--store",
        choices=("auto", "keyring", "file"),
        default="auto",
        help="where the token is kept (default: the keyring if there is one, else the file)",
    )
    parser.add_argument(
        "--list", action="store_true", help="list the registries; no token is shown"
    )
    parser.add_argument("--json", action="store_true", help="with --list: for programs")
    return parser


def run(arguments: argparse.Namespace) -> int:
    if arguments.list:
        return _list(as_json=arguments.json)
    if arguments.url is None:
        raise UsageError("login needs the URL of a registry, or --list")
    if arguments.json:
        raise UsageError("--json goes with --list")
    url = normalise_url(arguments.url)
    token = _read_token(arguments, url)
    permissions = _ask_registry(arguments, url, token)
    roles: tuple[Role, ...] = permissions.roles
    ca_file = None if arguments.ca_file is None else os.path.abspath(arguments.ca_file)
    login = Login(url, dict.fromkeys(roles, token), ca_file, tuple(arguments.pin))
    place: Place = arguments.store
    if arguments.store == "auto":
        place = "keyring" if has_keyring() else "file"
    save_login(login, place)
    print_text(_report(url, permissions, place))
    return 0


def _list(*, as_json: bool) -> int:
    logins = sorted(load_logins().values())
    if as_json:
        rows = [{"url": login.url, "roles": sorted(login.tokens)} for login in logins]
        print_text(json_text(rows))
        return 0
    for login in logins:
        print_text(f"{login.url}  {', '.join(sorted(login.tokens))}\n")
    return 0


def _read_token(arguments: argparse.Namespace, url: str) -> str:
    if arguments.token_file is not None and arguments.token_env is not None:
        raise UsageError("--token-file and --token-env exclude each other")
    access = AccessOptions(token_file=arguments.token_file, token_env=arguments.token_env)
    token = access.read_token()
    if token is None:
        token = _ask_user(url) if os.isatty(0) else _read_stdin()
    if not token:
        raise UsageError("the token is empty")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError("the token contains characters that no token has; copy it again")
    return token


def _ask_user(url: str) -> str:
    from getpass import getpass

    try:
        return getpass(f"Token for {url} (not shown): ").strip()
    except EOFError:
        return ""


def _read_stdin() -> str:
    text = sys.stdin.buffer.read(MAX_TOKEN_BYTES + 1)
    if len(text) > MAX_TOKEN_BYTES:
        raise UsageError(f"stdin has more than {MAX_TOKEN_BYTES} bytes, which is no token")
    return text.decode("ascii", errors="replace").strip()


def _ask_registry(arguments: argparse.Namespace, url: str, token: str) -> Permissions:
    """Ask for the roles of a token; raises StartupError, UsageError or CommandError."""
    from exec_server.errors import RegistryError
    from exec_server.host import event_loop
    from exec_server.net.client_tls import client_context
    from exec_server.registry.api import probe
    from exec_server.registry.destination import check_pinned_registry, environment_id

    if arguments.ca_file is not None and arguments.pin:
        raise UsageError("--ca-file and --pin exclude each other")
    tls = client_context(arguments.ca_file, arguments.pin)
    check_pinned_registry(tls, url)
    try:
        return event_loop.run(probe(url, environment_id(), token, tls))
    except RegistryError as error:
        raise CommandError(str(error)) from None


def _report(url: str, permissions: Permissions, place: Place) -> str:
    where = "the keyring" if place == "keyring" else "logins.json, which only you can read"
    lines = [f"Logged in to {url}; the token is in {where}."]
    if "executor" in permissions.roles:
        lines.append("Make this machine reachable:      exec-server up")
    if "client" in permissions.roles:
        lines.append(
            f"Run a command on another machine: exec-server exec relay:{url}/ID -- uname -a"
        )
    if not permissions.is_certain:
        lines.append("The token is for certain environments only; it is used for both.")
    return "\n".join(lines) + "\n"


_LOGOUT_DESCRIPTION: Final = """\
Forget the tokens for a registry that `exec-server login` has stored. The tokens themselves stay
valid: `exec-server registry token revoke` ends them, on the registry.
"""
_LOGOUT_EPILOG: Final = """\
examples:
  exec-server logout https://registry.example.net
  exec-server logout http://127.0.0.1:7800
"""


def build_logout_parser() -> CommandParser:
    parser = CommandParser("logout", _LOGOUT_DESCRIPTION, _LOGOUT_EPILOG)
    parser.add_argument("url", metavar="URL", help="the URL of the registry")
    return parser


def run_logout(arguments: argparse.Namespace) -> int:
    url = normalise_url(arguments.url)
    if not remove_login(url):
        raise CommandError(f"there is no login for {url}; `exec-server login --list` lists them")
    print_text(f"Logged out of {url}.\n")
    return 0
