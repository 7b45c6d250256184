"""Named targets and addresses of servers: what a TARGET means, and targets.toml; connects to none.

ws://HOST:PORT  wss://HOST          a listening server
unix:/PATH                          a server on a unix socket of this machine
stdio:COMMAND WORDS                 a program that serves on stdin and stdout
relay:https://REGISTRY/ENVIRONMENT  an environment of a registry
NAME                                the table [NAME] of targets.toml
:                                   the default target, one of these in EXEC_SERVER_TARGET
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from exec_server.client.configuration import read_configuration, targets_file
from exec_server.errors import StartupError, printable

if TYPE_CHECKING:
    from pathlib import Path


# A token must fit into an HTTP header. A larger file does not hold a token.
MAX_TOKEN_BYTES: Final = 16_384
# The port in suggestions: that of the documents.
PORT: Final = 7700

DEFAULT_TARGET: Final = ":"
TARGET_VARIABLE: Final = "EXEC_SERVER_TARGET"

# Patterns are compiled at their first use: a command needs two or three of them.
NAME: Final = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
# Prefixes of the other target forms, so not available as names.
_RESERVED: Final = frozenset({"ws", "wss", "unix", "stdio", "relay", "file", "http", "https"})
_URL: Final = ("ws://", "wss://", "unix:")
_WEB_URL: Final = r"(?is)http(s?)://(?P<place>.*)"
_HOST: Final = r"([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(?P<port>:[0-9]+)?"
_RELAY: Final = r"(?s)(https?://.+)/([^/]+)"
_URL_SECRETS: Final = r"(://)(?:([^/?#]*)@)?([^?#\s]*)([?#]\S*)?"
PATH_KEYS: Final = ("token_file", "ca_file")


class AccessOptions(NamedTuple):
    """Credentials of the client and checks of the server; `token_*` name the token's source.

    The other fields are options of `client.connect` by their names. They are written again because
    `exec-server targets` and completion do without the client, which takes longer to import than
    they take to run. A field needs a row of ACCESS_FLAGS, and is a key of targets.toml.
    """

    token: str | None = None
    token_file: str | None = None
    token_env: str | None = None
    executor_key: str | None = None
    ca_file: str | None = None
    pin: tuple[str, ...] = ()
    allow_insecure_token: bool = False
    retention: float | str | None = None
    wait: float | None = None

    def __repr__(self) -> str:
        return "AccessOptions(…)"  # keep the token out of tracebacks

    @property
    def has_token(self) -> bool:
        return (self.token, self.token_file, self.token_env) != (None, None, None)

    def read_token(self) -> str | None:
        """Read the token from its source; raises StartupError if the source has none."""
        if self.token_env is not None:
            token = os.environ.get(self.token_env, "").strip()
            if not token:
                raise StartupError(f"the environment variable {self.token_env} holds no token")
            return _one_line(token, f"the environment variable {self.token_env}")
        if self.token_file is not None:
            return _read_token_file(self.token_file)
        return self.token


_KEYS: Final = frozenset({"url", "stdio", "registry", "environment_id", *AccessOptions._fields})


class Target(NamedTuple):
    """A server; exactly one of `url`, `argv` and `registry` is set."""

    label: str  # the TARGET argument, without secrets of its URL
    url: str | None = None
    argv: tuple[str, ...] | None = None
    registry: str | None = None
    environment_id: str | None = None
    access: AccessOptions = AccessOptions()

    @property
    def address(self) -> str:
        """The target as a TARGET argument without a name; secrets in URLs are shown as `***`."""
        if self.argv is not None:
            import shlex

            return f"stdio:{shlex.join(map(without_secrets, self.argv))}"
        return without_secrets(self.url or f"relay:{self.registry}/{self.environment_id}")

    @property
    def place(self) -> str:
        """The target in texts about its connection: without secrets and arguments of a command."""
        if self.argv is not None:
            return f"stdio:{self.argv[0]}"
        if self.registry is not None:
            return f"environment {self.environment_id} of {without_secrets(self.registry)}"
        return self.address


def without_secrets(text: str) -> str:
    """A text whose URLs have no user, password and values of the query and fragment."""
    return re.sub(_URL_SECRETS, _mask_url, text) if "://" in text else text


def _mask_url(parts: re.Match[str]) -> str:
    scheme, user, place, query = parts.groups(default="")
    masked = re.sub(r"([?&#;](?:[^=&#;]*=)?)[^&#;]*", r"\1***", query)
    return f"{scheme}{user and '***@'}{place}{masked}"


def find_target(text: str | None, access: AccessOptions | None = None) -> Target:
    """The target of a TARGET argument; `access` overrides targets.toml. Raises StartupError.

    None and `:` are the default target.
    """
    target = _default_target() if text in (None, DEFAULT_TARGET) else _parse_target(text)
    return target._replace(access=_merged(target.access, access or AccessOptions()))


def _default_target() -> Target:
    text = os.environ.get(TARGET_VARIABLE, "")
    if not text:
        raise StartupError(
            f"no target: name one, such as ws://127.0.0.1:{PORT} or a name of targets.toml, or set "
            f"{TARGET_VARIABLE} to the default target"
        )
    try:
        return _parse_target(text)
    except StartupError as error:
        raise StartupError(f"{TARGET_VARIABLE}: {error}") from None


def _parse_target(text: str) -> Target:
    if text.startswith("stdio:"):
        label = without_secrets(text)
        return Target(label=label, argv=_split_command(text.removeprefix("stdio:"), label))
    if text.startswith(_URL):
        return Target(label=without_secrets(text), url=text)
    if text.startswith("relay:"):
        return _relay_target(text)
    return _named_target(text)


def _merged(stored: AccessOptions, flags: AccessOptions) -> AccessOptions:
    """The flags, or options of `connect`, before the stored ones.

    A token replaces the stored token, of whichever source.

    A CA file or pins replace both of the stored ones.
    """
    if flags.has_token:
        stored = stored._replace(token=None, token_file=None, token_env=None)
    if flags.ca_file is not None or flags.pin:
        stored = stored._replace(ca_file=None, pin=())
    # An empty text is given: as a fingerprint it must not mean that any is accepted.
    given = ((name, each) for name, each in flags._asdict().items() if each not in (None, ()))
    return stored._replace(**{name: each for name, each in given if each is not False})


def _split_command(command: str, where: str) -> tuple[str, ...]:
    import shlex

    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise StartupError(f"{where}: cannot parse the command after stdio: {error}") from None
    if not words:
        example = "stdio:exec-server --listen stdio"
        raise StartupError(f"{where}: no command after stdio; write for example '{example}'")
    return words


def _relay_target(text: str) -> Target:
    parts = re.fullmatch(_RELAY, text.removeprefix("relay:"))
    label = without_secrets(text)
    if parts is None:
        raise StartupError(
            f"`{label}` names no environment; write relay:https://REGISTRY/ENVIRONMENT"
        )
    return Target(label=label, registry=parts[1], environment_id=parts[2])


def _named_target(name: str) -> Target:
    check_scheme(name)
    known = load_targets()
    if name in known:
        return known[name]
    shown = printable(without_secrets(name))
    listed = f"{targets_file()} defines {', '.join(sorted(known)) or 'no targets'}"
    host = re.fullmatch(_HOST, name)
    if host is not None and host["port"] is not None:
        raise StartupError(f"`{shown}` is not a target; did you mean ws://{shown}?")
    if re.fullmatch(NAME, name) is None and host is None:
        raise StartupError(
            f"`{shown}` is neither a URL (ws://HOST:PORT, unix:/PATH) nor a name; {listed}"
        )
    text = f"unknown target `{shown}`; {listed}; a host is written ws://{shown}:{PORT}"
    if os.environ.get(TARGET_VARIABLE):
        text += f"; the target of {TARGET_VARIABLE} is written `{DEFAULT_TARGET}`"
    raise StartupError(text)


def check_scheme(text: str) -> None:
    """Raise StartupError for a URL of the web, which names the one that is meant."""
    if (url := re.fullmatch(_WEB_URL, text)) is not None:
        meant = printable(without_secrets(f"ws{url[1].lower()}://{url['place']}"))
        raise StartupError(
            f"`{printable(without_secrets(text))}` is not a target; did you mean {meant}? "
            "ws:// is for a server without TLS, wss:// for one with TLS"
        )


def load_targets() -> dict[str, Target]:
    """All targets of targets.toml, none if it does not exist; raises StartupError."""
    path = targets_file()
    configuration = read_configuration(path)
    return {} if configuration is None else parse_targets(path, *configuration)


def parse_targets(path: Path, content: bytes, is_exposed: bool) -> dict[str, Target]:
    """The targets in the content of a file, which `is_exposed` if other users can read it.

    Raises StartupError.
    """
    import tomllib

    try:
        tables = tomllib.loads(content.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise StartupError(f"{path} is not TOML: {error}") from None
    except RecursionError:
        raise StartupError(f"{path} is nested too deeply") from None
    targets = {name: _read_table(path, name, table) for name, table in tables.items()}
    if is_exposed and any(target.access.token for target in targets.values()):
        raise StartupError(
            f"{path} holds a token and is readable by other users: run `chmod 600 {path}`, "
            "or use token_file"
        )
    return targets


def _read_table(path: Path, name: str, table: object) -> Target:
    where = f"{path}: [{name}]"
    if not isinstance(table, dict):
        raise StartupError(f"{path}: `{name}` is not a table; targets are written as [{name}]")
    check_name(name, where)
    for key, value in table.items():
        if key not in _KEYS:
            known = ", ".join(sorted(_KEYS))
            raise StartupError(f"{where}: unknown key `{key}`; known keys: {known}")
        if key == "allow_insecure_token":
            if not isinstance(value, bool):
                raise StartupError(f"{where}: `{key}` must be true or false")
        elif key == "retention":
            if not isinstance(value, str | int) or isinstance(value, bool):
                raise StartupError(f"{where}: `{key}` must be a string such as 8h, or seconds")
        elif key == "wait":
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise StartupError(f"{where}: `{key}` must be a number of seconds")
        elif not isinstance(value, str) and key not in ("stdio", "pin"):
            raise StartupError(f"{where}: `{key}` must be a string")
    if str(table.get("url", "")).startswith("relay:"):
        table = _split_relay_url(where, table)
    _check_combination(where, table)
    access = {key: table[key] for key in AccessOptions._fields if key in table}
    access |= {key: _resolve_path(access[key], path) for key in PATH_KEYS if key in access}
    if "pin" in access:
        access["pin"] = _parse_pins(where, access["pin"])
    return Target(
        label=name,
        url=table.get("url"),
        argv=_parse_stdio(where, table["stdio"]) if "stdio" in table else None,
        registry=table.get("registry"),
        environment_id=table.get("environment_id"),
        access=AccessOptions(**access),
    )


def check_name(name: str, where: str) -> None:
    """Raise StartupError for a name that no target can have."""
    if re.fullmatch(NAME, name) is None or name in _RESERVED:
        raise StartupError(
            f"{where}: a name begins with a letter or digit, contains only these and `-`, `_`, "
            f"`.`, and is none of {', '.join(sorted(_RESERVED))}"
        )


def _split_relay_url(where: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """A table whose url is `relay:REGISTRY/ENVIRONMENT`, with the keys of a registry instead."""
    if "registry" in table or "environment_id" in table:
        raise StartupError(f"{where}: a url that begins with relay: has no registry beside it")
    try:
        relay = _relay_target(table["url"])
    except StartupError as error:
        raise StartupError(f"{where}: {error}") from None
    others = {key: value for key, value in table.items() if key != "url"}
    return others | {"registry": relay.registry, "environment_id": relay.environment_id}


def _check_combination(where: str, table: Mapping[str, object]) -> None:
    ways = [key for key in ("url", "stdio", "registry") if key in table]
    tokens = [key for key in ("token", "token_file", "token_env") if key in table]
    rules = (
        (len(ways) != 1, "needs exactly one of url, stdio and registry"),
        (
            ("registry" in table) != ("environment_id" in table),
            "registry and environment_id require each other",
        ),
        (len(tokens) > 1, f"{' and '.join(tokens)} exclude each other"),
        (bool(tokens) and "stdio" in table, f"{''.join(tokens)} is not used with stdio"),
        ("executor_key" in table and "registry" not in table, "executor_key requires registry"),
        ("ca_file" in table and "stdio" in table, "ca_file is not used with stdio"),
        ("pin" in table and "stdio" in table, "pin is not used with stdio"),
        ("wait" in table and "stdio" in table, "wait is not used with stdio"),
        ("pin" in table and "ca_file" in table, "ca_file and pin exclude each other"),
        ("allow_insecure_token" in table and not tokens, "allow_insecure_token requires a token"),
    )
    for is_wrong, text in rules:
        if is_wrong:
            raise StartupError(f"{where}: {text}")


def _parse_stdio(where: str, value: object) -> tuple[str, ...]:
    """Parse a command: a string in shell syntax, or a list of words."""
    if isinstance(value, str):
        return _split_command(value, where)
    if isinstance(value, list) and value and all(isinstance(word, str) for word in value):
        return tuple(value)
    raise StartupError(f"{where}: `stdio` must be a string or a list of strings")


def _parse_pins(where: str, value: object) -> tuple[str, ...]:
    """Parse one fingerprint, or a list of those that are accepted."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(pin, str) for pin in value):
        return tuple(value)
    raise StartupError(f"{where}: `pin` must be a string or a list of strings")


def _resolve_path(value: str, file: Path) -> str:
    """Expand `~`, and make a path relative to the directory of targets.toml absolute."""
    return str(file.parent / os.path.expanduser(value))


def _read_token_file(path: str) -> str:
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_TOKEN_BYTES + 1)
    except OSError as error:
        raise StartupError(f"cannot read the token file {path}: {error.strerror}") from None
    if len(content) > MAX_TOKEN_BYTES:
        raise StartupError(f"the token file {path} has more than {MAX_TOKEN_BYTES} bytes")
    try:
        token = content.decode("ascii").strip()
    except UnicodeDecodeError:
        raise StartupError(f"the token file {path} contains non-ASCII characters") from None
    if not token:
        raise StartupError(f"the token file {path} is empty")
    return _one_line(token, f"the token file {path}")


def _one_line(token: str, source: str) -> str:
    """The token; raises StartupError if it is several lines, which no header can carry."""
    if (count := len(token.splitlines())) > 1:
        raise StartupError(f"{source} has {count} lines, and must have one: the token")
    return token
