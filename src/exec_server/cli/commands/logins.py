"""The registries that the user has logged in to, and the tokens for them.

`logins.json` beside targets.toml lists them. A token is in the keyring of the user's desktop if
there is one (the package `keyring`), otherwise in that file, which only the user may read. A
registry has one token for each role: `executor` to register this machine, `client` to connect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from exec_server.cli.commands.errors import CommandError, UsageError
from exec_server.cli.commands.targets import read_configuration, targets_file

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
        """The token of a role, None if there is none; raises UsageError."""
        if role not in self.tokens:
            return None
        token = self.tokens[role]
        if token is not None:
            return token
        found: str | None = _keyring().get_password(_SERVICE, _account(self.url, role))
        if found is None:
            raise UsageError(
                f"the keyring no longer holds the token for {self.url}: run "
                f"`exec-server login {self.url}` again"
            )
        return found


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


def load() -> dict[str, Login]:
    """All logins by their URL, none if there is no file; raises UsageError."""
    import json

    path = logins_file()
    found = read_configuration(path)
    if found is None:
        return {}
    text, is_exposed = found
    if is_exposed:
        raise UsageError(f"{path} is readable by other users: run `chmod 600 {path}`")
    try:
        entries = json.loads(text)["registries"]
        logins = [_read_entry(entry) for entry in entries]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{path} is damaged: remove it and log in again") from None
    return {login.url: login for login in logins}


def _read_entry(entry: dict[str, object]) -> Login:
    tokens, pins = entry["tokens"], entry.get("pins", [])
    url, ca_file = entry["url"], entry.get("ca_file")
    if not (isinstance(tokens, dict) and isinstance(pins, list) and isinstance(url, str)):
        raise TypeError
    if not (ca_file is None or isinstance(ca_file, str)):
        raise TypeError
    kept: dict[Role, str | None] = {role: tokens[role] for role in ROLES if role in tokens}
    return Login(url, kept, ca_file, tuple(map(str, pins)))


def find(url: str) -> Login | None:
    """The login for a registry, None if there is none; raises UsageError."""
    from exec_server.errors import StartupError

    logins = load()
    try:
        return logins.get(normalise_url(url)) if logins else None
    except StartupError:
        return None  # a URL that cannot have a login


def save(login: Login, place: Place) -> None:
    """Store the tokens of a login; other roles of the same registry keep theirs.

    Raises UsageError or CommandError.
    """
    stored = load()
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
    _write(stored)


def remove(url: str) -> bool:
    """Forget the tokens for a registry; False if there are none."""
    stored = load()
    login = stored.pop(url, None)
    if login is None:
        return False
    for role, token in login.tokens.items():
        if token is None:
            _forget(_account(url, role))
    _write(stored)
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


def _write(logins: dict[str, Login]) -> None:
    import json

    from exec_server.cli.commands.private_file import write_file

    entries = [
        {"url": each.url, "tokens": each.tokens, "ca_file": each.ca_file, "pins": list(each.pins)}
        for each in logins.values()
    ]
    path = logins_file()
    try:
        write_file(path, json.dumps({"registries": entries}, indent=2).encode())
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from None
