"""Which command lines of `exec` are plain enough to be run without an event loop.

A parser of its own: argparse takes longer to import than such a command takes to run. It knows the
most frequent options, and leaves every other command line, and every error, to the whole command.
"""

from __future__ import annotations

import os
import re
from typing import Final, NamedTuple

from exec_server.cli.commands.errors import UsageError
from exec_server.cli.commands.targets import AccessOptions, Target, find_target
from exec_server.cli.commands.variables import command_variables

_FLAGS: Final = frozenset({"-n", "--no-stdin"})
_VALUES: Final = frozenset({"--cwd", "--env", "--token-file", "--token-env"})
# Connections to addresses of this machine take no proxy, and a token is safe there.
_LOOPBACK_URL: Final = r"ws://(localhost|127\.0\.0\.1):(\d{1,5})/?"


class QuickRequest(NamedTuple):
    """A plain command line of `exec`."""

    target: str
    argv: list[str]
    has_stdin: bool = True
    cwd: str | None = None
    env: tuple[str, ...] = ()
    token_file: str | None = None
    token_env: str | None = None


class Address(NamedTuple):
    """Where to connect: the path of a unix socket, or an address with a port."""

    host: str
    port: int | None
    token: str | None


def parse(words: list[str]) -> QuickRequest | None:
    """The plain command line in `words`; None for any other, wrong ones included."""
    values: dict[str, list[str]] = {name: [] for name in _VALUES}
    has_stdin = True
    target: str | None = None
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if word in _VALUES and position < len(words):
            values[word].append(words[position])
            position += 1
        elif word in _FLAGS:
            has_stdin = False
        elif word == "--" and target is not None:
            return _request(target, words[position:], values, has_stdin=has_stdin)
        elif word.startswith("-") or not word:
            return None
        elif target is None:
            target = word
        else:
            return _request(target, words[position - 1 :], values, has_stdin=has_stdin)
    return None


def _request(
    target: str, argv: list[str], values: dict[str, list[str]], *, has_stdin: bool
) -> QuickRequest | None:
    given = [value for each in values.values() for value in each]
    if not argv or not argv[0] or any(value.startswith("-") for value in given):
        return None
    cwd = _last(values["--cwd"])
    if cwd is not None and not cwd.startswith("/"):
        return None  # it is resolved with the directories of the server
    return QuickRequest(
        target,
        argv,
        has_stdin,
        cwd,
        tuple(values["--env"]),
        _last(values["--token-file"]),
        _last(values["--token-env"]),
    )


def _last(values: list[str]) -> str | None:
    return values[-1] if values else None


def find_address(request: QuickRequest) -> Address | None:
    """Where the target of a request listens; None unless it is a plain server of this machine."""
    if request.token_file is not None and request.token_env is not None:
        return None
    access = AccessOptions(token_file=request.token_file, token_env=request.token_env)
    try:
        target = find_target(request.target, access)
        return _address(target, target.access)
    except UsageError:
        return None


def _address(target: Target, access: AccessOptions) -> Address | None:
    if target.url is None or access.pins or access.ca_file is not None:
        return None
    if target.url.startswith("unix:/"):
        path = target.url.removeprefix("unix:").removeprefix("//")
        # The kernel refuses longer paths; control characters are refused by the whole command.
        if not path.startswith("/") or not path.isprintable() or len(os.fsencode(path)) > 107:
            return None
        return Address(path, None, access.read_token())
    match = re.fullmatch(_LOOPBACK_URL, target.url)
    if match is None or not 0 < int(match[2]) < 65_536:
        return None
    return Address(match[1], int(match[2]), access.read_token())


def variables(request: QuickRequest) -> dict[str, str] | None:
    """The variables for the command; None if they are wrong."""
    try:
        return command_variables(request.env, tty=False)
    except UsageError:
        return None
