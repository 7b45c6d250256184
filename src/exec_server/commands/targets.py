"""What a user means by TARGET and TARGET:PATH, and the file with the names; no connection yet.

    ws://HOST:PORT  wss://HOST          a server that listens
    stdio:COMMAND WORDS                 a program that serves on its standard streams
    relay:https://REGISTRY/ENVIRONMENT  an environment that a registry knows
    NAME                                a table of that name in targets.toml

A path follows after a colon. Behind a name that is the first colon; behind anything else the path
begins with `/` or `~`, and the colon before it is the first such one (for stdio: the last one,
as the words before may contain anything).
"""

from __future__ import annotations

import os
import re
import shlex
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from exec_server.commands.failures import Mistake

# A file of names has some hundred bytes for each. More than this is another file by mistake.
MAX_FILE_BYTES: Final = 1_048_576
# Tokens are shorter than what an HTTP head may have; more is another file by mistake.
MAX_TOKEN_BYTES: Final = 16_384

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
# What stands before a colon in other forms of a target, so it cannot be a name.
_RESERVED: Final = frozenset({"ws", "wss", "stdio", "relay", "file", "http", "https"})
_URL: Final = re.compile(r"wss?://")
_URL_PLACE: Final = re.compile(r"((?:wss?://|relay:https?://).+?)(?::((?:[/~].*)?))?", re.DOTALL)
# What looks like a path behind a URL, and is none. A port is no path, nor is what follows a name
# and password, which a URL must not have.
_RELATIVE_PLACE: Final = re.compile(
    r"(wss?://(?![^/]*@)(?:\[[^]]*\]|[^/:[]*)(?::\d+)?):(?!\d+(?:[/?#]|$)).+", re.DOTALL
)
_STDIO_PLACE: Final = re.compile(r"(stdio:.+):([/~].*)", re.DOTALL)
_NAMED_PLACE: Final = re.compile(rf"(?!stdio:)({_NAME.pattern}):(.*)", re.DOTALL)
_RELAY: Final = re.compile(r"(https?://.+)/([^/]+)", re.DOTALL)
_KEYS: Final = frozenset(
    {
        *("url", "stdio", "registry", "environment_id"),
        *("token", "token_file", "token_env", "executor_key", "ca_file"),
    }
)


@dataclass(frozen=True, kw_only=True)
class Access:
    """What proves who we are and who they are; secrets only by the place where they are."""

    token: str | None = None
    token_file: str | None = None
    token_env: str | None = None
    executor_key: str | None = None
    ca_file: str | None = None

    def __repr__(self) -> str:
        return "Access(…)"  # it may end up in a traceback, and the token with it

    @property
    def has_token(self) -> bool:
        return (self.token, self.token_file, self.token_env) != (None, None, None)

    def read_token(self) -> str | None:
        """The token, from wherever it is; raises Mistake if it is not there."""
        if self.token_env is not None:
            token = os.environ.get(self.token_env, "").strip()
            if not token:
                raise Mistake(f"there is no token in the environment variable {self.token_env}")
            return token
        if self.token_file is not None:
            return _read_token_file(self.token_file)
        return self.token


@dataclass(frozen=True, kw_only=True)
class Target:
    """One server: exactly one of `url`, `argv` and `registry` says where it is."""

    label: str  # what the user calls it
    url: str | None = None
    argv: tuple[str, ...] | None = None
    registry: str | None = None
    environment_id: str | None = None
    access: Access = Access()

    @property
    def whereabouts(self) -> str:
        """Where it is, as one would write it on the command line."""
        if self.argv is not None:
            return f"stdio:{shlex.join(self.argv)}"
        return self.url or f"relay:{self.registry}/{self.environment_id}"


@dataclass(frozen=True)
class Place:
    """A path on a target; None if none was given, which is not the same as an empty one."""

    target: str
    path: str | None


def split_place(text: str) -> Place | None:
    """Take TARGET:PATH apart; None if it is a local path. Nothing is looked up.

    Raises Mistake for a relative path where there can be none.
    """
    for form in (_STDIO_PLACE, _URL_PLACE, _NAMED_PLACE):
        if (parts := form.fullmatch(text)) is not None:
            if (relative := _RELATIVE_PLACE.fullmatch(parts[1])) is not None:
                raise Mistake(
                    f"`{text}`: a path behind {relative[1]} begins with / or ~; only a target "
                    "with a name in targets.toml takes others"
                )
            return Place(parts[1], parts[2])
    return Place(text, None) if text.startswith("stdio:") else None


def with_path(target: str) -> str:
    """How to write a path on a target, for advice."""
    return f"{target}:PATH" if _NAME.fullmatch(target) else f"{target}:/PATH"


def find_target(text: str, access: Access | None = None) -> Target:
    """The target that a user means; raises Mistake. What `access` has wins over the file."""
    if text.startswith("stdio:"):
        target = Target(label=text, argv=_words(text.removeprefix("stdio:"), text))
    elif _URL.match(text):
        target = Target(label=text, url=text)
    elif text.startswith("relay:"):
        target = _relay_target(text)
    else:
        target = _named_target(text)
    return replace(target, access=_merged(target.access, access or Access()))


def _merged(stored: Access, given: Access) -> Access:
    """A token given in one way replaces one that is stored in another."""
    has_token = given.token_file is not None or given.token_env is not None
    tokens = given if has_token else stored
    return Access(
        token=tokens.token,
        token_file=tokens.token_file,
        token_env=tokens.token_env,
        executor_key=given.executor_key or stored.executor_key,
        ca_file=given.ca_file or stored.ca_file,
    )


def _words(command: str, where: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise Mistake(f"{where}: the command cannot be taken apart: {error}") from None
    if not words:
        raise Mistake("no command after `stdio:`; for example: 'stdio:exec-server --listen stdio'")
    return words


def _relay_target(text: str) -> Target:
    parts = _RELAY.fullmatch(text.removeprefix("relay:"))
    if parts is None:
        raise Mistake(
            f"`{text}` does not name an environment; write relay:https://REGISTRY/ENVIRONMENT"
        )
    return Target(label=text, registry=parts[1], environment_id=parts[2])


def _named_target(name: str) -> Target:
    known = load_targets()
    if name in known:
        return known[name]
    listed = f"known targets: {', '.join(sorted(known))}" if known else f"{targets_file()} has none"
    if _NAME.fullmatch(name) is None:
        what = f"`{name}` is neither a URL (ws://HOST:PORT) nor a name"
        raise Mistake(f"{what}; {listed}")
    raise Mistake(f"unknown target `{name}`; {listed}")


# ---- the file -------------------------------------------------------------------------


def targets_file() -> Path:
    """Where the names are kept."""
    config = os.environ.get("XDG_CONFIG_HOME", "")
    # The specification says so: what is relative counts as unset.
    base = Path(config) if config.startswith("/") else Path.home() / ".config"
    return base / "exec-server" / "targets.toml"


def load_targets() -> dict[str, Target]:
    """Every target of the file, which need not exist; raises Mistake."""
    path = targets_file()
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise Mistake(f"cannot read {path}: {error.strerror}") from None
    if len(text) > MAX_FILE_BYTES:
        raise Mistake(f"{path} has more than {MAX_FILE_BYTES} bytes")
    try:
        tables = tomllib.loads(text.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise Mistake(f"{path} is not TOML: {error}") from None
    targets = {name: _read_table(path, name, table) for name, table in tables.items()}
    if stat.S_IMODE(mode) & 0o077 and any(target.access.token for target in targets.values()):
        raise Mistake(
            f"{path} has a token in it and others may read the file: run `chmod 600 {path}`, "
            "or name a file with token_file"
        )
    return targets


def _read_table(path: Path, name: str, table: object) -> Target:
    where = f"{path}: [{name}]"
    if not isinstance(table, dict):
        raise Mistake(f"{path}: `{name}` is not a table; targets are written as [{name}]")
    if _NAME.fullmatch(name) is None or name in _RESERVED:
        raise Mistake(
            f"{where}: a name begins with a letter or digit, has only these and `-`, `_`, `.`, "
            f"and is none of {', '.join(sorted(_RESERVED))}"
        )
    for key, value in table.items():
        if key not in _KEYS:
            raise Mistake(f"{where}: unknown key `{key}`; there are {', '.join(sorted(_KEYS))}")
        if not isinstance(value, str) and key != "stdio":
            raise Mistake(f"{where}: `{key}` must be a text in quotes")
    _check_combination(where, table)
    return Target(
        label=name,
        url=table.get("url"),
        argv=_stored_words(where, table["stdio"]) if "stdio" in table else None,
        registry=table.get("registry"),
        environment_id=table.get("environment_id"),
        access=Access(
            token=table.get("token"),
            token_file=_expanded(table.get("token_file"), path),
            token_env=table.get("token_env"),
            executor_key=table.get("executor_key"),
            ca_file=_expanded(table.get("ca_file"), path),
        ),
    )


def _check_combination(where: str, table: Mapping[str, object]) -> None:
    ways = [key for key in ("url", "stdio", "registry") if key in table]
    tokens = [key for key in ("token", "token_file", "token_env") if key in table]
    rules = (
        (len(ways) != 1, "needs exactly one of url, stdio and registry"),
        (
            ("registry" in table) != ("environment_id" in table),
            "registry and environment_id belong together",
        ),
        (len(tokens) > 1, f"has {' and '.join(tokens)}; one is enough"),
        (bool(tokens) and "stdio" in table, "a stdio program gets no token"),
        ("executor_key" in table and "registry" not in table, "executor_key is for a registry"),
        ("ca_file" in table and "stdio" in table, "ca_file is of no use to a stdio program"),
    )
    for is_wrong, text in rules:
        if is_wrong:
            raise Mistake(f"{where}: {text}")


def _stored_words(where: str, value: object) -> tuple[str, ...]:
    """A command as one text or as a list of words."""
    if isinstance(value, str):
        return _words(value, where)
    if isinstance(value, list) and value and all(isinstance(word, str) for word in value):
        return tuple(value)
    raise Mistake(f"{where}: `stdio` must be a command in quotes, or a list of its words")


def _expanded(value: str | None, file: Path) -> str | None:
    """A path as the file means it: `~`, and what is relative counts from the file."""
    if value is None:
        return None
    return str(file.parent / os.path.expanduser(value))


def _read_token_file(path: str) -> str:
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_TOKEN_BYTES + 1)
    except OSError as error:
        raise Mistake(f"cannot read the token file {path}: {error.strerror}") from None
    if len(content) > MAX_TOKEN_BYTES:
        raise Mistake(f"the token file {path} has more than {MAX_TOKEN_BYTES} bytes")
    try:
        token = content.decode("ascii").strip()
    except UnicodeDecodeError:
        raise Mistake(f"the token file {path} has other characters than ASCII") from None
    if not token:
        raise Mistake(f"the token file {path} is empty")
    return token
