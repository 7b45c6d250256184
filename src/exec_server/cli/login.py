"""`exec-server login` and `logout`: registries of the user, and a token for each role.

`logins.json` beside targets.toml lists them. Tokens are in the desktop's keyring (package
`keyring`), or else in that file, which only the user may read.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from exec_server.cli.errors import CommandError, UsageError
from exec_server.cli.parser import CommandParser
from exec_server.cli.streams import json_text, print_text
from exec_server.cli.targets import (
    MAX_TOKEN_BYTES,
    AccessOptions,
    read_configuration,
    targets_file,
    write_private_file,
)

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    from exec_server.registry.api import Permissions


Role = Literal["executor", "client"]
Place = Literal["keyring", "file"]
ROLES: Final[tuple[Role, ...]] = ("executor", "client")

# A user has a handful of registries; the limit keeps the file below its own.
MAX_REGISTRIES: Final = 256
_SERVICE: Final = "exec-server"


class Login(NamedTuple):
    """One registry with the tokens for it; a token is None if the keyring holds it."""

    url: str
    tokens: dict[Role, str | None]
    ca_file: str | None = None
    pins: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Login({self.url!r}, …)"  # keep the tokens out of tracebacks

    def read_token(self, role: Role) -> str | None:
        """The token of a role, None if there is none; raises UsageError."""
        if role not in self.tokens:
            return None
        token = self.tokens[role] or _keyring().get_password(_SERVICE, _account(self.url, role))
        if token is None:
            raise UsageError(
                f"the keyring no longer holds the token for {self.url}: run "
                f"`exec-server login {self.url}` again"
            )
        return token


def logins_file() -> Path:
    """The path of logins.json."""
    return targets_file().with_name("logins.json")


def normalise_url(url: str) -> str:
    """The URL of a registry as it is stored; raises StartupError if no token may be sent to it."""
    from exec_server.errors import StartupError
    from exec_server.protocol.urls import parse_url
    from exec_server.registry.destination import Destinations, check_registry_url

    text = url.strip().rstrip("/")
    if "://" not in text:
        raise StartupError(f"`{text}` is not a URL: write https://{text}, or http:// on loopback")
    check_registry_url(Destinations.ENCRYPTED, text)
    parsed = parse_url(text, frozenset({"http", "https"}))
    return f"{parsed.scheme}://{parsed.authority}{parsed.target.rstrip('/')}"


def load_logins() -> dict[str, Login]:
    """All logins by their URL, none if there is no file; raises UsageError."""
    import json

    path = logins_file()
    configuration = read_configuration(path)
    if configuration is None:
        return {}
    text, is_exposed = configuration
    if is_exposed:
        raise UsageError(f"{path} is readable by other users: run `chmod 600 {path}`")
    try:
        entries = json.loads(text)["registries"]
        logins = [_read_entry(entry) for entry in entries]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError(f"{path} is damaged: remove it and log in again") from None
    return {login.url: login for login in logins}


def _read_entry(entry: dict[str, object]) -> Login:
    tokens, pins = entry["tokens"], entry.get("pins", [])
    url, ca_file = entry["url"], entry.get("ca_file")
    if not (isinstance(tokens, dict) and isinstance(pins, list) and isinstance(url, str)):
        raise TypeError
    if not (ca_file is None or isinstance(ca_file, str)):
        raise TypeError
    known: dict[Role, str | None] = {role: tokens[role] for role in ROLES if role in tokens}
    return Login(url, known, ca_file, tuple(map(str, pins)))


def find_login(url: str) -> Login | None:
    """The login for a registry, None if there is none; raises UsageError."""
    from exec_server.errors import StartupError

    logins = load_logins()
    try:
        return logins.get(normalise_url(url)) if logins else None
    except StartupError:
        return None  # a URL that cannot have a login


def save_login(login: Login, place: Place) -> None:
    """Store the tokens of a login, beside those of other roles; UsageError or CommandError."""
    stored = load_logins()
    earlier = stored.pop(login.url, None)
    if len(stored) >= MAX_REGISTRIES:
        raise UsageError(
            f"there are {MAX_REGISTRIES} logins already: remove one with `exec-server logout URL`"
        )
    tokens = {} if earlier is None else dict(earlier.tokens)
    for role, token in login.tokens.items():
        if place == "keyring":
            _keyring().set_password(_SERVICE, _account(login.url, role), token)
        tokens[role] = None if place == "keyring" else token
    stored[login.url] = login._replace(tokens=tokens)
    _write_logins(stored)


def remove_login(url: str) -> bool:
    """Forget the tokens for a registry; False if there are none."""
    stored = load_logins()
    login = stored.pop(url, None)
    if login is None:
        return False
    for role, token in login.tokens.items():
        if token is None:
            _forget(_account(url, role))
    _write_logins(stored)
    return True


def has_keyring() -> bool:
    """Whether this user has a keyring that can store tokens."""
    try:
        backend = _keyring().get_keyring()
    except UsageError:
        return False
    # The backends below 1 store nothing, or store in the clear.
    return bool(backend.priority >= 1)


def _keyring() -> ModuleType:
    try:
        import keyring
    except ImportError:
        raise UsageError(
            "the package keyring is missing: run `pip install '.[keyring]'` in a checkout of "
            "exec-server, or use --store file"
        ) from None
    module: ModuleType = keyring
    return module


def _forget(account: str) -> None:
    from contextlib import suppress

    keyring = _keyring()
    with suppress(keyring.errors.PasswordDeleteError):  # removed by other means
        keyring.delete_password(_SERVICE, account)


def _account(url: str, role: Role) -> str:
    return f"{role} {url}"


def _write_logins(logins: dict[str, Login]) -> None:
    import json

    entries = [
        {"url": each.url, "tokens": each.tokens, "ca_file": each.ca_file, "pins": list(each.pins)}
        for each in logins.values()
    ]
    path = logins_file()
    try:
        write_private_file(path, json.dumps({"registries": entries}, indent=2).encode())
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from None


_DESCRIPTION: Final = """\
Store the token for a registry, so that `exec-server up` and relay targets find it. The token is
asked for on the terminal or read from stdin, never from an argument. The registry is asked whether
it accepts the token, and for what.
"""
_EPILOG: Final = """\
The token is stored in the keyring of your desktop if exec-server[keyring] is installed and there
is one, otherwise in ~/.config/exec-server/logins.json, which only you can read. A registry has one
token to register this machine and one to connect to others; a further login replaces only those
that its token is for. `exec-server logout URL` removes both.

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
    from exec_server.errors import StartupError

    try:
        url = normalise_url(arguments.url)
        token = _read_token(arguments, url)
        permissions = _ask_registry(arguments, url, token)
    except StartupError as error:
        raise UsageError(str(error)) from None
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
    from exec_server.errors import StartupError

    try:
        url = normalise_url(arguments.url)
    except StartupError as error:
        raise UsageError(str(error)) from None
    if not remove_login(url):
        raise CommandError(f"there is no login for {url}; `exec-server login --list` lists them")
    print_text(f"Logged out of {url}.\n")
    return 0
