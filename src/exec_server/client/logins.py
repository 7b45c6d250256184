"""Stored logins of `exec-server login`: registries of the user, and a token for each role.

`logins.json` beside targets.toml lists them. Tokens are in the desktop's keyring (package
`keyring`), or else in that file, which only the user may read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from exec_server.client.configuration import (
    changing,
    read_configuration,
    targets_file,
    write_private_file,
)
from exec_server.errors import StartupError, missing_package

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType


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
        """The token of a role, None if there is none; raises StartupError."""
        if role not in self.tokens:
            return None
        token = self.tokens[role] or _keyring().get_password(_SERVICE, _account(self.url, role))
        if token is None:
            raise StartupError(
                f"the keyring no longer holds the token for {self.url}: run "
                f"`exec-server login {self.url}` again"
            )
        return token


def logins_file() -> Path:
    """The path of logins.json."""
    return targets_file().with_name("logins.json")


def normalise_url(url: str) -> str:
    """The URL of a registry as it is stored; raises StartupError if no token may be sent to it."""
    from exec_server.protocol.urls import parse_url
    from exec_server.registry.destination import Destinations, check_registry_url

    text = url.strip().rstrip("/")
    if "://" not in text:
        raise StartupError(f"`{text}` is not a URL: write https://{text}, or http:// on loopback")
    check_registry_url(Destinations.ENCRYPTED, text)
    parsed = parse_url(text, frozenset({"http", "https"}))
    return f"{parsed.scheme}://{parsed.authority}{parsed.target.rstrip('/')}"


def load_logins() -> dict[str, Login]:
    """All logins by their URL, none if there is no file; raises StartupError."""
    import json

    path = logins_file()
    configuration = read_configuration(path)
    if configuration is None:
        return {}
    text, is_exposed = configuration
    if is_exposed:
        raise StartupError(f"{path} is readable by other users: run `chmod 600 {path}`")
    try:
        entries = json.loads(text)["registries"]
        logins = [_read_entry(entry) for entry in entries]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise StartupError(f"{path} is damaged: remove it and log in again") from None
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
    """The login for a registry, None if there is none; raises StartupError."""
    logins = load_logins()
    try:
        return logins.get(normalise_url(url)) if logins else None
    except StartupError:
        return None  # a URL that cannot have a login


def save_login(login: Login, place: Place) -> None:
    """Store the tokens of a login, beside those of other roles; StartupError."""
    with changing(logins_file()):
        _save_login(login, place)


def _save_login(login: Login, place: Place) -> None:
    stored = load_logins()
    earlier = stored.pop(login.url, None)
    if len(stored) >= MAX_REGISTRIES:
        raise StartupError(
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
    with changing(logins_file()):
        return _remove_login(url)


def _remove_login(url: str) -> bool:
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
    except StartupError:
        return False
    # The backends below 1 store nothing, or store in the clear.
    return bool(backend.priority >= 1)


def _keyring() -> ModuleType:
    try:
        import keyring
    except ImportError:
        text = missing_package("the keyring of the desktop", "keyring", "keyring")
        raise StartupError(f"{text}; or use --store file") from None
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
        raise StartupError(f"cannot write {path}: {error.strerror}") from None
