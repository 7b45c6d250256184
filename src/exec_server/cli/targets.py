"""Parses TARGET and TARGET:PATH arguments and targets.toml; opens no connection.

    ws://HOST:PORT  wss://HOST          a listening server
    unix:/PATH                          a server on a unix socket of this machine
    stdio:COMMAND WORDS                 a program that serves on stdin and stdout
    relay:https://REGISTRY/ENVIRONMENT  an environment of a registry
    NAME                                the table [NAME] of targets.toml

A path follows after a colon. After a name, the first colon counts. After other targets the path
begins with `/` or `~`, and the first colon followed by one of these counts; for stdio and unix
the last one, because the command or the path of the socket may contain such colons. After a unix
socket a relative path may follow too: the last colon counts.
"""

from __future__ import annotations

import argparse
import os
import re
import stat
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from exec_server.cli.errors import UsageError
from exec_server.cli.parser import PATH_FORMS, TARGET_FORMS, ArgumentParser, CommandParser
from exec_server.cli.streams import json_text, print_status, print_text

if TYPE_CHECKING:
    from pathlib import Path


# A target takes a few hundred bytes. A larger file is not a targets.toml.
MAX_FILE_BYTES: Final = 1_048_576
# A token must fit into an HTTP header. A larger file does not hold a token.
MAX_TOKEN_BYTES: Final = 16_384

# Elsewhere modes and owners say nothing about who can read and write a file.
_HAS_MODES: Final = os.name == "posix"

# Patterns are compiled at their first use: a command needs two or three of them.
_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
# Prefixes of the other target forms, so not available as names.
_RESERVED: Final = frozenset({"ws", "wss", "unix", "stdio", "relay", "file", "http", "https"})
_URL: Final = ("ws://", "wss://", "unix:")
_URL_PATH: Final = r"(?s)((?:wss?://|relay:https?://).+?)(?::((?:[/~].*)?))?"
# A URL followed by a relative path, which is not supported. A port is not a path; a URL with user
# name and password is rejected elsewhere.
_RELATIVE_URL_PATH: Final = (
    r"(?s)(wss?://(?![^/]*@)(?:\[[^]]*\]|[^/:[]*)(?::\d+)?):(?!\d+(?:[/?#]|$)).+"
)
_URL_WITH_PATH: Final = r"(wss?://[^/?#]+)(/[^?#]+)"
_STDIO_PATH: Final = r"(?s)(stdio:.+):([/~].*)"
_UNIX_PATH: Final = r"(?s)(unix:.+):([/~].*)|(unix:.+):(.*)"
_NAMED_PATH: Final = rf"(?s)(?!stdio:|unix:)({_NAME}):(.*)"
_HOST_PORT: Final = r"([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):[0-9]+"
_RELAY: Final = r"(?s)(https?://.+)/([^/]+)"
_URL_SECRETS: Final = r"(://)(?:([^/?#]*)@)?([^?#\s]*)([?#]\S*)?"
_PATH_KEYS: Final = ("token_file", "ca_file")
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
}


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
    retention: str | None = None

    def __repr__(self) -> str:
        return "AccessOptions(…)"  # keep the token out of tracebacks

    @property
    def has_token(self) -> bool:
        return (self.token, self.token_file, self.token_env) != (None, None, None)

    def read_token(self) -> str | None:
        """Read the token from its source; raises UsageError if the source has none."""
        if self.token_env is not None:
            token = os.environ.get(self.token_env, "").strip()
            if not token:
                raise UsageError(f"the environment variable {self.token_env} holds no token")
            return token
        if self.token_file is not None:
            return _read_token_file(self.token_file)
        return self.token

    def connect_options(self) -> dict[str, Any]:
        """The ConnectOptions of the client, with the token that was read; raises UsageError."""
        options = self._asdict()
        del options["token_file"], options["token_env"]
        return options | {"token": self.read_token()}


_KEYS: Final = frozenset({"url", "stdio", "registry", "environment_id", *AccessOptions._fields})


class Target(NamedTuple):
    """A server; exactly one of `url`, `argv` and `registry` is set."""

    label: str  # the TARGET argument
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

            return f"stdio:{shlex.join(map(_without_secrets, self.argv))}"
        return _without_secrets(self.url or f"relay:{self.registry}/{self.environment_id}")


def _without_secrets(text: str) -> str:
    """A text whose URLs have no user, password and values of the query and fragment."""
    return re.sub(_URL_SECRETS, _mask_url, text) if "://" in text else text


def _mask_url(parts: re.Match[str]) -> str:
    scheme, user, place, query = parts.groups(default="")
    masked = re.sub(r"([?&#;](?:[^=&#;]*=)?)[^&#;]*", r"\1***", query)
    return f"{scheme}{user and '***@'}{place}{masked}"


class RemotePath(NamedTuple):
    """A path on a target. `path` is None for a bare TARGET, and empty for `TARGET:`."""

    target: str
    path: str | None


def parse_remote_path(text: str) -> RemotePath | None:
    """Parse TARGET:PATH; None for a local path. Names are not looked up.

    Raises UsageError for a relative path after a target without a name.
    """
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
    return f"{target}:PATH" if re.fullmatch(_NAME, target) else f"{target}:/PATH"


def find_target(text: str, access: AccessOptions | None = None) -> Target:
    """The target of a TARGET argument; `access` overrides targets.toml. Raises UsageError."""
    if text.startswith("stdio:"):
        target = Target(label=text, argv=_split_command(text.removeprefix("stdio:"), text))
    elif text.startswith(_URL):
        target = Target(label=text, url=text)
    elif text.startswith("relay:"):
        target = _relay_target(text)
    else:
        target = _named_target(text)
    return target._replace(access=_merged(target.access, access or AccessOptions()))


def _merged(stored: AccessOptions, flags: AccessOptions) -> AccessOptions:
    """A token from the command line replaces the stored token, of whichever source.

    A CA file or pins replace both of the stored ones.
    """
    if flags.has_token:
        stored = stored._replace(token=None, token_file=None, token_env=None)
    if flags.ca_file is not None or flags.pin:
        stored = stored._replace(ca_file=None, pin=())
    return stored._replace(**{name: value for name, value in flags._asdict().items() if value})


def _split_command(command: str, where: str) -> tuple[str, ...]:
    import shlex

    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise UsageError(f"{where}: cannot parse the command after stdio: {error}") from None
    if not words:
        example = "stdio:exec-server --listen stdio"
        raise UsageError(f"{where}: no command after stdio; write for example '{example}'")
    return words


def _relay_target(text: str) -> Target:
    parts = re.fullmatch(_RELAY, text.removeprefix("relay:"))
    if parts is None:
        raise UsageError(f"`{text}` names no environment; write relay:https://REGISTRY/ENVIRONMENT")
    return Target(label=text, registry=parts[1], environment_id=parts[2])


def _named_target(name: str) -> Target:
    known = load_targets()
    if name in known:
        return known[name]
    names = ", ".join(sorted(known))
    listed = f"known targets: {names}" if known else f"{targets_file()} defines no targets"
    if re.fullmatch(_HOST_PORT, name) is not None:
        raise UsageError(f"`{name}` is not a target; did you mean ws://{name}?")
    if re.fullmatch(_NAME, name) is None:
        raise UsageError(
            f"`{name}` is neither a URL (ws://HOST:PORT, unix:/PATH) nor a name; {listed}"
        )
    raise UsageError(f"unknown target `{name}`; {listed}")


def configuration_directory() -> Path:
    """The directory of the user's configurations."""
    from pathlib import Path  # slow to import, and needed for targets with a name only

    config = os.environ.get("XDG_CONFIG_HOME", "")
    # The XDG base directory specification says to ignore a relative path.
    return Path(config) if config.startswith("/") else Path.home() / ".config"


def targets_file() -> Path:
    """The path of targets.toml."""
    return configuration_directory() / "exec-server" / "targets.toml"


def read_configuration(path: Path) -> tuple[bytes, bool] | None:
    """A configuration file, and whether others can read it; None if missing.

    Raises UsageError, also if others can write the file or its directory: it names programs to run
    and servers that get tokens.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise UsageError(f"{path} is not a regular file")
            _check_writers(path.parent, path.parent.stat())
            _check_writers(path, info)
            content = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise UsageError(f"{path} has more than {MAX_FILE_BYTES} bytes")
    return content, _HAS_MODES and bool(info.st_mode & 0o077)


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting for the writer of a FIFO."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _check_writers(path: Path, info: os.stat_result) -> None:
    """Raise UsageError if users other than this one and root can change a file or directory."""
    if not _HAS_MODES:
        return
    if info.st_uid not in (0, os.geteuid()):
        raise UsageError(
            f"{path} belongs to another user (uid {info.st_uid}), who could change it: make it "
            "yours with chown, or replace it with a copy of your own"
        )
    is_shared = info.st_mode & stat.S_IWGRP and not _is_own_group(info.st_gid)
    if is_shared or info.st_mode & stat.S_IWOTH:
        raise UsageError(f"{path} is writable by other users: run `chmod go-w {path}`")


def _is_own_group(gid: int) -> bool:
    """Whether a group has no members but this user and root.

    Systems that give each user such a group make new files writable for it.
    """
    import grp
    import pwd

    try:
        own = {"root", pwd.getpwuid(os.geteuid()).pw_name}
        members = {*grp.getgrgid(gid).gr_mem}
    except KeyError:
        return False
    return members | {each.pw_name for each in pwd.getpwall() if each.pw_gid == gid} <= own


def load_targets() -> dict[str, Target]:
    """All targets of targets.toml, none if it does not exist; raises UsageError."""
    import tomllib

    path = targets_file()
    configuration = read_configuration(path)
    if configuration is None:
        return {}
    text, is_exposed = configuration
    try:
        tables = tomllib.loads(text.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
    except RecursionError:
        raise UsageError(f"{path} is nested too deeply") from None
    targets = {name: _read_table(path, name, table) for name, table in tables.items()}
    if is_exposed and any(target.access.token for target in targets.values()):
        raise UsageError(
            f"{path} holds a token and is readable by other users: run `chmod 600 {path}`, "
            "or use token_file"
        )
    return targets


def _read_table(path: Path, name: str, table: object) -> Target:
    where = f"{path}: [{name}]"
    if not isinstance(table, dict):
        raise UsageError(f"{path}: `{name}` is not a table; targets are written as [{name}]")
    if re.fullmatch(_NAME, name) is None or name in _RESERVED:
        raise UsageError(
            f"{where}: a name begins with a letter or digit, contains only these and `-`, `_`, "
            f"`.`, and is none of {', '.join(sorted(_RESERVED))}"
        )
    for key, value in table.items():
        if key not in _KEYS:
            known = ", ".join(sorted(_KEYS))
            raise UsageError(f"{where}: unknown key `{key}`; known keys: {known}")
        if key == "allow_insecure_token":
            if not isinstance(value, bool):
                raise UsageError(f"{where}: `{key}` must be true or false")
        elif key == "retention":
            if not isinstance(value, str | int) or isinstance(value, bool):
                raise UsageError(f"{where}: `{key}` must be a string such as 8h, or seconds")
        elif not isinstance(value, str) and key not in ("stdio", "pin"):
            raise UsageError(f"{where}: `{key}` must be a string")
    if str(table.get("url", "")).startswith("relay:"):
        table = _split_relay_url(where, table)
    _check_combination(where, table)
    access = {key: table[key] for key in AccessOptions._fields if key in table}
    access |= {key: _resolve_path(access[key], path) for key in _PATH_KEYS if key in access}
    if "retention" in access:
        access["retention"] = str(access["retention"])
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


def _split_relay_url(where: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """A table whose url is `relay:REGISTRY/ENVIRONMENT`, with the keys of a registry instead."""
    if "registry" in table or "environment_id" in table:
        raise UsageError(f"{where}: a url that begins with relay: has no registry beside it")
    try:
        relay = _relay_target(table["url"])
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
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
        ("pin" in table and "ca_file" in table, "ca_file and pin exclude each other"),
        ("allow_insecure_token" in table and not tokens, "allow_insecure_token requires a token"),
    )
    for is_wrong, text in rules:
        if is_wrong:
            raise UsageError(f"{where}: {text}")


def _parse_stdio(where: str, value: object) -> tuple[str, ...]:
    """Parse a command: a string in shell syntax, or a list of words."""
    if isinstance(value, str):
        return _split_command(value, where)
    if isinstance(value, list) and value and all(isinstance(word, str) for word in value):
        return tuple(value)
    raise UsageError(f"{where}: `stdio` must be a string or a list of strings")


def _parse_pins(where: str, value: object) -> tuple[str, ...]:
    """Parse one fingerprint, or a list of those that are accepted."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(pin, str) for pin in value):
        return tuple(value)
    raise UsageError(f"{where}: `pin` must be a string or a list of strings")


def _resolve_path(value: str, file: Path) -> str:
    """Expand `~`, and make a path relative to the directory of targets.toml absolute."""
    return str(file.parent / os.path.expanduser(value))


def _read_token_file(path: str) -> str:
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_TOKEN_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read the token file {path}: {error.strerror}") from None
    if len(content) > MAX_TOKEN_BYTES:
        raise UsageError(f"the token file {path} has more than {MAX_TOKEN_BYTES} bytes")
    try:
        token = content.decode("ascii").strip()
    except UnicodeDecodeError:
        raise UsageError(f"the token file {path} contains non-ASCII characters") from None
    if not token:
        raise UsageError(f"the token file {path} is empty")
    return token


def write_private_file(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace a file at once; its directory is created for the user alone. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def with_access_flags(parser: _Parser) -> _Parser:
    """Add the group of flags to a parser, and return it."""
    group = parser.add_argument_group(
        "access", "For targets without a name; for named ones they override targets.toml."
    )
    for name, keywords in ACCESS_FLAGS.items():
        group.add_argument(f"--{name.replace('_', '-')}", **keywords)
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


_DESCRIPTION: Final = """\
List the targets of ~/.config/exec-server/targets.toml (or $XDG_CONFIG_HOME/exec-server/
targets.toml). Create the file yourself; each table defines one target:

  [build]
  url = "wss://build.example.net:7700"
  token_file = "build.token"           # or token_env; relative to targets.toml
  ca_file = "build-ca.pem"             # root certificate of a private authority

  [self-signed]
  url = "wss://192.168.1.20:7700"
  token_file = "lan.token"
  pin = "sha256:…"                     # the fingerprint that `exec-server tls-init` prints

  [same-user]
  url = "unix:/run/user/1000/exec-server.sock"

  [lab]
  stdio = "ssh lab exec-server --listen stdio"

  [behind-nat]
  registry = "https://registry.example.net"
  environment_id = "build-7"
  token_env = "REGISTRY_TOKEN"
  executor_key = "sha256:…"            # accept this key only: the registry need not be trusted
"""
_EPILOG: Final = """\
examples:
  exec-server targets --names
  exec-server targets --json | jq -r '.[].address'
"""


def build_parser() -> CommandParser:
    parser = CommandParser("targets", _DESCRIPTION, _EPILOG)
    format_group = parser.add_mutually_exclusive_group()
    format_group.add_argument("--names", action="store_true", help="print only the names")
    format_group.add_argument(
        "--json", action="store_true", help="print a JSON list instead of text"
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print name and address of each target; returns the exit code."""
    known = load_targets()
    if arguments.json:
        rows = [{"name": name, "address": known[name].address} for name in sorted(known)]
        print_text(json_text(rows))
        return 0
    width = max(map(len, known), default=0)
    for name, target in sorted(known.items()):
        print_text(f"{name}\n" if arguments.names else f"{name:{width}}  {target.address}\n")
    if not known and not arguments.names:
        print_status(f"{targets_file()} defines no targets; see `exec-server targets -h`")
    return 0
