"""`exec-server targets`, `targets add` and `targets remove`: the targets of targets.toml.

The file is changed as a text, because its comments and their places are the user's. Its new content
is parsed before it takes the place of the old one: nothing but the one table may have changed.
"""

from __future__ import annotations

import argparse
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

from exec_server.cli.errors import CommandError, UsageError
from exec_server.cli.parser import ArgumentParser, CommandParser
from exec_server.cli.streams import json_text, print_status, print_text
from exec_server.cli.targets import access_options, with_access_flags
from exec_server.client.configuration import (
    MAX_FILE_BYTES,
    changing,
    read_configuration,
    targets_file,
    write_private_file,
)
from exec_server.client.targets import (
    PATH_KEYS,
    AccessOptions,
    Target,
    check_name,
    find_target,
    load_targets,
    parse_targets,
)
from exec_server.errors import StartupError

_DESCRIPTION: Final = """\
List the targets of ~/.config/exec-server/targets.toml (or $XDG_CONFIG_HOME/exec-server/
targets.toml), or change the file:

  exec-server targets add NAME ADDRESS    add a target; its flags become keys of the table
  exec-server targets remove NAME...      remove targets

You can write the file yourself too; each table defines one target:

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
  exec-server targets add build wss://build.example.net:7700 --token-file build.token
"""
_ADD_DESCRIPTION: Final = """\
Add a target to targets.toml, under a name of your choice. Comments and the order of the file stay
as they are. ADDRESS is a target without a name:

  ws://HOST:PORT  wss://HOST  unix:/PATH  'stdio:COMMAND WORDS'  relay:https://REGISTRY/ENVIRONMENT
"""
_ADD_EPILOG: Final = """\
examples:
  exec-server targets add build wss://build.example.net:7700 --token-file build.token
  exec-server targets add lab 'stdio:ssh lab exec-server --listen stdio'
  exec-server targets add --force build ws://127.0.0.1:7700
"""
_REMOVE_DESCRIPTION: Final = """\
Remove targets from targets.toml; comments outside of their tables stay.
"""
_REMOVE_EPILOG: Final = """\
examples:
  exec-server targets remove build
"""
_ADDRESSES: Final = ("ws://", "wss://", "unix:", "stdio:", "relay:")


class _VerbParser(ArgumentParser):
    def help_command(self) -> str:
        return f"{self.prog} -h"


class _TargetsParser(CommandParser):
    verbs = ("add", "remove")

    def error(self, message: str) -> NoReturn:
        if message.startswith("argument VERB: invalid choice"):
            message += "; without a verb the targets are listed"
        super().error(message)


def build_parser() -> CommandParser:
    parser = _TargetsParser("targets", _DESCRIPTION, _EPILOG)
    format_group = parser.add_mutually_exclusive_group()
    format_group.add_argument("--names", action="store_true", help="print only the names")
    format_group.add_argument(
        "--json", action="store_true", help="print a JSON list instead of text"
    )
    actions = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=_VerbParser)
    add = actions.add_parser(
        "add", help="add a target", description=_ADD_DESCRIPTION, epilog=_ADD_EPILOG
    )
    add.add_argument("name", metavar="NAME")
    add.add_argument("address", metavar="ADDRESS")
    add.add_argument("--force", action="store_true", help="replace a target of this name")
    with_access_flags(add, "They are stored, and used whenever the name is.")
    remove = actions.add_parser(
        "remove", help="remove targets", description=_REMOVE_DESCRIPTION, epilog=_REMOVE_EPILOG
    )
    remove.add_argument("removed", metavar="NAME", nargs="+")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """List the targets, or change them; returns the exit code."""
    if arguments.verb is None:
        _list(arguments)
    elif arguments.names or arguments.json:
        raise UsageError(f"--names and --json are for the list, not for {arguments.verb}")
    elif arguments.verb == "add":
        _add(arguments)
    else:
        _remove(list(dict.fromkeys(arguments.removed)))
    return 0


def _list(arguments: argparse.Namespace) -> None:
    """Print name and address of each target."""
    known = load_targets()
    if arguments.json:
        rows = [{"name": name, "address": known[name].address} for name in sorted(known)]
        print_text(json_text(rows))
        return
    width = max(map(len, known), default=0)
    for name, target in sorted(known.items()):
        print_text(f"{name}\n" if arguments.names else f"{name:{width}}  {target.address}\n")
    if not known and not arguments.names:
        print_status(f"{targets_file()} defines no targets; see `exec-server targets -h`")


def _add(arguments: argparse.Namespace) -> None:
    name = arguments.name
    check_name(name, f"`{name}`")
    if not arguments.address.startswith(_ADDRESSES):
        find_target(arguments.address)  # whose error names the address that was meant
        raise UsageError(f"`{arguments.address}` is the name of a target; write an address")
    path = targets_file()
    with changing(path):
        _add_to(path, arguments)
    print_text(
        f"Added {name} to {path}. Try it:\n"
        f"  exec-server info {name}\n"
        f"  exec-server exec {name} -- uname -a\n"
    )


def _add_to(path: Path, arguments: argparse.Namespace) -> None:
    name = arguments.name
    text, known, is_exposed = _read(path)
    if name in known and not arguments.force:
        raise UsageError(f"{path} has a target `{name}` already; --force replaces it")
    table = new_table(arguments.address, access_options(arguments))
    changed = with_table(text, name, table)
    target = _parse(path, changed, is_exposed, name)[name]
    _check(target)
    _write(path, changed, known | {name: target}, is_exposed, name)


def _remove(names: list[str]) -> None:
    path = targets_file()
    with changing(path):
        _remove_from(path, names)
    print_text(f"Removed {', '.join(names)} from {path}.\n")


def _remove_from(path: Path, names: list[str]) -> None:
    text, known, is_exposed = _read(path)
    if missing := [name for name in names if name not in known]:
        listed = ", ".join(sorted(known)) or "no targets"
        raise CommandError(f"there is no target `{missing[0]}`; {path} defines {listed}")
    for name in names:
        del known[name]
        text = without_table(text, name)
    _write(path, text, known, is_exposed, ", ".join(names))


def new_table(address: str, access: AccessOptions) -> dict[str, Any]:
    """The keys of a table; files are named by absolute paths, as the user is in some directory."""
    command = address.removeprefix("stdio:")
    table: dict[str, Any] = {"url": address} if command == address else {"stdio": command}
    for key, value in access._asdict().items():
        if value is None or value is False or value == ():
            continue
        table[key] = os.path.abspath(value) if key in PATH_KEYS else value
    if len(access.pin) == 1:
        table["pin"] = access.pin[0]
    return table


def with_table(text: str, name: str, table: Mapping[str, Any]) -> str:
    """The text with a table in the place of the one of this name, or else at its end."""
    import tomli_w

    written = tomli_w.dumps({name: table}).rstrip("\n").split("\n")
    lines = text.rstrip("\n").split("\n") if text.strip() else []
    place = _find_table(lines, name)
    if place is None:
        lines += [*([""] if lines else []), *written]
    else:
        lines[place] = written
    return "\n".join([*lines, ""])


def without_table(text: str, name: str) -> str:
    """The text without a table; comments before and behind it stay."""
    lines = text.split("\n")
    place = _find_table(lines, name)
    if place is None:
        return text
    del lines[place]
    before = lines[place.start - 1 : place.start]
    if not "".join(before).strip() and not "".join(lines[place.start : place.start + 1]).strip():
        del lines[place.start : place.start + 1]  # one blank line is enough
    return "\n".join(lines)


def _find_table(lines: list[str], name: str) -> slice | None:
    """The lines of a table, to its last one that is neither blank nor a comment."""
    headings = {number: _heading(line) for number, line in enumerate(lines)}
    begin = next((number for number, each in headings.items() if each == name), None)
    if begin is None:
        return None
    later = (number for number, each in headings.items() if number > begin and each is not None)
    end = next(later, len(lines))
    while not lines[end - 1].strip() or lines[end - 1].lstrip().startswith("#"):
        end -= 1
    return slice(begin, end)


def _heading(line: str) -> str | None:
    """The name in the heading of a table."""
    import tomllib

    if not line.lstrip().startswith("["):
        return None
    try:
        return next(iter(tomllib.loads(line.strip())))
    except tomllib.TOMLDecodeError:
        return None  # the line of a list


def _read(path: Path) -> tuple[str, dict[str, Target], bool]:
    """The text of the file, its targets, and whether other users can read it."""
    configuration = read_configuration(path)
    if configuration is None:
        return "", {}, False
    content, is_exposed = configuration
    known = parse_targets(path, content, is_exposed)
    return content.decode(), known, is_exposed


def _check(target: Target) -> None:
    """Raise StartupError for an address or options that no connection could be made with."""
    from exec_server.client.arguments import retention_seconds
    from exec_server.client.connect import make_dialer

    access = target.access
    retention_seconds(access.retention)
    if access.token_file is not None:
        access.read_token()
    has_token = access.has_token or target.registry is not None
    access = access._replace(token="unused" if has_token else None, token_file=None, token_env=None)
    make_dialer(target._replace(access=access))


def _parse(path: Path, text: str, is_exposed: bool, names: str) -> dict[str, Target]:
    try:
        return parse_targets(path, text.encode(), is_exposed)
    except StartupError as error:
        if "is not TOML" not in str(error):
            raise
        raise _unchanged(path, names) from None


def _unchanged(path: Path, names: str) -> CommandError:
    return CommandError(
        f"{path} was not changed: {names} is not written as a table with a heading of its own; "
        "change it in an editor"
    )


def _write(
    path: Path, text: str, wanted: Mapping[str, Target], is_exposed: bool, names: str
) -> None:
    """Replace the file if the text has the wanted targets; raises CommandError."""
    if _parse(path, text, is_exposed, names) != wanted:
        raise _unchanged(path, names)
    content = text.encode()
    if len(content) > MAX_FILE_BYTES:
        raise CommandError(f"{path} would have more than {MAX_FILE_BYTES} bytes")
    real = Path(os.path.realpath(path))  # a link stays one
    try:
        mode = stat.S_IMODE(real.stat().st_mode) if real.exists() else 0o600
        write_private_file(real, content, mode)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from None
